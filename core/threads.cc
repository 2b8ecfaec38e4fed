#include "core/threads.h"

#include <pthread.h>

#include <csignal>
#include <utility>

namespace farandole {

// It inherits the mask.
Status StartThread(std::thread& thread, const char* name, std::function<void()> run) {
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  Status status;
  try {
    thread = std::thread(std::move(run));
    (void)pthread_setname_np(thread.native_handle(), name);
  } catch (...) {
    status = FromException();
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return status;
}

}  // namespace farandole
