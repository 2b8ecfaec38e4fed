// Messages of membership as bytes: Protocol Buffers, by membership.proto.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "coordinator/membership/membership.h"
#include "core/status.h"

namespace farandole {

/// What DecodeMembership accepts at most.
inline constexpr size_t kMaxMembershipBytes = size_t{16} << 20;
inline constexpr int kMaxMembers = 16'384;
inline constexpr int kMaxPendingLists = 1'024;
inline constexpr size_t kMaxAddressBytes = 4096;  ///< All addresses of a host.

std::string EncodeMembership(const MembershipMessage& message);
/// @return Internal that names the field, for bytes that no machine would have sent: beyond limits,
/// an unknown kind, no sender, a member that is in a list twice.
Result<MembershipMessage> DecodeMembership(std::span<const std::byte> bytes);

}  // namespace farandole
