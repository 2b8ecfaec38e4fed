// How the threads that serve sockets start.
#pragma once

#include <functional>
#include <thread>

#include "core/status.h"

namespace farandole {

/// Starts a thread that takes no signals, which are for the threads of the user.
/// @param name  For top and gdb; of at most 15 characters, or the thread has none.
/// @return ResourceExhausted with the system's reason.
Status StartThread(std::thread& thread, const char* name, std::function<void()> run);

}  // namespace farandole
