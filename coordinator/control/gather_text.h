// The answer of an allgather that goes through rank 0, as bytes: everybody's text, or who is
// missing.
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

/// @param values By rank; nullopt: silent.
std::string EncodeGathered(const std::vector<std::optional<std::string>>& values);
/// @return The texts by rank; Timeout naming the silent ranks; Internal if `bytes` is malformed.
Result<std::vector<std::string>> DecodeGathered(const std::string& bytes);

}  // namespace farandole
