// The bytes of what processes of a job tell each other about membership.
#pragma once

#include <string>

#include "coordinator/membership/membership.h"
#include "core/net/job_key.h"
#include "core/status.h"

namespace farandole {

std::string EncodeMember(const Member& member);
/// @return Internal naming what is malformed; so below.
Result<Member> DecodeMember(ByteSpan bytes);

std::string EncodeMembership(const MembershipMessage& message);
Result<MembershipMessage> DecodeMembership(ByteSpan bytes);

}  // namespace farandole
