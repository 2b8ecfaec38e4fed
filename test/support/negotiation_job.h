// A job of negotiations in one thread, for tests: its ranks keep what they say until the job
// delivers it.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "coordinator/diagnosis/detectors.h"
#include "coordinator/diagnosis/stall_report.h"
#include "coordinator/protocol/negotiation.h"

namespace farandole {

inline Signature Float(std::vector<int64_t> shape) {
  Signature signature;
  signature.tensors.push_back({"", DType::kFloat32, std::move(shape)});
  return signature;
}

inline Mask Bits(uint64_t word) { return {word}; }

/// One rank: a negotiation and what it said. Messages wait in `up` and `down`, reused.
class JobRank : public NegotiationListener, private DetectorListener {
 public:
  explicit JobRank(NegotiationOptions options)
      : negotiation(std::move(options), *this, Detectors(*this)) {}

  void SendUp(int parent, const UpMessage& message) override { Put(up, up_used, parent, message); }
  void SendDown(int child, const DownMessage& message) override {
    if (message.type == DownType::kWhoWaits) ++questions;
    Put(down, down_used, child, message);
  }
  void OnWork(const WorkDecision& work) override {
    ++works;
    number = work.number;
    keys = static_cast<int>(work.keys.size());
    plans = static_cast<int>(work.plans.size());
    rows.assign(work.keys.front().rows.begin(), work.keys.front().rows.end());
    if (!log_works) return;
    running.push_back(work.number);
    absent.assign(work.keys.front().absent.begin(), work.keys.front().absent.end());
    skipped = *work.keys.front().skipped;
    mine = work.keys.front().mine;
  }
  void OnEnded(KeyId, const Status& status) override { ended.push_back(status); }
  void OnSetAdded(const ProcessSetInfo& set) override { added.push_back(set); }
  void OnSetEnded(uint32_t set, const Status& why) override { over.emplace_back(set, why); }
  bool Holds(KeyId) const override { return true; }
  void OnJoinDone(int last) override { last_joined = last; }
  void OnLeft(int rank) override { left.push_back(rank); }
  void OnShutdown() override { shut_down = true; }
  void OnReport(const std::string& text) override { reports.push_back(text); }
  std::vector<std::string> OnStalls(const std::vector<StallFacts>& stalls, int64_t) override {
    std::vector<std::string> lines;
    for (const StallFacts& stall : stalls) lines.push_back(DescribeStall(stall));
    return lines;
  }
  void OnStallShutdown(const Status& error) override {
    shutdowns.push_back(error.message());
    failed = error;
  }
  bool IsBlocked() const override { return is_blocked; }
  bool KnowsAllThreads() const override { return knows_all_threads; }
  bool AskActivity(std::vector<uint64_t>, int64_t) override {
    ++asked;
    return tells_activity;
  }
  std::optional<Activity> FindActivity(int64_t) override { return activity; }

  template <class Message>
  using Box = std::vector<std::pair<int, Message>>;
  template <class Message>
  static void Put(Box<Message>& box, size_t& used, int to, const Message& message) {
    if (used == box.size()) box.emplace_back();
    box[used].first = to;
    box[used++].second = message;
  }

  Negotiation negotiation;
  Box<UpMessage> up;
  Box<DownMessage> down;
  size_t up_used = 0;
  size_t down_used = 0;
  int works = 0;
  int64_t number = 0;
  int keys = 0;
  int plans = 0;                 // that came with it
  std::vector<int64_t> running;  // numbers, of which the test says when they are done
  bool log_works = true;
  std::vector<RankMask> absent;
  std::vector<int64_t> rows;
  Mask skipped;
  bool mine = false;
  std::vector<Status> ended;
  std::vector<ProcessSetInfo> added;
  std::vector<std::pair<uint32_t, Status>> over;
  int last_joined = -1;
  std::vector<int> left;
  bool shut_down = false;
  std::vector<std::string> reports;
  std::vector<std::string> shutdowns;
  Status failed;  // the last of them
  bool is_blocked = false;
  bool tells_activity = false;
  bool knows_all_threads = true;
  int asked = 0;      // what its program does
  int questions = 0;  // it asked who waits
  std::optional<Activity> activity;
};

/// All ranks under rank 0, or in a tree; messages move only in Settle, those of the highest rank
/// first.
class NegotiationJob {
 public:
  explicit NegotiationJob(int size, NegotiationOptions options = {}) {
    options.size = size;
    if (options.parent.empty()) options.parent.assign(static_cast<size_t>(size), 0);
    options.parent[0] = -1;
    options.planes = {0, 0};
    for (options.rank = 0; options.rank < size; ++options.rank) {
      ranks_.push_back(std::make_unique<JobRank>(options));
    }
  }
  virtual ~NegotiationJob() = default;

