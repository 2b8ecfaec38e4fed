// An allgather of texts that goes through rank 0: its answer as bytes, which is everybody's text or
// who is missing, and the tree of ranks that a complete answer goes down.
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/status.h"

namespace farandole {

std::span<const std::byte> BytesOf(const std::string& text);
std::string TextOf(std::span<const std::byte> bytes);

/// Each text is encoded relative to the one before it: an equal one takes a few bytes, a similar
/// one what differs. If anybody is silent the answer holds no texts.
///
/// @param values By rank; nullopt: silent.
std::string EncodeGathered(const std::vector<std::optional<std::string>>& values);
/// @return The `size` texts by rank; Timeout naming the silent ranks; Internal if `bytes` is
/// malformed. Takes up to `size` times the memory of `bytes`.
Result<std::vector<std::string>> DecodeGathered(std::span<const std::byte> bytes, int size);

/// The ranks from `first` up to, not including, `last`.
struct RankRange {
  int first = 0;
  int last = 0;
};
/// To whom `rank` passes a complete answer on: at most 8 ranks. They form a heap, so the last of
/// `size` ranks has it after log8(size) hops, and no rank sends more than 8 copies.
RankRange AnswerChildren(int rank, int size);
/// From whom `rank`, which is not 0, gets it.
int AnswerParent(int rank);

}  // namespace farandole
