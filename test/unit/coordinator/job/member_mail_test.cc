#include "coordinator/job/member_mail.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <linux/if_tun.h>
#include <net/if.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "core/clock.h"
#include "core/net/address.h"

namespace farandole {
namespace {

using Event = MemberMail::Event;

/// A process at loopback.
struct Process {
  explicit Process(MemberId id, const std::string& job = "a") {
    Listening listening = ListenOn({ParseSocketAddress("127.0.0.1:0").value()}, {}).value();
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

uint16_t Checksum(const uint8_t* bytes, size_t count) {
  uint32_t sum = 0;
  for (size_t i = 0; i < count; ++i) sum += uint32_t{bytes[i]} << (i % 2 == 0 ? 8 : 0);
  while (sum >> 16 != 0) sum = (sum & 0xffff) + (sum >> 16);
  return htons(static_cast<uint16_t>(~sum));
}

/// What a firewall's REJECT says to an IPv4 packet: ICMP's "port unreachable" (RFC 792).
std::vector<uint8_t> Rejection(const uint8_t* packet) {
  std::vector<uint8_t> answer = {0x45, 0, 0, 56, 0, 0, 0, 0, 64, 1, 0, 0};
  answer.insert(answer.end(), packet + 16, packet + 20);
  answer.insert(answer.end(), packet + 12, packet + 16);
  const uint16_t header = Checksum(answer.data(), 20);
  std::memcpy(&answer[10], &header, sizeof header);
  answer.insert(answer.end(), {3, 3, 0, 0, 0, 0, 0, 0});
  answer.insert(answer.end(), packet, packet + 28);
  const uint16_t whole = Checksum(&answer[20], 36);
  std::memcpy(&answer[22], &whole, sizeof whole);
  return answer;
}

constexpr int kCannot = 77;

/// For a process of its own, which gets a network where a firewall rejects all.
int LosesWhatAFirewallRejects() {
  if (unshare(CLONE_NEWNET) != 0) return kCannot;
  const int tun = open("/dev/net/tun", O_RDWR | O_CLOEXEC | O_NONBLOCK);
  const int any = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  ifreq device{}, loop{};
  std::strcpy(device.ifr_name, "tun0");
  std::strcpy(loop.ifr_name, "lo");
  loop.ifr_flags = IFF_UP;
  device.ifr_flags = IFF_TUN | IFF_NO_PI;
  if (tun < 0 || ioctl(tun, TUNSETIFF, &device) != 0) return kCannot;
  auto& own = reinterpret_cast<sockaddr_in&>(device.ifr_addr);
  own = {.sin_family = AF_INET, .sin_port = 0, .sin_addr = {inet_addr("10.9.0.1")}, .sin_zero = {}};
  if (ioctl(any, SIOCSIFADDR, &device) != 0) return kCannot;
  own.sin_addr.s_addr = inet_addr("10.9.0.2");
  if (ioctl(any, SIOCSIFDSTADDR, &device) != 0) return kCannot;
  device.ifr_flags = IFF_UP;
  if (ioctl(any, SIOCSIFFLAGS, &device) != 0 || ioctl(any, SIOCSIFFLAGS, &loop) != 0)
    return kCannot;
  Process a(1);
  a.mail->Send({2, "10.9.0.2:99", ""}, "text");
  std::vector<Event> events;
  while (events.empty()) {
    events = a.mail->Poll(SteadyClock().NowNs() + kNsPerMs);
    uint8_t packet[2048];
    if (read(tun, packet, sizeof packet) < 40 || packet[9] != IPPROTO_TCP) continue;
    const std::vector<uint8_t> answer = Rejection(packet);
    (void)!write(tun, answer.data(), answer.size());
  }
  const bool is_rejected = events[0].text.find(std::strerror(EHOSTUNREACH)) != std::string::npos;
  return events[0].kind == Event::Kind::kLost && is_rejected ? 0 : 1;
}

TEST(MemberMail, TakesNoFirewallsRejectionForAnEnd) {
  const pid_t child = fork();
  if (child == 0) _exit(LosesWhatAFirewallRejects());
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  if (WEXITSTATUS(status) == kCannot) GTEST_SKIP() << "no network can be made here";
  EXPECT_EQ(status, 0);
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
