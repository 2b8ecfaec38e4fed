#include <gtest/gtest.h>

#include <array>
#include <string>
#include <vector>

#include "coordinator/control/in_process.h"
#include "coordinator/liveness/table.h"
#include "test/support/counting_doorbell.h"

namespace farandole {
namespace {

std::span<const std::byte> Text(const std::string& text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

std::string NextText(Transport& transport) {
  Result<std::optional<Transport::Incoming>> polled = transport.Poll();
  if (!polled.ok() || !polled.value()) return "nothing";
  const std::span<const std::byte> data = polled.value()->data;
  return std::string(reinterpret_cast<const char*>(data.data()), data.size());
}

TEST(InProcessTransport, HandsOutMessagesInTheOrderSent) {
  InProcessHub hub(2);
  const auto sender = hub.Create(0, nullptr);
  const auto receiver = hub.Create(1, nullptr);
  for (int round = 0; round < 50; ++round) {  // in buffers that are used again
    for (int i = 0; i < 100; ++i) ASSERT_TRUE(sender->Send(1, Text(std::to_string(i))).ok());
    for (int i = 0; i < 100; ++i) ASSERT_EQ(NextText(*receiver), std::to_string(i));
  }
  EXPECT_EQ(NextText(*receiver), "nothing");
}

TEST(InProcessTransport, KeepsWhatWasSentBeforeTheReceiverCame) {
  InProcessHub hub(2);
  const auto sender = hub.Create(0, nullptr);
  ASSERT_TRUE(sender->Send(1, Text("early")).ok());
  const auto receiver = hub.Create(1, nullptr);
  EXPECT_EQ(NextText(*receiver), "early");
}

TEST(InProcessTransport, RingsOnlyTheReceiver) {
  InProcessHub hub(2);
  CountingDoorbell mine;
  CountingDoorbell theirs;
  const auto sender = hub.Create(0, &mine);
  const auto receiver = hub.Create(1, &theirs);
  ASSERT_TRUE(sender->Send(1, Text("a")).ok());
  EXPECT_EQ(mine.rings(), 0);
  EXPECT_EQ(theirs.rings(), 1);
}

TEST(InProcessTransport, DoesNotRingADoorbellThatIsGone) {
  InProcessHub hub(2);
  const auto sender = hub.Create(0, nullptr);
  {
    CountingDoorbell bell;
    const auto receiver = hub.Create(1, &bell);
  }
  EXPECT_TRUE(sender->Send(1, Text("late")).ok());
}

TEST(InProcessTransport, NotesALostPeerOnceAndKeepsItsMessages) {
  InProcessHub hub(2);
  LivenessTable table;
  const auto peer = hub.Create(0, nullptr);
  const auto survivor = hub.Create(1, nullptr, &table);
  ASSERT_TRUE(peer->Send(1, Text("last words")).ok());
  hub.Disconnect(0, Unavailable("rank 0 was killed"));
  hub.Disconnect(0, Unavailable("again"));
  EXPECT_EQ(table.Judge().error.message(), "rank 0 was killed");
  EXPECT_EQ(table.Judge().error.facts().ranks, std::vector<int32_t>{0});
  EXPECT_EQ(table.news(), 1);
  EXPECT_EQ(NextText(*survivor), "last words");
  EXPECT_EQ(NextText(*survivor), "nothing");
}

TEST(InProcessTransport, RefusesToSendToALostPeer) {
  InProcessHub hub(2);
  const auto survivor = hub.Create(1, nullptr);
  hub.Disconnect(0, Unavailable("gone"));
  EXPECT_EQ(survivor->Send(0, Text("hello")).code(), Code::kUnavailable);
}

TEST(InProcessTransport, CountsMessagesAndBytesPerLink) {
  InProcessHub hub(3);
  const auto sender = hub.Create(0, nullptr);
  ASSERT_TRUE(sender->Send(1, Text("four")).ok());
  ASSERT_TRUE(sender->Send(1, Text("six in")).ok());
  EXPECT_EQ(hub.Sent(0, 1).messages, 2);
  EXPECT_EQ(hub.Sent(0, 1).bytes, 10);
  EXPECT_EQ(hub.Sent(0, 2).messages, 0);
  EXPECT_EQ(hub.Sent(1, 0).messages, 0);
}

}  // namespace
}  // namespace farandole
