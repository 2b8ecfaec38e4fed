// The fake libnccl from a test's side: what was called, and what is to go wrong.
//
// Settings are environment variables, FARANDOLE_TEST_NCCL_<NAME>, read at each use; `set` comes
// before them. All are optional:
//   VERSION      what ncclGetVersion says, as 23203
//   RANK         the settings below concern this rank of a communicator alone
//   INIT_HANGS   1: the communicator never comes up
//   INIT_POLLS   n: it takes n looks at ncclCommGetAsyncError at least
//   INIT_ERROR   a result: it comes up with that
//   BUSY_US      n: the thread that a call of a non-blocking communicator starts sleeps so long
//                before it puts anything into the stream; unset: up to 200, drawn each time
//   ERROR_AT     k: the k-th collective of a communicator meets an error: it and all later ones end
//                only by an abort, and ncclCommGetAsyncError says ncclRemoteError from then on
//   ERROR_TEXT   what ncclGetLastError says then
#pragma once

#include <cstddef>
#include <cstdint>

namespace farandole {

/// One call that was made, in order. Not kept: questions (ncclGet...).
struct FakeNcclCall {
  const char* name = "";
  const void* comm = nullptr;
  const void* stream = nullptr;
  int64_t count = 0;
  int datatype = -1;
  int op = -1;    ///< Or the root, or the peer, or the most blocks (maxCTAs) of an init.
  int rank = -1;  ///< Of the communicator; -1 where there is none.
  int result = 0;
};

/// Thread safety: any thread. Texts are valid until the calling thread's next call.
struct FakeNcclControl {
  /// Setting `name` ("BUSY_US"); nullptr takes it back.
  void (*set)(const char* name, const char* value);
  /// Takes all settings back and forgets calls and misuses. Communicators stay.
  void (*reset)();
  size_t (*calls)();
  FakeNcclCall (*call)(size_t index);
  /// How often a function was called, questions included.
  int64_t (*times)(const char* name);
  /// Wrong uses so far, one a line; also written to stderr. Taking them forgets them.
  const char* (*take_misuses)();
  /// Communicators neither destroyed nor aborted.
  int64_t (*live_comms)();
};

/// The library's own symbol, by which it says that it is a fake: dlsym(library, this name).
inline constexpr char kFakeNcclControlName[] = "farandole_fake_nccl";
using FakeNcclControlFunction = const FakeNcclControl* (*)();

}  // namespace farandole
