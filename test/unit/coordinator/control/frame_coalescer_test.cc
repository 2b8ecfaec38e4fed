#include "coordinator/control/frame_coalescer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "coordinator/control/in_process.h"
#include "coordinator/liveness/table.h"

namespace farandole {
namespace {

// Ranks of which some are gone; the others pass on a final error until nobody has news.
class Spreading {
 public:
  Spreading(int size, int first_gone, int gone)
      : hub_(size),
        tables_(static_cast<size_t>(size)),
        gone_(static_cast<size_t>(size)),
        spread_(static_cast<size_t>(size)) {
    for (int i = 0; i < gone; ++i) gone_[static_cast<size_t>((first_gone + i) % size)] = true;
    for (int r = 0; r < size; ++r) {
      transports_.push_back(hub_.Create(r, nullptr));
      coalescer_.push_back(std::make_unique<FrameCoalescer>(*transports_.back(), counters_,
                                                            tables_[static_cast<size_t>(r)]));
    }
  }

  /// @return how many ranks that are there know of rank `origin`'s error in the end.
  int KnowingAfter(int origin) {
    Spread(origin, Timeout("stuck"));
    for (bool moved = true; moved;) {
      moved = false;
      for (int r = 0; r < hub_.size(); ++r) {
        if (gone_[static_cast<size_t>(r)] || spread_[static_cast<size_t>(r)]) continue;
        coalescer_[static_cast<size_t>(r)]->Drain(100);
        const Status told = tables_[static_cast<size_t>(r)].Judge().error;
        if (told.ok()) continue;
        EXPECT_EQ(told.ToString(),
                  Timeout("rank " + std::to_string(origin) + " failed: stuck").ToString());
        Spread(r, told);
        moved = true;
      }
    }
    return static_cast<int>(std::count(spread_.begin(), spread_.end(), true));
  }

 private:
  void Spread(int rank, const Status& error) {
    coalescer_[static_cast<size_t>(rank)]->SpreadAbort(error, !error.facts().ranks.empty());
    spread_[static_cast<size_t>(rank)] = true;
  }

  InProcessHub hub_;
  Counters counters_;
  std::vector<LivenessTable> tables_;
  std::vector<bool> gone_;
  std::vector<bool> spread_;
  std::vector<std::unique_ptr<Transport>> transports_;
  std::vector<std::unique_ptr<FrameCoalescer>> coalescer_;
};

TEST(FrameCoalescer, SendsAFinalErrorToAllRanksThoughAWholeHostIsGone) {
  for (int size = 1; size <= 40; ++size) {
    for (int gone = 0; gone < size; gone = 2 * gone + 1) {
      const int origin = (size * 7 + gone) % (size - gone);
      Spreading job(size, size - gone, gone);
      ASSERT_EQ(job.KnowingAfter(origin), size - gone) << size << " ranks, " << gone << " gone";
    }
  }
}

TEST(FrameCoalescer, NamesTheLostRankAndNotTheOneThatReportsIt) {
  InProcessHub hub(3);
  Counters counters;
  std::vector<std::unique_ptr<Transport>> transports;
  for (int r = 0; r < 3; ++r) transports.push_back(hub.Create(r, nullptr));
  LivenessTable table;
  FrameCoalescer(*transports[0], counters, table)
      .SpreadAbort(FailedOn(2, Unavailable("rank 2 died")));
  FrameCoalescer(*transports[1], counters, table).Drain(10);
  const Status told = table.Judge().error;
  EXPECT_EQ(told.message(), "rank 2 died");
  EXPECT_EQ(told.facts().ranks, std::vector<int32_t>{2});
}

TEST(FrameCoalescer, NamesTheLostRankToWhichItCannotSend) {
  InProcessHub hub(3);
  const std::unique_ptr<Transport> transport = hub.Create(0, nullptr);
  Counters counters;
  LivenessTable table;
  FrameCoalescer coalescer(*transport, counters, table);
  hub.Disconnect(2, Unavailable("the connection broke"));
  ASSERT_TRUE(coalescer.Add(2, DownMessage()).ok());
  EXPECT_EQ(coalescer.Flush().facts().ranks, std::vector<int32_t>{2});
}

TEST(FrameCoalescer, SendsAFinalErrorByFewMessages) {
  InProcessHub hub(1000);
  Counters counters;
  const std::unique_ptr<Transport> transport = hub.Create(5, nullptr);
  LivenessTable table;
  FrameCoalescer(*transport, counters, table).SpreadAbort(Timeout("stuck"));
  int64_t messages = 0;
  for (int to = 0; to < 1000; ++to) messages += hub.Sent(5, to).messages;
  EXPECT_EQ(messages, 18);
}

}  // namespace
}  // namespace farandole
