#include "core/store.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>

#include "core/clock.h"

namespace farandole {
namespace {

constexpr int64_t kFirstNapNs = 2 * kNsPerMs;
constexpr int64_t kMaxNapNs = 100 * kNsPerMs;
constexpr size_t kMaxValueBytes = size_t{1} << 20;

/// A descriptor that closes itself.
class File {
 public:
  File(const std::string& path, int flags)
      : descriptor_(open(path.c_str(), flags | O_CLOEXEC, 0600)) {}
  ~File() {
    if (descriptor_ >= 0) close(descriptor_);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  int get() const { return descriptor_; }

 private:
  const int descriptor_;
};

class FileStore final : public Store {
 public:
  explicit FileStore(std::string folder) : folder_(std::move(folder)) {}

  // A reader sees the whole value or none: what it opens was complete when it got this name.
  Status Set(const std::string& key, const std::string& value) override {
    const std::string path = PathOf(key);
    const std::string draft = path + "." + std::to_string(getpid()) + ".new";
    (void)unlink(draft.c_str());  // of a process of the same number
    bool written = false;
    {
      const File file(draft, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW);
      written = file.get() >= 0 &&
                write(file.get(), value.data(), value.size()) == static_cast<ssize_t>(value.size());
    }
    if (written && rename(draft.c_str(), path.c_str()) == 0) return Status();
    const std::string reason = std::strerror(errno);
    (void)unlink(draft.c_str());
    return Unavailable("store: " + path + " cannot be written: " + reason);
  }

  Result<std::string> Get(const std::string& key, int64_t timeout_ns) override {
    const std::string path = PathOf(key);
    const int64_t deadline_ns = SteadyClock().NowNs() + timeout_ns;
    for (int64_t nap_ns = kFirstNapNs;; nap_ns = std::min(2 * nap_ns, kMaxNapNs)) {
      const File file(path, O_RDONLY | O_NOFOLLOW);
      if (file.get() >= 0) return Read(file.get(), path);
      if (errno != ENOENT && errno != ESTALE) {
        return Unavailable("store: " + path + " cannot be read: " + std::strerror(errno));
      }
      if (SteadyClock().NowNs() >= deadline_ns) {
        return Timeout("store: nobody has written " + path + " in time");
      }
      std::this_thread::sleep_for(std::chrono::nanoseconds(nap_ns));
    }
  }

 private:
  static Result<std::string> Read(int file, const std::string& path) {
    std::string value;
    char bytes[4096];
    for (;;) {
      const ssize_t count = read(file, bytes, sizeof bytes);
      if (count == 0) return value;
      if (count < 0) return Unavailable("store: " + path + ": " + std::strerror(errno));
      value.append(bytes, static_cast<size_t>(count));
      if (value.size() > kMaxValueBytes) return Unavailable("store: " + path + " is too long");
    }
  }

  // A key is a file's name, whatever characters it has.
  std::string PathOf(const std::string& key) const {
    std::string name = key;
    std::ranges::replace(name, '/', '_');
    return folder_ + "/" + name;
  }

  const std::string folder_;
};

}  // namespace

Result<std::unique_ptr<Store>> OpenFileStore(const std::string& folder) {
  struct stat found {};
  if (mkdir(folder.c_str(), 0700) != 0 && errno != EEXIST) {
    return InvalidArgument("store: the folder " + folder +
                           " cannot be made: " + std::strerror(errno));
  }
  if (stat(folder.c_str(), &found) != 0) {
    return InvalidArgument("store: " + folder + ": " + std::strerror(errno));
  }
  if (!S_ISDIR(found.st_mode)) return InvalidArgument("store: " + folder + " is not a folder");
  return std::unique_ptr<Store>(std::make_unique<FileStore>(folder));
}

}  // namespace farandole
