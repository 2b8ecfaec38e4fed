// A libnccl that answers as a test told it to, and writes down what it was asked. It moves nothing;
// the fake that does is in test/fakes.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ops/gpu/nccl/library.h"

namespace farandole {

/// Thread safety: one thread at a time calls it. One at a time: NCCL's functions have no place for
/// a pointer to it.
class ScriptedNccl {
 public:
  ScriptedNccl() : library_(Api(), 23203, "/somewhere/libnccl.so.2") { now() = this; }
  ~ScriptedNccl() { now() = nullptr; }
  ScriptedNccl(const ScriptedNccl&) = delete;
  ScriptedNccl& operator=(const ScriptedNccl&) = delete;

  const NcclLibrary* library() const { return &library_; }
  int64_t CountOf(const std::string& call) const {
    int64_t count = 0;
    for (const std::string& one : calls) count += one == call ? 1 : 0;
    return count;
  }

  // What it will say: call -> results in turn, then success.
  std::map<std::string, std::deque<NcclResult>> answers;
  std::deque<NcclResult> states;  ///< Told by CommGetAsyncError in turn, then success.
  std::string last_error;
  std::function<void()> when_asked = [] {};  ///< Called by CommGetAsyncError.
  /// Called by CommDestroy and MemFree.
  std::function<void(std::string_view call)> when_ending = [](std::string_view) {};

  // What it was asked.
  std::vector<std::string> calls;
  NcclConfig config;
  NcclUniqueId unique_id{};
  int size = -1;
  int index = -1;
  struct Reduction {
    const void* in = nullptr;
    void* out = nullptr;
    size_t count = 0;
    NcclStream stream = nullptr;
  };
  std::function<void(Reduction)> when_reducing = [](Reduction) {};

 private:
  static ScriptedNccl*& now() {
    static ScriptedNccl* script = nullptr;
    return script;
  }
  static NcclComm Comm() {
    static int place = 0;
    return reinterpret_cast<NcclComm>(&place);
  }
  static NcclResult Answer(const char* call) {
    now()->calls.emplace_back(call);
    std::deque<NcclResult>& results = now()->answers[call];
    if (results.empty()) return NcclResult::kSuccess;
    const NcclResult result = results.front();
    results.pop_front();
    return result;
  }

  static NcclApi Api() {
    NcclApi api;
    api.GetVersion = [](int* version) {
      *version = 23203;
      return NcclResult::kSuccess;
    };
    api.GetUniqueId = [](NcclUniqueId*) { return Answer("GetUniqueId"); };
    api.GetErrorString = [](NcclResult result) {
      return result == NcclResult::kRemoteError ? "remote process exited" : "unhandled error";
    };
    api.GetLastError = [](NcclComm) { return now()->last_error.c_str(); };
    api.CommInitRankConfig = [](NcclComm* comm, int n, NcclUniqueId id, int rank,
                                NcclConfig* given) {
      now()->config = *given;
      now()->unique_id = id;
      now()->size = n;
      now()->index = rank;
      *comm = Comm();
      return Answer("CommInitRankConfig");
    };
    api.CommGetAsyncError = [](NcclComm, NcclResult* state) {
      now()->when_asked();
      *state = NcclResult::kSuccess;
      if (!now()->states.empty()) {
        *state = now()->states.front();
        now()->states.pop_front();
      }
      return Answer("CommGetAsyncError");
    };
    api.CommFinalize = [](NcclComm) { return Answer("CommFinalize"); };
    api.CommDestroy = [](NcclComm) {
      now()->when_ending("CommDestroy");
      return Answer("CommDestroy");
    };
    api.CommAbort = [](NcclComm) { return Answer("CommAbort"); };
    api.AllReduce = [](const void* in, void* out, size_t count, NcclDataType, NcclRedOp, NcclComm,
                       NcclStream stream) {
      now()->when_reducing({in, out, count, stream});
      return Answer("AllReduce");
    };
    api.Broadcast = [](const void*, void*, size_t, NcclDataType, int, NcclComm, NcclStream) {
      return Answer("Broadcast");
    };
    api.AllGather = [](const void*, void*, size_t, NcclDataType, NcclComm, NcclStream) {
      return Answer("AllGather");
    };
    api.ReduceScatter = [](const void*, void*, size_t, NcclDataType, NcclRedOp, NcclComm,
                           NcclStream) { return Answer("ReduceScatter"); };
    api.Send = [](const void*, size_t, NcclDataType, int, NcclComm, NcclStream) {
      return Answer("Send");
    };
    api.Recv = [](void*, size_t, NcclDataType, int, NcclComm, NcclStream) {
      return Answer("Recv");
    };
    api.MemAlloc = [](void** memory, size_t bytes) {
      *memory = std::malloc(bytes);
      return Answer("MemAlloc");
    };
    api.MemFree = [](void* memory) {
      now()->when_ending("MemFree");
      std::free(memory);
      return Answer("MemFree");
    };
    api.CommRegister = [](NcclComm, void*, size_t, void**) { return Answer("CommRegister"); };
    api.GroupStart = [] { return Answer("GroupStart"); };
    api.GroupEnd = [] { return Answer("GroupEnd"); };
    return api;
  }

  const NcclLibrary library_;
};

}  // namespace farandole
