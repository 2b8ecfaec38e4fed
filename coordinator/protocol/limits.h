// How large a key may be. Checked where a rank submits and again where bytes are parsed, so that
// what one rank accepts no other rank refuses.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "coordinator/protocol/messages.h"
#include "core/status.h"

namespace farandole {

inline constexpr size_t kMaxNameBytes = 4096;  ///< Of a key, a tensor, an error text.
inline constexpr size_t kMaxDims = 64;
inline constexpr size_t kMaxTensors = 65'536;                  ///< Tensors of one key.
inline constexpr size_t kMaxSignatureBytes = size_t{8} << 20;  ///< As it travels, about.
inline constexpr int64_t kMaxTensorBytes = int64_t{1} << 60;   ///< Sum over a key's tensors.
inline constexpr int32_t kMaxRanks = 1 << 24;
inline constexpr size_t kMaxStepTimes = size_t{1} << 16;   ///< Of one message.
inline constexpr size_t kMaxRowNumbers = size_t{8} << 20;  ///< Of an allgather: tensors x ranks.
inline constexpr size_t kMaxTextBytes = size_t{1} << 20;   ///< Of a refusal or report.

/// Frames are bounded: a message that has come to kMessageBytes gets no further record, and what is
/// left of a record beside its signature takes at most kMaxListBytes.
inline constexpr size_t kMaxFrameBytes = size_t{64} << 20;
inline constexpr size_t kMessageBytes = size_t{4} << 20;
inline constexpr size_t kMaxListBytes = size_t{40} << 20;

/// Roughly what a signature takes in a record.
size_t TravelBytes(const Signature& signature);
size_t TravelBytes(const std::vector<int64_t>& rows);
/// At most what these take: they grow with the ranks of a set.
size_t TravelBytes(const std::vector<RankMask>& masks);
size_t TravelBytes(const KeyVotes& votes);
size_t TravelBytes(const WorkItem& item);

/// Every rank of a set may be absent from some tensors of a key and clean in others.
/// @return InvalidArgument naming both numbers if the lists of these could exceed kMaxListBytes.
Status CheckGroupFits(const KeyName& key, const Signature& signature, size_t ranks);

/// The one check of descriptions: of what a rank prepares or submits, and of what it parses.
/// @return InvalidArgument naming the value and the limit if a name is too long, a dtype is
/// unknown, a shape has a negative or too large extent, a tensor kind has no tensor, or another
/// kind has one; CheckDivisible.
Status CheckLimits(const KeyName& key, const Signature& signature);

/// True if `mask` has no bit beyond `bits`.
bool FitsMask(const Mask& mask, int bits);

/// True if each rank is greater than the one before it.
bool AreAscending(std::span<const int32_t> ranks);

}  // namespace farandole
