# Copies a source of coordinator/ and puts the switches of broken_rules.h into it, so that
# the sources themselves need none:
#
#   cmake -D SOURCE=<.../decider.cc> -D COPY=<...> -P break_rules.cmake
#
# Each break_rule() below replaces a snippet that must occur exactly once. Where it does not, the
# source has changed: the build fails and names the rule, whose snippet is then to be written anew.

file(READ "${SOURCE}" text)
get_filename_component(source_name "${SOURCE}" NAME)

function(break_rule rule file snippet broken)
  if(NOT file STREQUAL source_name)
    return()
  endif()
  string(FIND "${text}" "${snippet}" first)
  string(FIND "${text}" "${snippet}" last REVERSE)
  if(first EQUAL -1 OR NOT first EQUAL last)
    message(FATAL_ERROR "test/simulation/break_rules.cmake: the snippet of ${rule} must occur "
                        "exactly once in ${SOURCE}:\n${snippet}")
  endif()
  string(REPLACE "${snippet}" "${broken}" text "${text}")
  set(text "${text}" PARENT_SCOPE)
endfunction()

break_rule("kRefuseEarly and kSendKeyPerVote" vote_tally.cc
[=[  if (!IsComplete(round, set)) return;
]=]
[=[  const bool mixed = round.detailed && round.detail->signatures.size() > 1;
  const bool early =
      (Broken(kSendKeyPerVote) && !node_.IsRoot()) || (Broken(kRefuseEarly) && mixed);
  if (!early && !IsComplete(round, set)) return;
]=])

break_rule(kStepsAreRounds applier.cc
[=[  if (!is_step) set->last_round = message.number;
]=]
[=[  if (!is_step || Broken(kStepsAreRounds)) set->last_round = message.number;
]=])

