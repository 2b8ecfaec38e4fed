#include "core/net/frames.h"

#include <gtest/gtest.h>

namespace farandole {
namespace {

std::vector<std::byte> Frame(StreamWriter& writer, const std::string& text) {
  std::vector<std::byte> out;
  writer.Append(FrameType::kMessage, TextBytes(text), out);
  return out;
}

std::string TextOf(const Result<std::optional<StreamReader::Frame>>& frame) {
  if (!frame.ok()) return frame.status().message();
  if (!frame.value()) return "none";
  const ByteSpan payload = frame.value()->payload;
  return {reinterpret_cast<const char*>(payload.data()), payload.size()};
}

TEST(Frames, ComeOutAsTheyWentInHoweverTheyAreCut) {
  const JobKey key = RandomKey();
  StreamWriter writer(key);
  std::vector<std::byte> all;
  for (const size_t size : {size_t{0}, size_t{1}, size_t{1000}, size_t{70'000}}) {
    writer.Append(FrameType::kGather, TextBytes(std::string(size, 'x')), all);
  }
  for (const size_t cut : {size_t{1}, size_t{17}, size_t{4096}, all.size()}) {
    StreamReader reader(key);
    std::vector<size_t> sizes;
    for (size_t at = 0; at < all.size(); at += cut) {
      reader.Take(ByteSpan(all).subspan(at, std::min(cut, all.size() - at)));
      auto frame = reader.Next();
      for (; frame.ok() && frame.value(); frame = reader.Next()) {
        EXPECT_EQ(frame.value()->type, FrameType::kGather);
        sizes.push_back(frame.value()->payload.size());
      }
      ASSERT_TRUE(frame.ok()) << frame.status().ToString();
    }
    EXPECT_EQ(sizes, (std::vector<size_t>{0, 1, 1000, 70'000}));
    EXPECT_FALSE(reader.midway());
  }
}

TEST(Frames, NoChangedBitGoesUnnoticed) {
  const JobKey key = RandomKey();
  const std::vector<std::byte> frame = [&] {
    StreamWriter writer(key);
    return Frame(writer, "hello");
  }();
  for (size_t bit = 0; bit < 8 * frame.size(); ++bit) {
    std::vector<std::byte> changed = frame;
    changed[bit / 8] ^= std::byte{1} << (bit % 8);
    StreamReader reader(key);
    reader.Take(changed);
    const auto read = reader.Next();
    EXPECT_TRUE(!read.ok() || !read.value()) << "bit " << bit;
  }
}

TEST(Frames, AreNotTakenTwiceNorOutOfOrderNorFromAnotherConnection) {
  const JobKey key = RandomKey();
  StreamWriter writer(key);
  const std::vector<std::byte> first = Frame(writer, "first");
  const std::vector<std::byte> second = Frame(writer, "second");
  StreamReader twice(key);
  twice.Take(first);
  twice.Take(first);
  EXPECT_EQ(TextOf(twice.Next()), "first");
  EXPECT_EQ(TextOf(twice.Next()), "a frame is missing, or came twice");
  StreamReader late(key);
  late.Take(second);
  EXPECT_EQ(TextOf(late.Next()), "a frame is missing, or came twice");
  StreamReader other(RandomKey());
  other.Take(first);
  EXPECT_EQ(TextOf(other.Next()), "a frame was changed on its way");
  EXPECT_EQ(TextOf(other.Next()), "a frame was changed on its way");  // for ever
}

}  // namespace
}  // namespace farandole
