#include "coordinator/membership/encoding.h"

#include <utility>
#include <vector>

#include "coordinator/membership/membership.pb.h"

namespace farandole {
namespace {

namespace wire = membership::wire;

using Ids = google::protobuf::RepeatedField<uint64_t>;

Status Malformed(const std::string& what) { return Internal("membership message: " + what); }

void Write(const Member& member, wire::Member& out) {
  out.set_id(member.id);
  out.set_address(member.address);
  out.set_host(member.host);
}

void Write(const GenerationNumber& generation, wire::Generation& out) {
  out.set_number(generation.number);
  out.set_proposer(generation.proposer);
}

void Write(const std::set<MemberId>& ids, Ids& out) { out.Assign(ids.begin(), ids.end()); }

void Write(const MemberList& list, wire::MemberList& out) {
  Write(list.generation, *out.mutable_generation());
  for (const Member& member : list.members) Write(member, *out.add_members());
  out.set_root(list.root);
  for (const auto& [id, member] : list.left_out) Write(member, *out.add_left_out());
  Write(list.newcomers, *out.mutable_newcomers());
  Write(list.without_vote, *out.mutable_without_vote());
  for (const auto& [id, accepted] : list.rests_on) {
    wire::Reported& reported = *out.add_rests_on();
    reported.set_id(id);
    Write(accepted, *reported.mutable_accepted());
  }
}

GenerationNumber Read(const wire::Generation& in) { return {in.number(), in.proposer()}; }

std::set<MemberId> Read(const Ids& in) { return {in.begin(), in.end()}; }

/// Reads fields; the first that breaks a limit is kept as the error, and what follows is ignored.
class Reader {
 public:
  Member ReadMember(const wire::Member& in) {
    if (in.id() == 0) Refuse("a member without an id");
    if (in.address().size() > kMaxAddressBytes || in.host().size() > kMaxAddressBytes) {
      Refuse("an address or a host of more than " + std::to_string(kMaxAddressBytes) + " bytes");
    }
    return {in.id(), in.address(), in.host()};
  }

  MemberList ReadList(const wire::MemberList& in, const char* field) {
    MemberList list = {.generation = Read(in.generation()), .root = in.root()};
    if (in.members_size() > kMaxMembers) {
      Refuse(std::string(field) + " has " + std::to_string(in.members_size()) + " members, limit " +
             std::to_string(kMaxMembers));
      return list;
    }
    if (in.left_out_size() > kMaxMembers) {
      Refuse(std::string(field) + " leaves out " + std::to_string(in.left_out_size()) +
             " members, limit " + std::to_string(kMaxMembers));
      return list;
    }
    if (in.root().size() > kMaxAddressBytes) Refuse(std::string(field) + "'s root is too long");
    std::set<MemberId> ids;
    for (const wire::Member& member : in.members()) {
      list.members.push_back(ReadMember(member));
      if (!ids.insert(member.id()).second) Refuse(std::string(field) + " has a member twice");
    }
    for (const wire::Member& member : in.left_out()) {
      list.left_out.emplace(member.id(), ReadMember(member));
    }
    list.newcomers = Read(in.newcomers());
    list.without_vote = Read(in.without_vote());
    for (const wire::Reported& reported : in.rests_on()) {
      list.rests_on[reported.id()] = Read(reported.accepted());
    }
    return list;
  }

  void Refuse(const std::string& what) {
    if (status_.ok()) status_ = Malformed(what);
  }
  const Status& status() const { return status_; }

 private:
  Status status_;
};

}  // namespace

std::string EncodeMembership(const MembershipMessage& message) {
  wire::Message out;
  out.set_kind(static_cast<uint32_t>(message.kind));
  Write(message.sender, *out.mutable_sender());
  Write(message.started, *out.mutable_started());
  out.set_has_computed(message.has_computed);
  for (const MemberList& list : message.pending) Write(list, *out.add_pending());
  Write(message.accepted, *out.mutable_accepted());
  Write(message.dead, *out.mutable_dead());
  Write(message.suspects, *out.mutable_suspects());
  Write(message.proposal, *out.mutable_proposal());
  return out.SerializeAsString();
}

Result<MembershipMessage> DecodeMembership(std::span<const std::byte> bytes) {
  wire::Message in;
  if (bytes.size() > kMaxMembershipBytes ||
      !in.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) {
    return Malformed(std::to_string(bytes.size()) + " bytes are none");
  }
  if (in.kind() < static_cast<uint32_t>(MembershipMessage::Kind::kReport) ||
      in.kind() > static_cast<uint32_t>(MembershipMessage::Kind::kPing)) {
    return Malformed("kind " + std::to_string(in.kind()) + " is unknown");
  }
  if (in.pending_size() > kMaxPendingLists) {
    return Malformed(std::to_string(in.pending_size()) + " pending lists, limit " +
                     std::to_string(kMaxPendingLists));
  }
  Reader reader;
  MembershipMessage message = {.kind = static_cast<MembershipMessage::Kind>(in.kind()),
                               .sender = reader.ReadMember(in.sender()),
                               .started = reader.ReadList(in.started(), "started"),
                               .has_computed = in.has_computed(),
                               .accepted = Read(in.accepted()),
                               .dead = Read(in.dead()),
                               .suspects = Read(in.suspects()),
                               .proposal = reader.ReadList(in.proposal(), "proposal")};
  for (const wire::MemberList& list : in.pending()) {
    message.pending.push_back(reader.ReadList(list, "pending"));
  }
  if (!reader.status().ok()) return reader.status();
  return message;
}

}  // namespace farandole
