// Descriptors of this process (sockets, files): how many it has and may have, and errors for want
// of them.
#pragma once

#include <cstdint>
#include <string>

#include "core/status.h"

namespace farandole {

/// Whether a system call failed because this process or its machine has no descriptor, buffer or
/// memory left: no peer is to blame.
bool IsExhaustion(int error);

/// Of a system call that failed: "<what>: <the system's text>". errno stays as it is.
/// @return ResourceExhausted if IsExhaustion(error), with the number of descriptors where that is
/// what lacks; else Unavailable.
Status SystemError(const std::string& what, int error);

/// Makes sure that `needed` more descriptors can be opened, and that the program keeps some of its
/// own: raises this process's soft limit, where it is lower, up to the hard limit. Errors of
/// SystemError name the greatest need so far.
/// Thread safety: any thread.
/// @return ResourceExhausted with the numbers if the hard limit is too low; those that can be had
/// are available then.
Status ReserveDescriptors(int64_t needed);

}  // namespace farandole
