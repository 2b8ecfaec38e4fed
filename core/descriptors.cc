#include "core/descriptors.h"

#include <dirent.h>
#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <memory>

namespace farandole {
namespace {

constexpr int64_t kSpare = 256;  // of the program

std::atomic<int64_t> greatest_need{0};

int64_t ToCount(rlim_t limit) {
  return limit == RLIM_INFINITY ? INT64_MAX : static_cast<int64_t>(limit);
}

/// @return -1 if none is left for the folder that lists them.
int64_t CountOpen() {
  const std::unique_ptr<DIR, int (*)(DIR*)> folder(opendir("/proc/self/fd"), closedir);
  if (folder == nullptr) return -1;
  int64_t count = 0;
  while (readdir(folder.get()) != nullptr) ++count;
  return count - 3;  // ".", ".." and the folder's own
}

/// "this process has all 24 descriptors that it may have (ulimit -n) and may need 57"
std::string DescribeLimit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return "the limit is unknown";
  std::string text = "this process has all " + std::to_string(ToCount(limit.rlim_cur)) +
                     " descriptors that it may have (ulimit -n)";
  if (const int64_t need = greatest_need.load(); need > 0)
    text += " and may need " + std::to_string(need);
  return text;
}

}  // namespace

bool IsExhaustion(int error) {
  return error == EMFILE || error == ENFILE || error == ENOBUFS || error == ENOMEM;
}

Status SystemError(const std::string& what, int error) {
  const int before = errno;
  std::string text = what + ": " + std::strerror(error);
  if (error == EMFILE) text += "; " + DescribeLimit();
  errno = before;
  return IsExhaustion(error) ? ResourceExhausted(text) : Unavailable(text);
}

// A limit far above the need slows down programs that close every descriptor they might have.
Status ReserveDescriptors(int64_t needed) {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return SystemError("getrlimit", errno);
  const int64_t counted = CountOpen();
  const int64_t open = counted < 0 ? ToCount(limit.rlim_cur) : counted;
  const int64_t total = open + needed;
  for (int64_t known = greatest_need.load();
       known < total && !greatest_need.compare_exchange_weak(known, total);) {
  }
  const int64_t most = ToCount(limit.rlim_max);
  const int64_t wanted = std::min(total + kSpare, most);
  if (ToCount(limit.rlim_cur) < wanted) {
    limit.rlim_cur = static_cast<rlim_t>(wanted);
    if (setrlimit(RLIMIT_NOFILE, &limit) != 0) return SystemError("setrlimit", errno);
  }
  if (total <= most) return {};
  return ResourceExhausted("this process may need " + std::to_string(total) +
                           " descriptors and can have " + std::to_string(most) + " (ulimit -Hn)");
}

}  // namespace farandole
