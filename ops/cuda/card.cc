#include "ops/cuda/card.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

namespace farandole {
namespace {

/// Tells a card from the zeros of a rank that wrote none.
constexpr uint32_t kMark = 0x46437264;

/// How a card lies in memory; every member runs the same build, as checked at start.
struct WrittenCard {
  uint32_t mark;
  int32_t rank;
  int32_t device_index;
  int32_t nccl_version;
  int64_t shm_free_bytes;
  int32_t failure_code;
  int32_t share_gpu;
  char host[128];
  char bus_id[32];
  char device_name[96];
  char runtime[96];
  char nccl[512];
  char failure[512];
};
static_assert(sizeof(WrittenCard) <= kCardBytes && std::is_trivially_copyable_v<WrittenCard>);

template <size_t size>
void WriteText(char (&to)[size], const std::string& text) {
  std::memcpy(to, text.data(), std::min(text.size(), size - 1));  // the rest is zero already
}

template <size_t size>
std::string ReadText(const char (&from)[size]) {
  return {from, std::find(from, from + size, '\0')};
}

}  // namespace

void WriteCard(const RankCard& card, std::span<std::byte> to) {
  WrittenCard written{};
  written.mark = kMark;
  written.rank = card.rank;
  written.device_index = card.device_index;
  written.nccl_version = card.nccl_version;
  written.shm_free_bytes = card.shm_free_bytes;
  written.failure_code = static_cast<int32_t>(card.failure.code());
  written.share_gpu = card.share_gpu ? 1 : 0;
  WriteText(written.host, card.host);
  WriteText(written.bus_id, card.bus_id);
  WriteText(written.device_name, card.device_name);
  WriteText(written.runtime, card.runtime);
  WriteText(written.nccl, card.nccl);
  WriteText(written.failure, card.failure.message());
  std::fill(to.begin(), to.end(), std::byte{0});
  std::memcpy(to.data(), &written, sizeof written);
}

Result<RankCard> ReadCard(std::span<const std::byte> from) {
  WrittenCard written;
  std::memcpy(&written, from.data(), sizeof written);
  const bool known_code = written.failure_code >= static_cast<int32_t>(Code::kOk) &&
                          written.failure_code <= static_cast<int32_t>(Code::kInternal);
  if (written.mark != kMark || !known_code) {
    return Internal("what a rank told about its GPU is damaged");
  }
  RankCard card;
  card.rank = written.rank;
  card.host = ReadText(written.host);
  card.device_index = written.device_index;
  card.bus_id = ReadText(written.bus_id);
  card.device_name = ReadText(written.device_name);
  card.runtime = ReadText(written.runtime);
  card.nccl_version = written.nccl_version;
  card.nccl = ReadText(written.nccl);
  card.shm_free_bytes = written.shm_free_bytes;
  card.share_gpu = written.share_gpu != 0;
  if (written.failure_code != static_cast<int32_t>(Code::kOk)) {
    card.failure = Status(static_cast<Code>(written.failure_code), ReadText(written.failure));
  }
  return card;
}

}  // namespace farandole
