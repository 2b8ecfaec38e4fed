#include "ops/mpi/status.h"

#include <array>
#include <string>

namespace farandole {
namespace {

/// MPI's own text, such as "MPI_ERR_TRUNCATE: message truncated".
std::string TextOf(int code) {
  std::array<char, MPI_MAX_ERROR_STRING + 1> text{};
  int length = 0;
  if (MPI_Error_string(code, text.data(), &length) != MPI_SUCCESS) {
    return "error " + std::to_string(code);
  }
  return std::string(text.data(), static_cast<size_t>(length));
}

}  // namespace

Status FromMpi(int code, const MpiCall& call) {
  if (code == MPI_SUCCESS) return Status();
  std::string text = call.name;
  if (call.peer >= 0) text += " to or from rank " + std::to_string(call.peer);
  if (call.bytes >= 0) text += ", " + std::to_string(call.bytes) + " bytes";
  return Internal(text + ": " + TextOf(code));
}

/// MPI_ERR_IN_STATUS names no error: the first request that failed does (MPI 4.0, section 3.7.5).
Status FromMpi(int code, const MpiCall& call, std::span<const MPI_Status> statuses) {
  if (code != MPI_ERR_IN_STATUS) return FromMpi(code, call);
  for (const MPI_Status& status : statuses) {
    // MPI_ERR_PENDING: neither failed nor complete.
    if (status.MPI_ERROR == MPI_SUCCESS || status.MPI_ERROR == MPI_ERR_PENDING) continue;
    return FromMpi(status.MPI_ERROR, {call.name, status.MPI_SOURCE, call.bytes});
  }
  return FromMpi(code, call);
}

}  // namespace farandole