break_rule(kFreeIdsAtOnce applier.cc
[=[  if (set.awaited > 0) return;
]=]
[=[  if (set.awaited > 0 && !Broken(kFreeIdsAtOnce)) return;
]=])
break_rule(kFreeIdsAtOnce applier.cc
[=[  if (!is_awaited) {
]=]
[=[  if (!is_awaited && Broken(kFreeIdsAtOnce)) return {};
  if (!is_awaited) {
]=])

break_rule(kDeriveAbsentFromJoined vote_tally.cc
[=[  if (set.joined == 0) return;
]=]
[=[  if (set.joined == 0 || Broken(kDeriveAbsentFromJoined)) return;
]=])
break_rule(kDeriveAbsentFromJoined decider.cc
[=[  if (by_id) {
]=]
[=[  if (by_id && !Broken(kDeriveAbsentFromJoined)) {
]=])
break_rule(kDeriveAbsentFromJoined decider.cc
[=[  return item;
]=]
[=[  if (Broken(kDeriveAbsentFromJoined)) {
    const Signature& signature = ready.cached ? ready.cached->signature : item.signature;
    const Mask full = FullMask(static_cast<int>(signature.tensors.size()));
    item.absent.clear();
    for (const int32_t rank : node_.sets.Find(key.name.set)->info.ranks) {
      if (node_.sets.Joined(rank)) item.absent.push_back({rank, full});
    }
  }
  return item;
]=])

break_rule(kJoinBeforeVotes vote_tally.cc
[=[  node_.sets.MarkJoined(rank);
]=]
[=[  if (Broken(kJoinBeforeVotes) && !node_.IsRoot()) SendRank(UpType::kJoin, rank);
  node_.sets.MarkJoined(rank);
]=])
break_rule(kJoinBeforeVotes vote_tally.cc
[=[  if (node_.IsRoot()) return {};
  SendVotes();
]=]
[=[  if (node_.IsRoot() || Broken(kJoinBeforeVotes)) return {};
  SendVotes();
]=])

break_rule(kJoinDoneEarly decider.cc
[=[  if (!active_.empty()) return;
]=]
[=[  if (!active_.empty() && !Broken(kJoinDoneEarly)) return;
]=])

# Half of a group's tensors are left to a second decision.
break_rule(kSplitGroup decider.cc
[=[  Broadcast();
  TrackBatches(index);
]=]
[=[  if (Broken(kSplitGroup) && down_.ids.empty() && down_.items.size() == 1) {
    WorkItem second = down_.items.front();
    const Signature& signature =
        second.id == kNoId ? second.signature : node_.keys.ById(second.id)->signature;
    const auto tensors = static_cast<int>(signature.tensors.size());
    if (tensors > 1) {
      Mask& skipped = down_.items.front().skipped;
      for (int t = 0; t < tensors; ++t) {
        SetBit(t < tensors / 2 ? second.skipped : skipped, t, tensors);
      }
      second.bind = kNoId;
      Broadcast();
      TrackBatches(index);
      NewDecision(DownType::kWork, index / kDeviceKindCount).items.push_back(std::move(second));
    }
  }
  Broadcast();
  TrackBatches(index);
]=])

break_rule(kReporterIgnoresAbsent applier.cc
[=[    const int32_t reporter = ReporterOf(set.info.ranks, plans[i].absent);
]=]
[=[    const int32_t reporter = Broken(kReporterIgnoresAbsent)
                                 ? set.info.ranks.front()
                                 : ReporterOf(set.info.ranks, plans[i].absent);
]=])

# Below rank 0 a decision is forwarded at once and comes back from Flush to be applied.
break_rule(kForwardBeforeApply applier.cc
[=[  FARANDOLE_RETURN_IF_ERROR(Apply(message));
  Forward(message);
]=]
[=[  std::deque<DownMessage>& late = late_decisions[this];
  const bool is_late = !late.empty() && &message == &late.front();
  if (Broken(kForwardBeforeApply) && !node_.IsRoot() && !is_late) {
    Forward(message);
    late.push_back(message);
    return {};
  }
  FARANDOLE_RETURN_IF_ERROR(Apply(message));
  if (!is_late) Forward(message);
]=])
break_rule(kForwardBeforeApply negotiation.cc
[=[void Negotiation::Flush() {
]=]
[=[void Negotiation::Flush() {
  for (auto& late = late_decisions[&components_->applier]; !late.empty(); late.pop_front()) {
    (void)components_->applier.Dispatch(late.front());  // the simulator sees what comes of it
  }
]=])

break_rule(kJoinWhenIdle negotiation.cc
[=[  Decider decider;
]=]
[=[  Decider decider;
  bool held_join = false;
]=])
break_rule(kJoinWhenIdle negotiation.cc
[=[  return components_->tally.Join(node.options.rank);
]=]
[=[  components_->held_join = Broken(kJoinWhenIdle) && node.pending > 0;
  return components_->held_join ? Status() : components_->tally.Join(node.options.rank);
]=])
break_rule(kJoinWhenIdle negotiation.cc
[=[void Negotiation::Flush() {
]=]
[=[void Negotiation::Flush() {
  if (components_->held_join && Pending() == 0) {
    components_->held_join = false;
    (void)components_->tally.Join(components_->node.options.rank);  // was held
  }
]=])

break_rule(kJoinEndOvertakes negotiation.cc
[=[  components_->decider.DecideBefore(message);
]=]
[=[  const bool overtakes = Broken(kJoinEndOvertakes) && message.type == DownType::kJoinDone;
  if (!overtakes) components_->decider.DecideBefore(message);
]=])

break_rule(kMeetLateIds vote_tally.cc
[=[  if (node_.keys.IsLate(id, number)) return {};
]=]
[=[
  const bool is_met = Broken(kMeetLateIds) && node_.keys.ById(id) != nullptr;
  if (node_.keys.IsLate(id, number) && !is_met) return {};
]=])

# --- membership ---

break_rule(kHalfWithoutFirst membership.cc
[=[  return 2 * present > voters || (2 * present == voters && holds_first);
]=]
[=[  holds_first |= Broken(kHalfWithoutFirst);
  return 2 * present > voters || (2 * present == voters && holds_first);
]=])
break_rule(kDeathsShrinkQuorums membership.cc
[=[  if (present > 0 && present + lost == voters) return true;
]=]
[=[  if (Broken(kDeathsShrinkQuorums)) voters -= lost;
  if (present > 0 && present + lost == voters) return true;
]=])
break_rule(kSuspectsAreDead membership.cc
[=[  dead_.insert(dead.begin(), dead.end());
]=]
[=[  dead_.insert(dead.begin(), dead.end());
  if (Broken(kSuspectsAreDead)) dead_.insert(suspects.begin(), suspects.end());
]=])
break_rule(kForgetPending membership.cc
[=[  pending_.push_back(list);
]=]
[=[  if (!Broken(kForgetPending)) pending_.push_back(list);
]=])
break_rule(kVoteWhileLeftOut membership.cc
[=[  std::set<MemberId>& others = next.left_out.empty() ? next.newcomers : next.without_vote;
]=]
[=[  const bool is_whole = next.left_out.empty() || Broken(kVoteWhileLeftOut);
  std::set<MemberId>& others = is_whole ? next.newcomers : next.without_vote;
]=])
break_rule(kVoteAtOnce membership.cc
[=[           return IsQuorum(here, list, dead_, false);
]=]
[=[           return IsQuorum(here, list, dead_, Broken(kVoteAtOnce));
]=])
break_rule(kWaitForEver membership.cc
[=[  if (IsGathering() && (now_ns_ - hope_ns_ >= options_.halt_ns || IsHopeless())) HaltAsMinority();
]=]
[=[  if (Broken(kWaitForEver)) return;
  if (IsGathering() && (now_ns_ - hope_ns_ >= options_.halt_ns || IsHopeless())) HaltAsMinority();
]=])
break_rule(kPingNobody membership.cc
[=[  const std::vector<Member> watched = Watched();
]=]
[=[  const std::vector<Member> watched = Broken(kPingNobody) ? std::vector<Member>() : Watched();
]=])
break_rule(kLetJoinsWait membership.cc
[=[  const GenerationNumber& joining = message.proposal.generation;
]=]
[=[  if (Broken(kLetJoinsWait)) return;
  const GenerationNumber& joining = message.proposal.generation;
]=])
break_rule(kAwaitSilentLeader membership.cc
[=[  GiveUpJoinWith({to.id});
]=]
[=[  const bool is_mine = proposal_.proposal.generation == joining_.generation;
  if (is_mine || !Broken(kAwaitSilentLeader)) GiveUpJoinWith({to.id});
]=])
break_rule(kGiveNoVotes membership.cc
[=[  return gives_votes || !askers().empty();
]=]
[=[  return (gives_votes && !Broken(kGiveNoVotes)) || !askers().empty();
]=])
break_rule(kCountOutdated membership.cc
[=[    const bool is_outdated = reported != list.rests_on.end() && accepted > reported->second;
]=]
[=[    const bool is_outdated = reported != list.rests_on.end() && accepted > reported->second &&
                             !Broken(kCountOutdated);
]=])

file(WRITE "${COPY}" "// Made of ${source_name} by test/simulation/break_rules.cmake.\n"
                     "#include \"test/simulation/broken_rules.h\"\n${text}")
