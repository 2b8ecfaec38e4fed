// Joining over TCP, links over its sockets, and everything that can be wrong with a start.
#include "coordinator/control/tcp_network.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <stop_token>

#include "coordinator/control/join.h"
#include "core/store.h"
#include "ops/p2p/link.h"
#include "test/support/tcp_ranks.h"

namespace farandole {
namespace {

using testing::AllOf;
using testing::HasSubstr;

constexpr int64_t kShortNs = 2 * kNsPerSecond;

Status Gather(TcpRank& rank) { return rank.transport->Allgather("x", 120 * kNsPerSecond).status(); }

void ExpectAllOk(const std::vector<Status>& outcomes) {
  for (size_t rank = 0; rank < outcomes.size(); ++rank) {
    EXPECT_TRUE(outcomes[rank].ok()) << "rank " << rank << ": " << outcomes[rank].ToString();
  }
}

/// A folder that goes with the test.
struct Folder {
  Folder() { path = mkdtemp(name.data()); }
  ~Folder() {
    (void)unlink((path + "/farandole_root").c_str());
    (void)rmdir(path.c_str());
  }
  std::array<char, 32> name = {"/tmp/farandole_store_XXXXXX"};
  std::string path;
};

TEST(TcpNetwork, RanksJoinAgainAtTheSameAddress) {
  const LoopbackListener root;
  std::array<TcpRank, 3> ranks;
  ExpectAllOk(OnThreads(3, [&](int rank) {
    return JoinTestJob(ranks[static_cast<size_t>(rank)], TestNetwork(rank, 3, root));
  }));
  for (int start = 0; start < 3; ++start) {
    ExpectAllOk(OnThreads(3, [&](int rank) -> Status {
      TcpRank& me = ranks[static_cast<size_t>(rank)];
      me.transport.reset();
      Result<std::unique_ptr<Transport>> again = me.network->CreateTransport({});
      if (!again.ok()) return again.status();
      me.transport = std::move(again.value());
      return Gather(me);
    }));
  }
}

TEST(TcpNetwork, GathersThroughInnerRanksOfTheTree) {
  const LoopbackListener root;
  ExpectAllOk(OnThreads(20, [&](int rank) {
    TcpRank me;
    const Status joined = JoinTestJob(me, TestNetwork(rank, 20, root));
    return joined.ok() ? Gather(me) : joined;
  }));
}

TEST(TcpNetwork, AFileStoreOfAnEarlierJobIsNoObstacle) {
  const Folder folder;
  for (int job = 0; job < 3; ++job) {
    ExpectAllOk(OnThreads(3, [&](int rank) -> Status {
      TcpNetworkOptions options;
      options.rank = rank;
      options.size = 3;
      options.clock = &SteadyClock();
      Result<std::unique_ptr<Store>> store = OpenFileStore(folder.path);
      if (!store.ok()) return store.status();
      options.store = std::move(store.value());
      TcpRank me;
      const Status joined = JoinTestJob(me, options);
      return joined.ok() ? Gather(me) : joined;
    }));
  }
}

TEST(TcpNetwork, LinksCarryBytesOverSeveralStreams) {
  const LoopbackListener root;
  ExpectAllOk(OnThreads(3, [&](int rank) -> Status {
    TcpRank me;
    TcpNetworkOptions options = TestNetwork(rank, 3, root);
    options.streams = 2;
    FARANDOLE_RETURN_IF_ERROR(JoinTestJob(me, options));
    Result<P2pLinkFactory> links = me.network->CreateLinks({.doorbell = &me.doorbell});
    if (!links.ok()) return links.status();
    const std::vector<int> all = {0, 1, 2};
    const std::unique_ptr<P2pLink> link = links.value()(0, all);
    constexpr int64_t kBytes = 3'000'000;
    std::vector<std::vector<std::byte>> in(3, std::vector<std::byte>(kBytes));
    const std::vector<std::byte> out(kBytes, static_cast<std::byte>(rank + 1));
    for (int other = 0; other < 3; ++other) {
      if (other == rank) continue;
      FARANDOLE_RETURN_IF_ERROR(link->Receive(0, P2pLink::Round::kContribution, other,
                                              in[static_cast<size_t>(other)].data(), kBytes));
      FARANDOLE_RETURN_IF_ERROR(
          link->Send(0, P2pLink::Round::kContribution, other, out.data(), kBytes));
    }
    for (const P2pLink::Group group : {P2pLink::Group::kContributions, P2pLink::Group::kSends}) {
      for (;;) {
        Result<bool> complete = link->AllComplete(0, group);
        if (!complete.ok()) return complete.status();
        if (complete.value()) break;
        (void)link->PollAfterNs();  // moves messages; how long it could sleep is no matter here
        std::this_thread::yield();
      }
    }
    for (int other = 0; other < 3; ++other) {
      const auto expected = static_cast<std::byte>(other + 1);
      const auto& bytes = in[static_cast<size_t>(other)];
      if (other != rank && std::ranges::count(bytes, expected) != kBytes) {
        return Internal("bytes of rank " + std::to_string(other));
      }
    }
    return Gather(me);
  }));
}

TEST(TcpNetwork, ALostRankIsReportedOnceAfterItsMessages) {
  const LoopbackListener root;
  const std::vector<Status> outcomes = OnThreads(2, [&](int rank) -> Status {
    TcpRank me;
    FARANDOLE_RETURN_IF_ERROR(JoinTestJob(me, TestNetwork(rank, 2, root)));
    if (rank == 1) {
      const std::array<std::byte, 3> bytes{};
      FARANDOLE_RETURN_IF_ERROR(me.transport->Send(0, bytes));
      FARANDOLE_RETURN_IF_ERROR(me.transport->Send(0, bytes));
      while (!me.transport->Drained()) std::this_thread::yield();
      return Status();
    }
    while (me.liveness.news() == 0) std::this_thread::yield();
    int messages = 0;
    for (;;) {
      Result<std::optional<Transport::Incoming>> polled = me.transport->Poll();
      if (!polled.ok()) return polled.status();
      if (!polled.value()) break;
      ++messages;
    }
    EXPECT_EQ(messages, 2);
    EXPECT_EQ(me.liveness.Judge().error.facts().ranks, std::vector<int32_t>{1});
    EXPECT_EQ(me.liveness.news(), 1);
    return me.transport->Send(1, {});
  });
  EXPECT_EQ(outcomes[0].code(), Code::kUnavailable) << outcomes[0].ToString();
}

TEST(TcpNetwork, ARankThatHasLeftIsNotLost) {
  const LoopbackListener root;
  ExpectAllOk(OnThreads(2, [&](int rank) -> Status {
    TcpRank me;
    FARANDOLE_RETURN_IF_ERROR(JoinTestJob(me, TestNetwork(rank, 2, root)));
    const int other = 1 - rank;
    me.transport->SetNeighbours(std::span(&other, 1));
    FARANDOLE_RETURN_IF_ERROR(Gather(me));
    if (rank == 1) {
      FARANDOLE_RETURN_IF_ERROR(me.transport->Send(0, {}));
      me.transport->Leave();
      return Status();
    }
    bool came = false;
    const int64_t end_ns = SteadyClock().NowNs() + kNsPerSecond / 2;
    while (!came || SteadyClock().NowNs() < end_ns) {
      Result<std::optional<Transport::Incoming>> polled = me.transport->Poll();
      if (!polled.ok()) return polled.status();
      if (!polled.value()) {
        std::this_thread::yield();
      } else {
        came = true;
      }
    }
    FARANDOLE_RETURN_IF_ERROR(me.liveness.Judge().error);
    return me.transport->Send(1, {});
  }));
}

TEST(TcpNetwork, NamesTheRanksThatDoNotComeOnAllThatDid) {
  const LoopbackListener root;
  const std::vector<Status> outcomes = OnThreads(3, [&](int rank) {
    TcpRank me;
    return JoinTestJob(me, TestNetwork(rank, 5, root), kShortNs);
  });
  for (const Status& outcome : outcomes) {
    EXPECT_EQ(outcome.code(), Code::kTimeout);
    EXPECT_THAT(outcome.message(), HasSubstr("rank 3, rank 4 did not join rank 0 at 127.0.0.1:"));
  }
}

// Rank 0 came later, so its own time is not up: a rank that has waited for long enough ends it all.
TEST(TcpNetwork, TheFirstRankWhoseTimeIsUpEndsTheJoinOfAllWithTheNames) {
  const LoopbackListener root;
  const std::vector<Status> outcomes = OnThreads(2, [&](int rank) {
    TcpRank me;
    return JoinTestJob(me, TestNetwork(rank, 3, root), rank == 1 ? kShortNs : 600 * kNsPerSecond);
  });
  const std::string what = "rank 2 did not join rank 0 at " + root.address.ToString();
  for (const Status& outcome : outcomes) {
    EXPECT_EQ(outcome.code(), Code::kTimeout);
    EXPECT_THAT(outcome.message(), HasSubstr(what));
  }
  EXPECT_THAT(outcomes[0].message(), HasSubstr("since rank 1 began to join"));
}

/// The hub of a rank of a test job of 3 that does by hand what the network does.
std::unique_ptr<StreamHub> HubByHand(int rank) {
  Party party{.rank = rank};
  std::ranges::fill(party.key, std::byte{'k'});
  const Digest job = Sha256({TextBytes("")});
  std::memcpy(&party.job, job.data(), sizeof party.job);
  return std::move(StreamHub::Create({.party = party, .size = 3, .clock = &SteadyClock()}).value());
}

std::optional<HubEvent> AwaitEvent(StreamHub& hub, HubEvent::Kind kind) {
  while (hub.WaitForEvent(SteadyClock().NowNs() + 60 * kNsPerSecond)) {
    std::optional<HubEvent> event = hub.Next();
    if (event && event->kind == kind) return event;
  }
  ADD_FAILURE() << "nothing comes";
  return std::nullopt;
}

/// Registers as rank 1 with rank 0, which accepts it in the end.
std::unique_ptr<StreamHub> RegisterByHand(const LoopbackListener& root) {
  for (uint64_t instance = 0;; ++instance) {
    std::unique_ptr<StreamHub> hub = HubByHand(1);
    hub->Join({root.address});
    while (!hub->WaitForEvent(SteadyClock().NowNs() + kNsPerSecond)) {
    }
    const std::optional<HubEvent> joined = hub->Next();
    if (joined->kind != HubEvent::Kind::kJoined) continue;  // rank 0 is not there yet
    const std::string text = EncodeRegistration({instance, ThisProcess(), {}, 3});
    hub->SendOnJoin(joined->connection, FrameType::kRegister, TextBytes(text), false);
    const std::optional<HubEvent> answer = AwaitEvent(*hub, HubEvent::Kind::kFrame);
    if (!answer || answer->type == FrameType::kAccepted) return hub;
  }
}

TEST(TcpNetwork, WhoHasAcceptedARankTellsItAtOnceThatItIsGoneOrBeginsOnceMore) {
  const LoopbackListener root;
  const std::unique_ptr<StreamHub> hub = HubByHand(0);
  ASSERT_EQ(fcntl(root.descriptor, F_SETFL, O_NONBLOCK), 0);
  ASSERT_TRUE(hub->Listen(root.descriptor).ok());
  hub->OpenToJoins(true, 1);
  Status outcome;
  std::thread rank([&] {
    TcpRank me;
    outcome = JoinTestJob(me, TestNetwork(1, 3, root), 600 * kNsPerSecond);
  });
  for (const bool ends : {false, true}) {
    const std::optional<HubEvent> came = AwaitEvent(*hub, HubEvent::Kind::kFrame);
    if (!came) break;
    const std::byte keeps{1};
    hub->SendOnJoin(came->connection, FrameType::kAccepted, {&keeps, 1}, false);
    if (!ends) hub->SendOnJoin(came->connection, FrameType::kComeAgain, {}, true);
  }
  hub->Shutdown();
  rank.join();
  EXPECT_EQ(outcome.code(), Code::kUnavailable);
  EXPECT_THAT(outcome.message(), HasSubstr("is gone: it had accepted rank 1, and before all"));
  EXPECT_EQ(outcome.facts().ranks, std::vector<int32_t>{0});
}

TEST(TcpNetwork, ARankThatEndsLeavesItsPlaceToTheNextAndAJoinThatIsStoppedIsAborted) {
  const LoopbackListener root;
  std::stop_source stop;
  const std::vector<Status> outcomes = OnThreads(2, [&](int rank) -> Status {
    TcpRank me;
    TcpNetworkOptions options = TestNetwork(rank, 3, root);
    options.stop = stop.get_token();
    if (rank == 0) return JoinTestJob(me, options, 600 * kNsPerSecond);
    RegisterByHand(root).reset();
    const std::unique_ptr<StreamHub> hub = RegisterByHand(root);
    stop.request_stop();
    EXPECT_EQ(AwaitEvent(*hub, HubEvent::Kind::kFrame)->type, FrameType::kComeAgain);
    return JoinTestJob(me, options, 600 * kNsPerSecond);  // nobody is there any more
  });
  for (const Status& outcome : outcomes) EXPECT_EQ(outcome.code(), Code::kAborted);
}

TEST(TcpNetwork, ARankThatComesLateIsToldWhoHasItsPlace) {
  const LoopbackListener root;
  std::atomic<int> have_joined{0};
  std::atomic<bool> is_told{false};
  const std::vector<Status> outcomes = OnThreads(3, [&](int thread) -> Status {
    TcpRank me;
    TcpNetworkOptions options = TestNetwork(std::min(thread, 1), 2, root);
    options.key.clear();
    while (thread == 2 && have_joined < 2) std::this_thread::yield();
    const Status joined = JoinTestJob(me, options, thread == 2 ? kShortNs : 120 * kNsPerSecond);
    ++have_joined;
    while (thread < 2 && !is_told) std::this_thread::yield();
    if (thread == 2) is_told = true;
    return joined;
  });
  EXPECT_EQ(outcomes[2].code(), Code::kTimeout);
  EXPECT_THAT(outcomes[2].message(),
              AllOf(HasSubstr("has started its job with " + ThisProcess().ToString()),
                    HasSubstr(" as rank 1")));
}

TEST(ProcessName, IsTheScriptOfAnInterpreter) {
  using namespace std::string_literals;
  EXPECT_EQ(ProgramOf("/usr/bin/train", "./train\0--epochs\0"s), "train");
  const std::string python = "/usr/bin/python3.11";
  EXPECT_EQ(ProgramOf(python, "python3\0-W\0ignore\0-u\0/home/a/train.py\0x.py\0"s), "train.py");
  EXPECT_EQ(ProgramOf(python, "/usr/bin/python\0-m\0pkg.train\0x\0"s), "pkg.train");
  EXPECT_EQ(ProgramOf(python, "python\0-c\0import x\0"s), "");
  EXPECT_EQ(ProgramOf(python, ""), "");
}

TEST(ProcessName, IsNoTitleThatTheProgramHasGivenItself) {
  using namespace std::string_literals;
  EXPECT_EQ(ProgramOf("/usr/bin/python3.11", "ray::Worker rank 3\0\0\0"s), "");
  EXPECT_EQ(ProgramOf("/usr/bin/train", "train: rank 3\0\0\0"s), "train");
}

TEST(ProcessName, TellsJobsApartByUserAndProgram) {
  const ProcessName a{.pid = 1, .user = 5, .host = "a", .program = "a.py"};
  const auto differs = [&](uint32_t user, const char* program) {
    return AreOfOtherJobs(a, {.pid = 2, .user = user, .host = "b", .program = program});
  };
  EXPECT_TRUE(differs(6, "a.py"));
  EXPECT_TRUE(differs(5, "b.py"));
  EXPECT_FALSE(differs(5, "a.py"));
  EXPECT_FALSE(differs(5, ""));
  EXPECT_EQ((ProcessName{3, 5, "h\x1b", "t.py"}).ToString(),
            "process 3 on host h? (t.py of user 5)");
}

TEST(TcpNetwork, NamesBothEndsWhereRank0CannotBeReached) {
  LoopbackListener root;
  close(root.descriptor);
  TcpRank me;
  const Status outcome = JoinTestJob(me, TestNetwork(1, 2, root), kShortNs / 4);
  EXPECT_EQ(outcome.code(), Code::kTimeout);
  EXPECT_THAT(outcome.message(),
              AllOf(HasSubstr("rank 1 did not reach rank 0 at " + root.address.ToString()),
                    HasSubstr("Connection refused")));
}

TEST(TcpNetwork, SaysThatThePortIsTaken) {
  const LoopbackListener root;
  TcpNetworkOptions options = TestNetwork(0, 2, root);
  options.listen_descriptor = -1;
  TcpRank me;
  const Status outcome = JoinTestJob(me, options, kShortNs);
  EXPECT_THAT(outcome.message(),
              AllOf(HasSubstr("rank 0 cannot listen at " + root.address.ToString()),
                    HasSubstr("Address already in use")));
  close(root.descriptor);
}

TEST(TcpNetwork, ASecondProcessOfARankDisturbsNobody) {
  const LoopbackListener root;
  std::atomic<int> refused{0};
  const std::vector<Status> outcomes = OnThreads(4, [&](int thread) -> Status {
    TcpRank me;
    const int rank = std::min(thread, 2);  // two of them are rank 2
    // Rank 1 comes when one of the two has been refused: until then the job cannot start.
    while (thread == 1 && refused == 0) std::this_thread::yield();
    const Status joined = JoinTestJob(me, TestNetwork(rank, 3, root));
    if (!joined.ok()) {
      ++refused;
      return joined;
    }
    return Gather(me);
  });
  EXPECT_TRUE(outcomes[0].ok()) << outcomes[0].ToString();
  EXPECT_TRUE(outcomes[1].ok()) << outcomes[1].ToString();
  EXPECT_NE(outcomes[2].ok(), outcomes[3].ok());
  const Status& failed = outcomes[2].ok() ? outcomes[3] : outcomes[2];
  EXPECT_EQ(failed.code(), Code::kInvalidArgument);
  EXPECT_THAT(failed.message(), HasSubstr("rank 2 has joined from 127.0.0.1:"));
}

TEST(TcpNetwork, ARankOfAnotherJobIsToldSoAndDisturbsNobody) {
  const LoopbackListener root;
  const auto join = [&](const std::function<void(TcpNetworkOptions&)>& change) {
    TcpNetworkOptions options = TestNetwork(1, 2, root);
    change(options);
    TcpRank me;
    return JoinTestJob(me, options);
  };
  const std::vector<Status> outcomes = OnThreads(2, [&](int thread) -> Status {
    if (thread == 0) {
      TcpRank me;
      const Status joined = JoinTestJob(me, TestNetwork(0, 2, root));
      return joined.ok() ? Gather(me) : joined;
    }
    const Status key = join([](TcpNetworkOptions& o) { o.key = std::string(32, 'x'); });
    EXPECT_EQ(key.code(), Code::kMismatch);
    EXPECT_THAT(key.message(), AllOf(HasSubstr("rank 1 cannot reach rank 0 at 127.0.0.1:"),
                                     HasSubstr("holds another job key")));
    const Status job = join([](TcpNetworkOptions& o) { o.job = "other"; });
    EXPECT_THAT(job.message(), HasSubstr("belongs to another job"));
    for (const int rank : {1, 4}) {
      const Status size = join([rank](TcpNetworkOptions& o) { o.rank = rank, o.size = 5; });
      EXPECT_EQ(size.code(), Code::kMismatch);
      EXPECT_THAT(size.message(), HasSubstr("says it is rank " + std::to_string(rank) +
                                            " of 5, but rank 0's job has 2 ranks"));
    }
    TcpRank me;
    const Status joined = JoinTestJob(me, TestNetwork(1, 2, root));
    return joined.ok() ? Gather(me) : joined;
  });
  ExpectAllOk(outcomes);
}

TEST(TcpNetwork, RefusesOptionsThatCannotBe) {
  const auto message = [](const std::function<void(TcpNetworkOptions&)>& change) {
    TcpNetworkOptions options;
    options.size = 2;
    options.address = "127.0.0.1:1";
    options.clock = &SteadyClock();
    change(options);
    return MakeTcpNetwork(options).status().message();
  };
  EXPECT_EQ(message([](TcpNetworkOptions&) {}), "");
  EXPECT_THAT(message([](TcpNetworkOptions& o) { o.address = "here"; }),
              HasSubstr("\"here\": no port"));
  EXPECT_THAT(message([](TcpNetworkOptions& o) { o.address = ""; }),
              HasSubstr("neither an address"));
  EXPECT_THAT(message([](TcpNetworkOptions& o) { o.address = "a:0"; }), HasSubstr("the port is 0"));
  EXPECT_THAT(message([](TcpNetworkOptions& o) { o.key = "short"; }), HasSubstr("has 5 bytes"));
  EXPECT_THAT(message([](TcpNetworkOptions& o) { o.rank = 2; }), HasSubstr("rank 2 of 2"));
  EXPECT_THAT(message([](TcpNetworkOptions& o) { o.interfaces = "10.0.0.0/99"; }),
              HasSubstr("is not a network"));
}

}  // namespace
}  // namespace farandole
