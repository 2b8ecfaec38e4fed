#include "core/net/send_meter.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <thread>
#include <vector>

#include "core/clock.h"

namespace farandole {
namespace {

/// Both ends of a TCP connection over the loopback.
std::array<int, 2> Connect() {
  const int listener = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  EXPECT_EQ(bind(listener, reinterpret_cast<sockaddr*>(&address), size), 0);
  EXPECT_EQ(listen(listener, 1), 0);
  EXPECT_EQ(getsockname(listener, reinterpret_cast<sockaddr*>(&address), &size), 0);
  const int client = socket(AF_INET, SOCK_STREAM, 0);
  EXPECT_EQ(connect(client, reinterpret_cast<sockaddr*>(&address), size), 0);
  const int server = accept(listener, nullptr, nullptr);
  close(listener);
  return {client, server};
}

/// Until they are acknowledged, as they have been read.
void Carry(const std::array<int, 2>& ends, size_t bytes) {
  std::vector<char> data(bytes);
  std::thread sender([&] { EXPECT_EQ(write(ends[0], data.data(), bytes), ssize_t(bytes)); });
  std::vector<char> read(bytes);
  EXPECT_EQ(recv(ends[1], read.data(), bytes, MSG_WAITALL), ssize_t(bytes));
  sender.join();
}

TEST(SendMeter, CountsWhatTheConnectionCarriesThatCarriesMost) {
  const std::array<int, 2> busy = Connect(), idle = Connect();
  SendMeter meter;
  meter.Add(busy[0]);
  meter.Add(idle[0]);
  EXPECT_EQ(meter.Look(kNsPerSecond).bytes, 0);
  Carry(busy, 4 << 20);
  Carry(idle, 1000);
  EXPECT_EQ(meter.Look(kNsPerSecond + kNsPerMs).bytes, 0) << "looked again too soon";
  const LinkUse use = meter.Look(2 * kNsPerSecond);
  EXPECT_GT(use.bytes, 3 << 20);  // the last acknowledgement may be on its way
  EXPECT_LE(use.bytes, 4 << 20);
  EXPECT_GT(use.ns, 0);
  meter.Remove(busy[0]);
  Carry(busy, 1 << 20);
  EXPECT_LE(meter.Look(3 * kNsPerSecond).bytes, use.bytes + 1000);
  for (const int socket : {busy[0], busy[1], idle[0], idle[1]}) close(socket);
}

TEST(SendMeter, CountsNothingAtTheRateOfARankThatHasLittleToSend) {
  const std::array<int, 2> ends = Connect();
  SendMeter meter;
  meter.Add(ends[0]);
  for (int64_t i = 1; i <= 20; ++i) {
    Carry(ends, 1000);
    EXPECT_EQ(meter.Look(i * kNsPerSecond).bytes, 0);
  }
  for (const int socket : ends) close(socket);
}

TEST(SendMeter, CountsOthersBesideOneThatTheKernelDoesNotKnow) {
  const std::array<int, 2> ends = Connect();
  SendMeter meter;
  for (const int socket : {-1, ends[0], -2}) meter.Add(socket);
  Carry(ends, 4 << 20);
  EXPECT_GT(meter.Look(kNsPerSecond).bytes, 3 << 20);
  for (const int socket : ends) close(socket);
}

}  // namespace
}  // namespace farandole