  JobRank& operator[](int rank) { return *ranks_[static_cast<size_t>(rank)]; }
  Negotiation& At(int rank) { return (*this)[rank].negotiation; }

  Status Submit(int rank, const std::string& name, Signature signature, const Vote& vote = {},
                OpKind kind = OpKind::kAllreduce, uint32_t set = kGlobalSet) {
    signature.kind = kind;
    return At(rank).Submit(At(rank).Intern({set, kind, name}), signature, vote);
  }
  void SubmitAll(const std::string& name, const Signature& signature, const Vote& vote = {},
                 OpKind kind = OpKind::kAllreduce) {
    for (int r = 0; r < size(); ++r) ASSERT_TRUE(Submit(r, name, signature, vote, kind).ok());
  }
  void AddSet(std::vector<int32_t> ranks) {
    Signature signature;
    signature.ranks = std::move(ranks);
    SubmitAll("add", signature, {}, OpKind::kAddSet);
    Settle();
  }
  void Tick(int64_t now_ns) {
    for (const auto& rank : ranks_)
      (void)rank->negotiation.Tick(now_ns);  // the test knows the time
    Settle();
  }

  /// Delivers everything; each rank flushes between messages.
  void Settle() {
    for (bool moved = true; moved;) {
      moved = false;
      for (int r = size() - 1; r >= 0; --r) moved |= Drain(r);
    }
  }
  /// The batches of the last decision are done everywhere.
  void Finish(int32_t batches = 1) {
    for (const auto& rank : ranks_) {
      for (int32_t i = 0; i < batches; ++i) rank->negotiation.BatchDone(rank->number, i);
    }
    Settle();
  }
  /// The key that ended last did so on every rank alike.
  void ExpectEnd(Code code, const testing::Matcher<std::string>& text) {
    for (const auto& rank : ranks_) {
      ASSERT_FALSE(rank->ended.empty());
      EXPECT_EQ(rank->ended.back().code(), code);
      EXPECT_THAT(rank->ended.back().message(), text);
    }
  }
  int size() const { return static_cast<int>(ranks_.size()); }
  int64_t messages() const { return messages_; }
  int64_t records() const { return records_; }

 private:
  /// Before the rank sends, and of what it sends.
  virtual void Prepare(int) {}
  virtual void Note(int, int, const UpMessage&) {}
  virtual void Note(int, int, const DownMessage&) {}

  static Status Receive(Negotiation& to, int from, const UpMessage& message) {
    return to.ReceiveUp(from, message);
  }
  static Status Receive(Negotiation& to, int from, const DownMessage& message) {
    return to.ReceiveDown(from, message);
  }
  static size_t Records(const UpMessage& message) { return message.keys.size(); }
  static size_t Records(const DownMessage& message) { return message.items.size(); }
  template <class Message>
  bool Deliver(int from, JobRank::Box<Message>& box, size_t& used) {
    for (size_t i = 0; i < used; ++i) {
      const auto& [to, message] = box[i];
      ++messages_;
      records_ += static_cast<int64_t>(Records(message));
      Note(from, to, message);
      const Status status = Receive(At(to), from, message);
      EXPECT_TRUE(status.ok()) << status.ToString();
    }
    return std::exchange(used, 0) > 0;
  }
  bool Drain(int r) {
    JobRank& rank = (*this)[r];
    Prepare(r);
    rank.negotiation.Flush();
    const bool is_up = Deliver(r, rank.up, rank.up_used);
    return Deliver(r, rank.down, rank.down_used) || is_up;
  }

  std::vector<std::unique_ptr<JobRank>> ranks_;
  int64_t messages_ = 0;
  int64_t records_ = 0;
};

}  // namespace farandole
