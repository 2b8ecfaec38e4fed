// Status and Result: how a failure travels inside the library. One translation to exceptions
// happens in the frontends.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace farandole {

/// One code per reaction of the caller; the numbers are part of the C ABI.
enum class Code : int {
  kOk = 0,
  kInvalidArgument = 1,    ///< The call is wrong; nothing was sent. Python: ValueError.
  kMismatch = 2,           ///< Ranks disagree; this one operation is refused on all of them.
  kTimeout = 3,            ///< Started work made no progress within its deadline. Final.
  kUnavailable = 4,        ///< A peer is gone. Final.
  kAborted = 5,            ///< The process set ended, or the engine was shut down.
  kResourceExhausted = 6,  ///< A local allocation failed.
  kUnimplemented = 7,
  kInternal = 8,  ///< A bug or a broken protocol. Final.
  kHalted = 11,   ///< This process must not go on in its job. Never sent.
};

/// Whether a number, e.g. one that was received, is the code of an error.
constexpr bool IsErrorCode(int64_t code) {
  return code > static_cast<int>(Code::kOk) && code <= static_cast<int>(Code::kInternal);
}

/// "OK", "InvalidArgument", ...
const char* CodeName(Code code);

/// What happened to the first rank that failed; the numbers are part of the C ABI.
enum class FailureKind : int {
  kUnknown = 0,
  kError = 1,            ///< Its engine, or a library that it uses, reported an error.
  kKilled = 2,           ///< By a signal: FailureFacts::number.
  kExited = 3,           ///< With an exit code: FailureFacts::number.
  kOutOfMemory = 4,      ///< The system killed it for want of memory.
  kStopped = 5,          ///< SIGSTOP, or Ctrl-Z.
  kFrozen = 6,           ///< It gets no processor, as by a container's freezer.
  kLinkDown = 7,         ///< It cannot be reached any more.
  kDiverged = 8,         ///< Ranks wait for different operations.
  kBlockedInPython = 9,  ///< It runs, or waits in, Python code and submits nothing.
  kBlockedInC = 10,      ///< It is inside C code that holds the interpreter's lock.
};
inline constexpr FailureKind kLastFailureKind = FailureKind::kBlockedInC;

/// What is known of a failure besides its message, for callers that react to it.
struct FailureFacts {
  std::vector<int32_t> ranks = {};  ///< Those that failed, ascending; empty: none, or unknown.
  std::string cause = {};           ///< What failed on the first of them; empty: unknown.
  std::string tensor = {};          ///< What failed, where that is one operation: its name.
  FailureKind kind = FailureKind::kUnknown;
  int32_t number = -1;       ///< Signal or exit code; -1: none, or unknown.
  std::string host = {};     ///< Of the first of the ranks, as the rest; empty: unknown.
  int32_t pid = 0;           ///< 0: unknown.
  std::string last = {};     ///< Its last operation, as text: allreduce "x"; empty: unknown.
  int64_t last_age_ns = -1;  ///< Since that was submitted; -1: unknown.
  bool operator==(const FailureFacts&) const = default;
};

/// A code and an error message that the user can act on. Copying an OK Status allocates nothing and
/// copying a failure shares it. Thread safety: a value; distinct objects may be used from distinct
/// threads.
class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(Code code, std::string message, FailureFacts facts = {})
      : failure_(
            std::make_shared<const Failure>(Failure{code, std::move(message), std::move(facts)})) {}

  bool ok() const { return failure_ == nullptr; }
  Code code() const { return failure_ ? failure_->code : Code::kOk; }
  const std::string& message() const;
  const FailureFacts& facts() const;
  /// "Mismatch: allreduce ..." for logs.
  std::string ToString() const;

 private:
  struct Failure {
    Code code;
    std::string message;
    FailureFacts facts;
  };
  std::shared_ptr<const Failure> failure_;
};

/// A failure on `rank`, unless it names others: "rank 3: <cause>".
Status FailedOn(int rank, const Status& status);

/// As FailedOn, of this process, which is `rank`: with its host and process id.
Status FailedHere(int rank, const Status& status);

/// "rank 2 (pid 7 on host a)", of the facts that are about it; without a process id "rank 2".
std::string RankWithProcess(int rank, const FailureFacts& facts);

/// "killed", "out of memory", ...; empty for kUnknown.
const char* FailureKindName(FailureKind kind);

/// This machine's name as the system knows it; empty: unknown.
std::string HostName();

/// In a handler: what was thrown, which the library itself never does, for want of memory or of a
/// thread: ResourceExhausted.
Status FromException();

inline Status InvalidArgument(std::string m) { return {Code::kInvalidArgument, std::move(m)}; }
inline Status Mismatch(std::string m) { return {Code::kMismatch, std::move(m)}; }
inline Status Timeout(std::string m) { return {Code::kTimeout, std::move(m)}; }
inline Status Unavailable(std::string m) { return {Code::kUnavailable, std::move(m)}; }
inline Status Aborted(std::string m) { return {Code::kAborted, std::move(m)}; }
inline Status ResourceExhausted(std::string m) { return {Code::kResourceExhausted, std::move(m)}; }
inline Status Unimplemented(std::string m) { return {Code::kUnimplemented, std::move(m)}; }
inline Status Internal(std::string m) { return {Code::kInternal, std::move(m)}; }

/// A value or the Status that says why there is none. Never holds an OK Status.
template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : state_(std::move(value)) {}  // NOLINT: implicit by intent, as `return value;`
  Result(Status status)
      : state_(std::move(status)) {}  // NOLINT: implicit by intent, as `return error;`
  bool ok() const { return std::holds_alternative<T>(state_); }
  Status status() const { return ok() ? Status() : std::get<Status>(state_); }
  T& value() & { return std::get<T>(state_); }
  const T& value() const& { return std::get<T>(state_); }
  T&& value() && { return std::get<T>(std::move(state_)); }

 private:
  std::variant<T, Status> state_;
};

}  // namespace farandole

/// Returns from the enclosing function when `expr` is a failed Status.
#define FARANDOLE_RETURN_IF_ERROR(expr)                                                     \
  do {                                                                                      \
    if (::farandole::Status farandole_s_ = (expr); !farandole_s_.ok()) return farandole_s_; \
  } while (false)
