#include "coordinator/control/gather_text.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <vector>

#include "coordinator/control/rendezvous.h"
#include "coordinator/control/wire/hello.pb.h"

namespace farandole {
namespace {

using Texts = std::vector<std::string>;

std::string Encode(const Texts& texts) { return EncodeGathered({texts.begin(), texts.end()}); }

Result<Texts> Decode(const std::string& bytes, size_t size) {
  return DecodeGathered(BytesOf(bytes), static_cast<int>(size));
}

void ExpectSame(const Texts& texts) {
  const Result<Texts> decoded = Decode(Encode(texts), texts.size());
  ASSERT_TRUE(decoded.ok()) << decoded.status().ToString();
  EXPECT_EQ(decoded.value(), texts);
}

TEST(GatherText, GivesBackWhatWasEncoded) {
  ExpectSame({"zero", "", std::string("a\0b", 3)});
  ExpectSame({"", "", ""});
  ExpectSame({"one and only"});
  ExpectSame({"alike", "alike", "alike"});
  ExpectSame({"abc", "xyz", "123"});
  ExpectSame({"host7 rest", "host8 rest", "host10 rest", "host1 rest"});
  // Where what both begin with and what both end with would overlap.
  ExpectSame({"aaa", "aa", "aaaa", "a", "", "aaa"});
  ExpectSame({"abab", "ab", "ababab"});
}

TEST(GatherText, TakesAFewBytesForATextLikeTheOneBefore) {
  const std::string text(1000, 'x');
  const size_t one = Encode({text}).size();
  EXPECT_LE(Encode(Texts(101, text)).size(), one + 100 * 5);
  EXPECT_LE(Encode({text, text + "7" + text}).size(), one + 1020);
  EXPECT_LE(Encode(Texts(100, "")).size(), 200u);
}

TEST(GatherText, NamesAllSilentRanksAndSendsNoTexts) {
  const std::string bytes = EncodeGathered({std::string(1000, 'x'), std::nullopt, "two", {}});
  EXPECT_LT(bytes.size(), 10u);
  const Status status = Decode(bytes, 4).status();
  EXPECT_EQ(status.code(), Code::kTimeout);
  EXPECT_EQ(status.message(), "allgather at start: rank 1, rank 3 did not arrive in time");
}

TEST(GatherText, RefusesAnAnswerCutShortAtAnyByte) {
  const std::string whole = Encode({"zero", "one", "zero"});
  for (size_t length = 0; length < whole.size(); ++length) {
    EXPECT_EQ(Decode(whole.substr(0, length), 3).status().code(), Code::kInternal) << length;
  }
  EXPECT_EQ(Decode(whole, 2).status().code(), Code::kInternal);
  EXPECT_EQ(Decode(whole, 4).status().code(), Code::kInternal);
}

TEST(GatherText, RefusesToTakeMoreFromATextThanItHas) {
  const std::pair<uint32_t, uint32_t> lengths[] = {
      {5, 0}, {0, 5}, {3, 2}, {UINT32_MAX, 0}, {0, UINT32_MAX}, {UINT32_MAX, UINT32_MAX}};
  for (const auto& [prefix, suffix] : lengths) {
    wire::Gathered answer;
    answer.add_texts()->set_middle("four");
    answer.add_texts()->set_prefix(prefix);
    answer.mutable_texts(1)->set_suffix(suffix);
    const Status status = Decode(answer.SerializeAsString(), 2).status();
    EXPECT_EQ(status.code(), Code::kInternal) << prefix << ", " << suffix;
    EXPECT_NE(status.message().find("rank 1"), std::string::npos) << status.message();
  }
}

TEST(GatherText, AnAnswerReachesEveryRankOnceFromItsParent) {
  for (const int size : {1, 2, 9, 10, 11, 73, 74, 1000}) {
    std::vector<int> copies(static_cast<size_t>(size), 0);
    for (int rank = 0; rank < size; ++rank) {
      const RankRange children = AnswerChildren(rank, size);
      for (int child = children.first; child < children.last; ++child) {
        EXPECT_EQ(AnswerParent(child), rank);
        ++copies[static_cast<size_t>(child)];
      }
    }
    EXPECT_EQ(copies.front(), 0);
    EXPECT_EQ(std::count(copies.begin() + 1, copies.end(), 1), size - 1);
  }
  const RankRange none = AnswerChildren(INT32_MAX - 1, INT32_MAX);
  EXPECT_EQ(none.first, none.last);
}

// Hellos as of hosts with 8 ranks each, which have a boot id.
Texts HellosOf(int ranks) {
  Texts hellos;
  for (int rank = 0; rank < ranks; ++rank) {
    const int host = rank / 8;
    Hello hello;
    hello.version = "0.1.0 of a build 0123456789abcdef";
    const std::string id = std::to_string(1'000'000'007ull * static_cast<unsigned>(host + 12345));
    hello.host = "node" + std::to_string(host) + " 3f2c" + id + "-9a1b-" + id + "77";
    hello.planes = {"mpi"};
    hellos.push_back(EncodeHello(hello));
  }
  return hellos;
}

// One copy of all hellos for each rank, as they are, would be 45 GB for 10,240 ranks.
TEST(GatherText, NoRankSendsMoreThanAFewBytesForEachRank) {
  for (const int ranks : {8, 64, 1024, 10240}) {
    const Texts hellos = HellosOf(ranks);
    const size_t answer = Encode(hellos).size();
    for (int rank = 0; rank < ranks; ++rank) {
      const RankRange to = AnswerChildren(rank, ranks);
      const size_t sent = static_cast<size_t>(to.last - to.first) * answer;
      ASSERT_LE(sent, 8 * hellos.front().size() + 100 * static_cast<size_t>(ranks));
    }
    ExpectSame(hellos);
  }
}

TEST(Neighbours, AreTheParentAndTheChildren) {
  const std::vector<int> parent = {-1, 0, 0, 1, 1, 0};
  EXPECT_EQ(Neighbours(parent, 0), (std::vector<int>{1, 2, 5}));
  EXPECT_EQ(Neighbours(parent, 1), (std::vector<int>{0, 3, 4}));
  EXPECT_EQ(Neighbours(parent, 4), (std::vector<int>{1}));
}

TEST(WatchedRanks, AreTheNeighboursAndAmongLeadersAllOthers) {
  const std::vector<int> host = {0, 0, 1, 1, 2, 3};
  const std::vector<int> parent = MakeTree(host, 2);
  EXPECT_EQ(WatchedRanks(host, parent, 0), (std::vector<int>{1, 2, 4, 5}));
  EXPECT_EQ(WatchedRanks(host, parent, 1), (std::vector<int>{0}));
  EXPECT_EQ(WatchedRanks(host, parent, 4), (std::vector<int>{0, 2, 5}));
  std::vector<int> many(kWatchedHosts + 1);
  std::iota(many.begin(), many.end(), 0);
  const std::vector<int> tree = MakeTree(many);
  EXPECT_EQ(WatchedRanks(many, tree, 20), Neighbours(tree, 20));
}

}  // namespace
}  // namespace farandole
