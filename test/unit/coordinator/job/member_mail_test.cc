#include "coordinator/job/member_mail.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <memory>
#include <string>
#include <vector>

#include "core/clock.h"

namespace farandole {
namespace {

using Event = MemberMail::Event;

/// A process at loopback.
struct Process {
  explicit Process(MemberId id, const std::string& job = "a") {
    sockaddr_storage storage{};
    auto& v4 = reinterpret_cast<sockaddr_in&>(storage);
    v4.sin_family = AF_INET;
    v4.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    Listening listening = ListenOn({SocketAddress(storage)}, 0).value();
    member = {id, listening.addresses.front().ToString(), "host"};
    Party party;
    party.key = PublicKey(job);
    mail = MemberMail::Create(party, id, std::move(listening)).value();
  }
  Member member;
  std::unique_ptr<MemberMail> mail;
};

/// What becomes of a message to `to`, once `from` knows; both do what comes.
std::vector<Event> Send(Process& from, const Member& to, Process& other,
                        std::vector<Event>* came = nullptr) {
  from.mail->Send(to, "text");
  std::vector<Event> events;
  while (events.empty()) {
    for (Event& one : other.mail->Poll(SteadyClock().NowNs() + kNsPerMs)) {
      if (came != nullptr) came->push_back(std::move(one));
    }
    events = from.mail->Poll(SteadyClock().NowNs() + kNsPerMs);
  }
  return events;
}

TEST(MemberMail, DeliversToWhomItIsFor) {
  Process a(1), b(2);
  std::vector<Event> came;
  EXPECT_EQ(Send(a, b.member, b, &came).at(0).kind, Event::Kind::kDelivered);
  EXPECT_EQ(Send(a, {0, b.member.address, ""}, b, &came).at(0).kind, Event::Kind::kDelivered);
  ASSERT_EQ(came.size(), 2u);
  EXPECT_EQ(came[0].text, "text");
}

TEST(MemberMail, KnowsWhoHasEnded) {
  Process a(1), b(2);
  const Member there = b.member;
  EXPECT_EQ(Send(a, {3, there.address, ""}, b).at(0).kind, Event::Kind::kGone);
  b = Process(4);
  EXPECT_EQ(Send(a, there, b).at(0).kind, Event::Kind::kGone);
  EXPECT_EQ(Send(a, {5, "", ""}, b).at(0).kind, Event::Kind::kLost);
}

// Only to connect takes its share of the time: a process that listens may be slow.
TEST(MemberMail, AwaitsTheAnswerOfAnyOfManyAddresses) {
  Process a(1), b(2);
  Member there = b.member;
  Process ended(3);
  for (int i = 0; i < 40; ++i) there.address += "," + ended.member.address;
  ended.mail.reset();
  a.mail->Send(there, "text");
  const int64_t slow_ns = SteadyClock().NowNs() + 200 * kNsPerMs;
  while (SteadyClock().NowNs() < slow_ns) {
    for (const Event& one : a.mail->Poll(slow_ns)) FAIL() << one.text;
  }
  EXPECT_EQ(Send(a, there, b).at(0).kind, Event::Kind::kDelivered);
}

TEST(MemberMail, HearsNobodyWithoutTheKey) {
  Process a(1, "another job"), b(2);
  std::vector<Event> came;
  const Event lost = Send(a, b.member, b, &came).at(0);
  EXPECT_EQ(lost.kind, Event::Kind::kLost);
  EXPECT_NE(lost.text.find("holds another job key"), std::string::npos) << lost.text;
  EXPECT_TRUE(came.empty());
}

// More than may be open without a proof: the oldest make way for one that has something to say.
TEST(MemberMail, IsReachedBesideManyStrangers) {
  Process a(1), b(2);
  const SocketAddress where = ParseSocketAddress(b.member.address).value();
  std::vector<int> strangers;
  for (int i = 0; i < 200; ++i) {
    strangers.push_back(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    ASSERT_EQ(connect(strangers.back(), where.data(), where.size()), 0);
    ASSERT_EQ(write(strangers.back(), "GET /", static_cast<size_t>(i % 5)), i % 5);
  }
  EXPECT_EQ(Send(a, b.member, b).at(0).kind, Event::Kind::kDelivered);
  for (const int stranger : strangers) close(stranger);
}

}  // namespace
}  // namespace farandole
