#include "core/status.h"

#include <unistd.h>

#include <exception>
#include <new>
#include <system_error>

#include "core/types.h"

namespace farandole {

const char* CodeName(Code code) {
  static constexpr std::string_view kNames[] = {
      "OK",      "InvalidArgument",   "Mismatch",      "Timeout", "Unavailable",
      "Aborted", "ResourceExhausted", "Unimplemented", "Internal"};
  if (code == Code::kHalted) return "Halted";
  return NameAt(kNames, code, "unknown code").data();
}

// Copies share the failure: the reference is valid as long as one of them exists.
const std::string& Status::message() const {
  static const std::string empty;
  return failure_ ? failure_->message : empty;
}

const FailureFacts& Status::facts() const {
  static const FailureFacts none;
  return failure_ ? failure_->facts : none;
}

std::string Status::ToString() const {
  return ok() ? "OK" : std::string(CodeName(code())) + ": " + message();
}

Status FromException() {
  try {
    throw;
  } catch (const std::bad_alloc&) {
    return ResourceExhausted("out of memory");
  } catch (const std::system_error& error) {
    return ResourceExhausted(std::string("a thread cannot be started: ") + error.what());
  } catch (const std::exception& error) {
    return ResourceExhausted(error.what());
  }
}

Status FailedOn(int rank, const Status& status) {
  if (status.ok() || !status.facts().ranks.empty()) return status;
  const std::string self = "rank " + std::to_string(rank) + ": ";
  FailureFacts facts = status.facts();
  facts.ranks = {rank};
  facts.cause = status.message().substr(status.message().starts_with(self) ? self.size() : 0);
  return {status.code(), status.message(), std::move(facts)};
}

Status FailedHere(int rank, const Status& status) {
  if (status.ok() || !status.facts().ranks.empty()) return status;
  const Status failed = FailedOn(rank, status);
  FailureFacts facts = failed.facts();
  facts.host = HostName();
  facts.pid = getpid();
  if (facts.kind == FailureKind::kUnknown) facts.kind = FailureKind::kError;
  return {failed.code(), failed.message(), std::move(facts)};
}

const char* FailureKindName(FailureKind kind) {
  static constexpr std::string_view kNames[] = {"",
                                                "error",
                                                "killed",
                                                "exited",
                                                "out of memory",
                                                "stopped",
                                                "frozen",
                                                "link down",
                                                "diverged",
                                                "blocked in python",
                                                "blocked in c"};
  return NameAt(kNames, kind, "").data();
}

std::string RankWithProcess(int rank, const FailureFacts& facts) {
  std::string text = "rank " + std::to_string(rank);
  if (facts.pid == 0) return text;
  return text + " (pid " + std::to_string(facts.pid) + " on host " + facts.host + ")";
}

std::string HostName() {
  char host[256] = {};
  return gethostname(host, sizeof(host) - 1) == 0 ? host : "";
}

}  // namespace farandole
