// The worked example at the beginning of docs/protocol.md, played by the production negotiation.
// Each test compares the messages with those on the page, and prints what to put there when they
// differ.
#include <gtest/gtest.h>

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

NegotiationOptions TwoHosts() {
  NegotiationOptions options;
  options.parent = MakeTree(std::vector<int>{0, 0, 1, 1});
  return options;
}

/// The four ranks of the example. Ranks 0 and 1 share a host, and ranks 2 and 3 another. A line for
/// each message, in the order in which they are delivered; batches are done at once.
class Example final : public NegotiationJob {
 public:
  Example() : NegotiationJob(4, TwoHosts()) {}
  std::string Transcript() {
    Settle();
    return std::exchange(transcript_, {});
  }

 private:
  void Prepare(int rank) override {
    for (const int64_t number : std::exchange((*this)[rank].running, {})) {
      At(rank).BatchDone(number, 0);
    }
  }
  void Note(int from, int to, const UpMessage& message) override { Add(from, to, Text(message)); }
  void Note(int from, int to, const DownMessage& message) override { Add(from, to, Text(message)); }
  void Add(int from, int to, const std::string& text) {
    transcript_ += std::to_string(from) + " to " + std::to_string(to) + "  " + text + "\n";
  }

  std::string transcript_;
};

void Compare(const std::string& part, const std::string& transcript) {
  const std::string wanted = "```\n" + transcript + "```\n";
  EXPECT_TRUE(PartOfPage(FARANDOLE_TEST_DOCS "/protocol.md", part) == wanted)
      << "docs/protocol.md should have as \"" << part << "\":\n"
      << wanted;
}

TEST(ProtocolExample, ATensorIsUsedForTheFirstSecondAndThirdTime) {
  Example job;
  for (const char* part : {"first use", "second use", "third use"}) {
    job.SubmitAll("w", Float({1024}));
    Compare(part, job.Transcript());
  }
}

TEST(ProtocolExample, RanksDisagreeAndThenSomeJoin) {
  Example job;
  for (int use = 0; use < 3; ++use) {
    job.SubmitAll("w", Float({1024}));
    (void)job.Transcript();
  }
  for (int r = 0; r < 4; ++r) ASSERT_TRUE(job.Submit(r, "w", Float({r < 3 ? 1024 : 2048})).ok());
  Compare("mismatch", job.Transcript());
  for (int r = 0; r < 4; ++r) {
    ASSERT_EQ(job[r].ended.size(), 1u);
    Compare("error message", job[r].ended.front().message() + "\n");
  }
  for (const int r : {0, 3}) ASSERT_TRUE(job.At(r).Join().ok());
  for (const int r : {1, 2}) ASSERT_TRUE(job.Submit(r, "w", Float({1024})).ok());
  Compare("join", job.Transcript());
  for (const int r : {1, 2}) ASSERT_TRUE(job.At(r).Join().ok());
  Compare("end of the join", job.Transcript());
  for (int r = 0; r < 4; ++r) EXPECT_EQ(job[r].last_joined, 1);
}

}  // namespace
}  // namespace farandole
