#include "test/fakes/nccl/control.h"

#include <string>

#include "test/fakes/nccl/comm.h"
#include "test/fakes/nccl/journal.h"

namespace farandole {
namespace {

FakeNcclJournal& Journal() { return FakeNcclJournal::Get(); }

const char* TakeMisuses() {
  thread_local std::string text;
  text = Journal().TakeMisuses();
  return text.c_str();
}

int64_t LiveComms() {
  int64_t live = 0;
  for (ncclComm* comm : FakeNcclComms()) {
    std::lock_guard lock(comm->mutex);
    if (!comm->over()) ++live;
  }
  return live;
}

constexpr FakeNcclControl kControl = {
    .set = [](const char* name, const char* value) { Journal().Set(name, value); },
    .reset = [] { Journal().Reset(); },
    .calls = [] { return Journal().calls(); },
    .call = [](size_t index) { return Journal().call(index); },
    .times = [](const char* name) { return Journal().times(name); },
    .take_misuses = &TakeMisuses,
    .live_comms = &LiveComms,
};

}  // namespace
}  // namespace farandole

extern "C" __attribute__((visibility("default"))) const farandole::FakeNcclControl*
farandole_fake_nccl() {
  return &farandole::kControl;
}
