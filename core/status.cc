#include "core/status.h"

#include <exception>
#include <new>
#include <system_error>

namespace farandole {

const char* CodeName(Code code) {
  switch (code) {
    case Code::kOk:
      return "OK";
    case Code::kInvalidArgument:
      return "InvalidArgument";
    case Code::kMismatch:
      return "Mismatch";
    case Code::kTimeout:
      return "Timeout";
    case Code::kUnavailable:
      return "Unavailable";
    case Code::kAborted:
      return "Aborted";
    case Code::kResourceExhausted:
      return "ResourceExhausted";
    case Code::kUnimplemented:
      return "Unimplemented";
    case Code::kInternal:
      return "Internal";
  }
  return "unknown code";
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

}  // namespace farandole
