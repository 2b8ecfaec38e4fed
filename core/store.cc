#include "core/store.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <thread>
#include <utility>

#include "core/clock.h"

namespace farandole {
namespace {

constexpr int64_t kFirstNapNs = 2 * kNsPerMs;
constexpr int64_t kMaxNapNs = 100 * kNsPerMs;
constexpr size_t kMaxValueBytes = size_t{1} << 20;

/// A descriptor that closes itself.
class File {
 public:
  File(int folder, const std::string& name, int flags)
      : descriptor_(openat(folder, name.c_str(), flags | O_CLOEXEC, 0600)) {}
  ~File() {
    if (descriptor_ >= 0) close(descriptor_);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  int get() const { return descriptor_; }

 private:
  const int descriptor_;
};

/// What other users could have written is not to be trusted: a value says whom to connect to.
/// @return what is wrong with it; empty: nothing.
std::string WhyNotPrivate(const struct stat& found) {
  if (found.st_uid != geteuid()) {
    return "belongs to user " + std::to_string(found.st_uid) + ", and not to user " +
           std::to_string(geteuid()) + ", as whom this rank runs";
  }
  if ((found.st_mode & (S_IWGRP | S_IWOTH)) == 0) return {};
  char mode[8];
  (void)std::snprintf(mode, sizeof mode, "%04o", static_cast<unsigned>(found.st_mode & 07777));
  return std::string("may be written by other users: its mode is ") + mode +
         "; 0700 is enough (chmod go-w)";
}

/// Files are opened relative to the folder that was checked, whatever gets its name later.
class FileStore final : public Store {
 public:
  FileStore(std::string path, std::unique_ptr<File> folder)
      : path_(std::move(path)), folder_(std::move(folder)) {}

  // A reader sees the whole value or none: what it opens was complete when it got this name.
  Status Set(const std::string& key, const std::string& value) override {
    const std::string name = NameOf(key);
    const std::string draft = name + "." + std::to_string(getpid()) + ".new";
    (void)unlinkat(folder_->get(), draft.c_str(), 0);  // of a process of the same number
    bool written = false;
    {
      const File file(folder_->get(), draft, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW);
      written = file.get() >= 0 &&
                write(file.get(), value.data(), value.size()) == static_cast<ssize_t>(value.size());
    }
    if (written && renameat(folder_->get(), draft.c_str(), folder_->get(), name.c_str()) == 0) {
      return Status();
    }
    const std::string reason = std::strerror(errno);
    (void)unlinkat(folder_->get(), draft.c_str(), 0);
    return Unavailable("store: " + path_ + "/" + name + " cannot be written: " + reason);
  }

  Result<std::string> Get(const std::string& key, int64_t timeout_ns) override {
    const std::string name = NameOf(key);
    const std::string path = path_ + "/" + name;
    const int64_t deadline_ns = SteadyClock().NowNs() + timeout_ns;
    for (int64_t nap_ns = kFirstNapNs;; nap_ns = std::min(2 * nap_ns, kMaxNapNs)) {
      const File file(folder_->get(), name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK);
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
    struct stat found {};
    if (fstat(file, &found) != 0)
      return Unavailable("store: " + path + ": " + std::strerror(errno));
    if (!S_ISREG(found.st_mode)) return Unavailable("store: " + path + " is not a file");
    const std::string why = WhyNotPrivate(found);
    if (!why.empty()) return Unavailable("store: " + path + " " + why);
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
  static std::string NameOf(std::string key) {
    std::ranges::replace(key, '/', '_');
    return key;
  }

  const std::string path_;
  const std::unique_ptr<File> folder_;
};

}  // namespace

Result<std::unique_ptr<Store>> OpenFileStore(const std::string& folder) {
  if (mkdir(folder.c_str(), 0700) != 0 && errno != EEXIST) {
    return InvalidArgument("store: the folder " + folder +
                           " cannot be made: " + std::strerror(errno));
  }
  auto file = std::make_unique<File>(AT_FDCWD, folder, O_RDONLY | O_DIRECTORY);
  struct stat found {};
  if (file->get() < 0 || fstat(file->get(), &found) != 0) {
    return InvalidArgument("store: " + folder + ": " + std::strerror(errno));
  }
  const std::string why = WhyNotPrivate(found);
  if (!why.empty()) return InvalidArgument("store: the folder " + folder + " " + why);
  return std::unique_ptr<Store>(std::make_unique<FileStore>(folder, std::move(file)));
}

}  // namespace farandole
