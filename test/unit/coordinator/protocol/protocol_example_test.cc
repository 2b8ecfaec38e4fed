// The worked example at the beginning of docs/protocol.md, played by the production negotiation.
// Each test compares the messages with those on the page, and prints what to put there when they
// differ.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "coordinator/control/rendezvous.h"
#include "test/support/negotiation_job.h"
#include "test/support/page.h"

namespace farandole {
namespace {

std::string RankList(const std::vector<int32_t>& ranks) {
  std::string text = ranks.size() == 1 ? "rank" : "ranks";
  for (const int32_t rank : ranks) {
    text += (rank == ranks.front() ? " " : ", ") + std::to_string(rank);
  }
  return text;
}

std::string Absent(const std::vector<RankMask>& absent) {
  std::vector<int32_t> ranks;
  for (const RankMask& one : absent) ranks.push_back(one.rank);
  return ranks.empty() ? "" : ", absent: " + RankList(ranks);
}

std::string Text(const SignatureVotes& votes) {
  const std::string what = votes.id != kNoId ? "id " + std::to_string(votes.id)
                                             : Describe(votes.signature.tensors.front());
  return what + (votes.ranks.empty() ? "" : " from " + RankList(votes.ranks));
}

std::string Text(const KeyVotes& votes) {
  std::string text;
  for (const SignatureVotes& one : votes.signatures) {
    text += (text.empty() ? "" : ", ") + Text(one);
  }
  return DescribeName(votes.key) + ": " + text + Absent(votes.absent);
}

/// The name of a message, in a column of its own.
std::string Column(std::string name) {
  name.resize(12, ' ');
  return name;
}

std::string Text(const UpMessage& message) {
  if (message.type == UpType::kJoin) return Column("Join") + RankList({message.rank});
  if (message.type == UpType::kDone) {
    return Column("Done") + "batch " + std::to_string(message.index) + " of " +
           std::to_string(message.number);
  }
  EXPECT_EQ(message.type, UpType::kVotes);
  std::string text = Column("Votes");
  for (const uint32_t id : message.ids) text += "id " + std::to_string(id);
  for (const KeyVotes& votes : message.keys) text += Text(votes);
  return text;
}

std::string Text(const WorkItem& item) {
  std::string text = "id " + std::to_string(item.id);
  if (item.id == kNoId) {
    text = DescribeName(item.key) + ": " + Describe(item.signature.tensors.front());
  }
  if (item.bind != kNoId) text += ", bind id " + std::to_string(item.bind);
  return text + Absent(item.absent);
}

std::string Text(const DownMessage& message) {
  const std::string number = " " + std::to_string(message.number);
  if (message.type == DownType::kJoinDone) {
    return Column("JoinDone" + number) + "last: " + RankList({message.rank});
  }
  if (message.type == DownType::kRefuse) {
    return Column("Refuse" + number) + DescribeName(message.key);
  }
  EXPECT_EQ(message.type, DownType::kWork);
  std::string text = Column("Work" + number);
  for (const uint32_t id : message.ids) text += "id " + std::to_string(id);
  for (const WorkItem& item : message.items) text += Text(item);
  return text;
}

/// The four ranks of the example. Ranks 0 and 1 share a host, and ranks 2 and 3 another.
class ProtocolExample : public testing::Test {
 protected:
  ProtocolExample() {
    NegotiationOptions options;
    options.size = 4;
    options.parent = MakeTree(std::vector<int>{0, 0, 1, 1});
    options.planes = {0, 0};
    for (options.rank = 0; options.rank < options.size; ++options.rank) {
      ranks_.push_back(std::make_unique<JobRank>(options));
    }
  }

  JobRank& At(int rank) { return *ranks_[static_cast<size_t>(rank)]; }

  void Submit(int rank, int64_t count) {
    Negotiation& negotiation = At(rank).negotiation;
    Signature signature;
    signature.tensors.push_back({"", DType::kFloat32, {count}});
    const KeyId key = negotiation.Intern({kGlobalSet, OpKind::kAllreduce, "w"});
    ASSERT_TRUE(negotiation.Submit(key, signature, Vote()).ok());
  }
  void SubmitAll() {
    for (int rank = 0; rank < 4; ++rank) Submit(rank, 1024);
  }

  /// Delivers all messages, those of the highest rank first, and finishes all batches.
  /// @return A line for each message, in the order in which they were delivered.
  std::string Settle() {
    std::string transcript;
    for (bool moved = true; moved;) {
      moved = false;
      for (int rank = 3; rank >= 0; --rank) {
        const std::string lines = Deliver(rank);
        moved |= !lines.empty();
        transcript += lines;
      }
    }
    return transcript;
  }

  static void Compare(const std::string& part, const std::string& transcript) {
    const std::string wanted = "```\n" + transcript + "```\n";
    EXPECT_TRUE(PartOfPage(FARANDOLE_TEST_DOCS "/protocol.md", part) == wanted)
        << "docs/protocol.md should have as \"" << part << "\":\n"
        << wanted;
  }

 private:
  std::string Deliver(int from) {
    JobRank& rank = At(from);
    for (const int64_t number : std::exchange(rank.running, {})) {
      rank.negotiation.BatchDone(number, 0);
    }
    rank.negotiation.Flush();
    std::string lines;
    const auto add = [&](int to, const std::string& text) {
      lines += std::to_string(from) + " to " + std::to_string(to) + "  " + text + "\n";
    };
    for (const auto& [to, message] : std::span(rank.up).first(std::exchange(rank.up_used, 0))) {
      add(to, Text(message));
      EXPECT_TRUE(At(to).negotiation.ReceiveUp(from, message).ok());
    }
    for (const auto& [to, message] : std::span(rank.down).first(std::exchange(rank.down_used, 0))) {
      add(to, Text(message));
      EXPECT_TRUE(At(to).negotiation.ReceiveDown(from, message).ok());
    }
    return lines;
  }

  std::vector<std::unique_ptr<JobRank>> ranks_;
};

TEST_F(ProtocolExample, ATensorIsUsedForTheFirstSecondAndThirdTime) {
  for (const char* part : {"first use", "second use", "third use"}) {
    SubmitAll();
    Compare(part, Settle());
  }
}

TEST_F(ProtocolExample, RanksDisagreeAndThenSomeJoin) {
  for (int use = 0; use < 3; ++use) {
    SubmitAll();
    Settle();
  }
  for (int rank = 0; rank < 3; ++rank) Submit(rank, 1024);
  Submit(3, 2048);
  Compare("mismatch", Settle());
  for (int rank = 0; rank < 4; ++rank) {
    ASSERT_EQ(At(rank).ended.size(), 1u);
    Compare("error message", At(rank).ended.front().message() + "\n");
  }
  for (const int rank : {0, 3}) ASSERT_TRUE(At(rank).negotiation.Join().ok());
  for (const int rank : {1, 2}) Submit(rank, 1024);
  Compare("join", Settle());
  for (const int rank : {1, 2}) ASSERT_TRUE(At(rank).negotiation.Join().ok());
  Compare("end of the join", Settle());
  for (int rank = 0; rank < 4; ++rank) EXPECT_EQ(At(rank).last_joined, 1);
}

}  // namespace
}  // namespace farandole
