// One of two ranks that are processes: fake_nccl_rank ID RANK. Exit status 0: the sum was right.
#include <cstdio>
#include <cstdlib>

#include "test/fakes/fake_device.h"
#include "test/fakes/nccl/abi.h"
#include "test/fakes/nccl/open.h"

namespace farandole {
namespace {

int Reduce(const char* id_text, int rank) {
  const FakeNccl nccl(FARANDOLE_FAKE_NCCL);
  FakeDeviceRuntime runtime(2);
  if (!runtime.fake(rank).MakeCurrent().ok()) return 2;
  FakeStream* stream = runtime.fake(rank).NewStream();
  ncclUniqueId id = {};
  std::snprintf(id.internal, sizeof id.internal, "%s", id_text);
  ncclComm_t comm = nullptr;
  const auto init = nccl.Get<decltype(&ncclCommInitRankConfig)>("ncclCommInitRankConfig");
  if (init(&comm, 2, id, rank, nullptr) != ncclSuccess) return 3;
  float value = static_cast<float>(rank) + 1.0f;
  const auto all_reduce = nccl.Get<decltype(&ncclAllReduce)>("ncclAllReduce");
  if (all_reduce(&value, &value, 1, ncclFloat32, ncclSum, comm,
                 static_cast<cudaStream_t>(stream->handle())) != ncclSuccess) {
    return 4;
  }
  stream->Synchronize();
  if (nccl.Get<decltype(&ncclCommDestroy)>("ncclCommDestroy")(comm) != ncclSuccess) return 5;
  return value == 3.0f ? 0 : 6;
}

}  // namespace
}  // namespace farandole

int main(int count, char** arguments) {
  if (count != 3) return 1;
  return farandole::Reduce(arguments[1], std::atoi(arguments[2]));
}
