// The fake libnccl in a test's hands: loaded at run time, its functions by their real types.
//
// Link farandole_fake_nccl_files, which says where the libraries are:
//   static const FakeNccl nccl(FARANDOLE_FAKE_NCCL);
//   nccl.Get<decltype(&ncclAllReduce)>("ncclAllReduce")(...);
//   nccl.control().take_misuses();
#pragma once

#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>

#include "test/fakes/nccl/control.h"

namespace farandole {

/// Thread safety: any thread. Lifetime: the library stays until process exit.
class FakeNccl {
 public:
  /// Ends the program if it cannot be loaded, or is not the fake.
  explicit FakeNccl(const char* path) : library_(dlopen(path, RTLD_NOW | RTLD_LOCAL)) {
    if (library_ == nullptr || dlsym(library_, kFakeNcclControlName) == nullptr) {
      std::fprintf(stderr, "no fake NCCL in %s: %s\n", path, dlerror());
      std::abort();
    }
    control_ = Get<FakeNcclControlFunction>(kFakeNcclControlName)();
  }
  /// nullptr where it has no such function.
  template <class Function>
  Function Get(const char* name) const {
    return reinterpret_cast<Function>(dlsym(library_, name));
  }
  const FakeNcclControl& control() const { return *control_; }

 private:
  void* const library_;
  const FakeNcclControl* control_ = nullptr;
};

}  // namespace farandole
