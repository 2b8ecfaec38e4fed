// How long a job of 10,000 ranks takes to join over TCP, on the clock of scaled_job.h: links by
// parameters, computing as measured here, with the handshakes, registrations and tables of the
// product.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <string>
#include <vector>

#include "coordinator/control/gather_text.h"
#include "coordinator/control/join.h"
#include "core/clock.h"
#include "test/simulation/scaled_job.h"

namespace farandole::simulation {
namespace {

constexpr int kRanks = 10'000;
/// TCP between hosts at 10 Gbit/s: a system call for each message at either end.
constexpr Link kTcp{.latency = 30'000, .overhead = 10'000, .per_byte = 0.8};
/// Of rank 0 for each rank that joins: accept, 3 receives, 3 sends, close.
constexpr int kCallsPerJoin = 8;

double Measured(const std::function<void()>& what) {
  const int64_t begin_ns = SteadyClock().NowNs();
  what();
  return static_cast<double>(SteadyClock().NowNs() - begin_ns);
}

std::vector<TableEntry> TableOf(int ranks) {
  std::vector<TableEntry> table;
  for (int rank = 0; rank < ranks; ++rank) {
    const std::string host = std::to_string(rank / 8 / 250) + "." + std::to_string(rank / 8 % 250);
    table.push_back(
        {rank,
         {ParseSocketAddress("10.1." + host + ":40000").value(),
          ParseSocketAddress("[fd00:10:1::" + std::to_string(rank) + "]:40000").value()}});
  }
  return table;
}

// What rank 0 computes for one rank, the least of several.
double ServeOne(const TableEntry& entry) {
  const Party party{.key = PublicKey("job"), .job = 1, .epoch = 1, .joining = true};
  double least = 1e18;
  for (int i = 0; i < 20; ++i) {
    Handshake joiner = Handshake::Connect(party, {StreamRole::kJoin, 1}, 0);
    const std::string registration = EncodeRegistration({1, ThisProcess(), entry.addresses, 2});
    const std::vector<std::byte> hello = joiner.TakeOutput();
    double took = 0;
    Handshake root = Handshake::Accept(party);
    took += Measured([&] { root.Take(hello); });
    joiner.Take(root.TakeOutput());
    const std::vector<std::byte> proof = joiner.TakeOutput();
    took += Measured([&] {
      root.Take(proof);
      StreamWriter writer(root.send_key());
      std::vector<std::byte> out;
      writer.Append(FrameType::kAccepted, {}, out);
      (void)DecodeRegistration(TextBytes(registration));
    });
    EXPECT_TRUE(root.complete());
    least = std::min(least, took);
  }
  return least;
}

// The tree's rank with the longest way: each inner rank decodes the table, then sends it on, one
// copy after the other.
double PassDown(int ranks, double bytes, double decode_ns, double copy_ns) {
  std::vector<double> has_ns(static_cast<size_t>(ranks));
  double last_ns = 0;
  for (int rank = 0; rank < ranks; ++rank) {
    double free_ns = has_ns[static_cast<size_t>(rank)] + (rank == 0 ? 0 : decode_ns);
    last_ns = std::max(last_ns, free_ns);
    const RankRange below = AnswerChildren(rank, ranks);
    for (int child = below.first; child < below.last; ++child) {
      // A new connection: three ways for TCP's and two for the product's own handshake.
      free_ns += kTcp.overhead * 4 + copy_ns + kTcp.per_byte * bytes;
      has_ns[static_cast<size_t>(child)] = free_ns + 5 * kTcp.latency + kTcp.overhead;
    }
  }
  return last_ns;
}

TEST(JoinModel, TenThousandRanksJoinWithin2Seconds) {
  const std::vector<TableEntry> table = TableOf(kRanks);
  const double serve_ns = ServeOne(table.back()) + kCallsPerJoin * kTcp.overhead;
  std::string text;
  const double encode_ns = Measured([&] { text = EncodeTable(table); });
  const double decode_ns =
      Measured([&] { EXPECT_TRUE(DecodeTable(TextBytes(text), kRanks).ok()); });
  const double copy_ns = Measured([&] {
    StreamWriter writer(RandomKey());
    std::vector<std::byte> out;
    writer.Append(FrameType::kTable, TextBytes(text), out);
  });
  const double down_ns = PassDown(kRanks, static_cast<double>(text.size()), decode_ns, copy_ns);
  const double total_ns = kRanks * serve_ns + encode_ns + down_ns;
  RecordProperty("bytes", static_cast<int>(text.size()));
  RecordProperty("milliseconds", static_cast<int>(total_ns / 1e6));
  std::printf("%d ranks: %.0f us each at rank 0, a table of %zu bytes, %.0f ms down; %.0f ms\n",
              kRanks, serve_ns / 1e3, text.size(), down_ns / 1e6, total_ns / 1e6);
  EXPECT_LT(total_ns, 2e9);
  // The tree's part grows with the table and its depth, not with ranks times the table.
  EXPECT_LT(down_ns, 1e9);
}

}  // namespace
}  // namespace farandole::simulation
