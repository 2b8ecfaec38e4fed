/// @file
/// What a Job writes: checkpoints, and the chain of hashes. Included by farandole/job.h.
#pragma once

#include <farandole/result.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <deque>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <mutex>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

namespace farandole {

/// @cond internal
namespace detail {

using Bytes = std::vector<std::uint8_t>;

/// In 64 hexadecimal digits.
inline std::string sha256(const void* data, std::size_t bytes) {
  std::uint8_t digest[32];
  check(farandole_sha256(data, bytes, digest)).value();
  std::string text;
  for (const std::uint8_t byte : digest)
    for (const int digit : {byte >> 4, byte & 15}) text += "0123456789abcdef"[digit];
  return text;
}

/// Of what does not end a training.
inline void warn(const std::string& text) { std::fprintf(stderr, "farandole: %s\n", text.c_str()); }

/// Writes a file or a folder to the disk. @throws std::system_error.
inline void flush_to_disk(const std::filesystem::path& path) {
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  const int code = file < 0 || fsync(file) != 0 ? errno : 0;
  if (file >= 0) close(file);
  if (code != 0) throw std::system_error(code, std::generic_category(), path.string());
}

/// The files `step-000000000120-SHA256.state` of a folder, each with a state after a step. A file
/// is written under another name, flushed to the disk and renamed, so a name stands for a whole
/// file; the hash is that of its content.
///
/// Thread safety: one thread at a time.
class Checkpoints {
 public:
  Checkpoints(std::string folder, int keep)
      : folder_(std::move(folder)), keep_(static_cast<std::size_t>(keep)) {}

  /// Of the last file that was written or read; -1: none.
  std::int64_t last_step() const { return last_step_; }

  /// The newest file that is as it was written; empty: there is none. Warns of others.
  Bytes newest() {
    for (const std::filesystem::path& path : files("step-")) {
      std::ifstream file(path, std::ios::binary | std::ios::ate);
      Bytes content(file ? static_cast<std::size_t>(file.tellg()) : 0);
      file.seekg(0);
      file.read(reinterpret_cast<char*>(content.data()),
                static_cast<std::streamsize>(content.size()));
      const std::string name = path.filename().string();
      if (name == name_of(std::atoll(name.c_str() + 5), content)) {
        last_step_ = std::atoll(name.c_str() + 5);
        return content;
      }
      warn("checkpoint " + path.string() +
           " is damaged, or cannot be read: its SHA-256 is not the one in its name; looking for an "
           "earlier one");
    }
    return {};
  }

  /// Deletes all but the newest ones. @return whether it was written; else it warns.
  bool write(std::int64_t step, const Bytes& content) {
    try {
      std::filesystem::create_directories(folder_);
      for (const auto& left : files(".step-")) std::filesystem::remove(left);  // of a killed writer
      const std::string name = name_of(step, content);
      const std::filesystem::path draft = folder_ / ("." + name);
      std::ofstream file(draft, std::ios::binary);
      file.write(reinterpret_cast<const char*>(content.data()),
                 static_cast<std::streamsize>(content.size()));
      file.close();
      if (!file) throw std::system_error(errno, std::generic_category(), draft.string());
      flush_to_disk(draft);
      std::filesystem::rename(draft, folder_ / name);
      flush_to_disk(folder_);
      last_step_ = step;
      const std::vector<std::filesystem::path> known = files("step-");
      for (std::size_t i = keep_; i < known.size(); ++i) std::filesystem::remove(known[i]);
      return true;
    } catch (const std::system_error& error) {
      warn("checkpoint of step " + std::to_string(step) + " was not written: " + error.what());
      return false;
    }
  }

 private:
  static std::string name_of(std::int64_t step, const Bytes& content) {
    char text[32];
    std::snprintf(text, sizeof text, "step-%012lld-", static_cast<long long>(step));
    return text + sha256(content.data(), content.size()) + ".state";
  }

  /// Whose names begin so and end as name_of() does, the latest first.
  std::vector<std::filesystem::path> files(const std::string& prefix) const {
    std::vector<std::filesystem::path> found;
    std::error_code none;
    for (const auto& entry : std::filesystem::directory_iterator(folder_, none)) {
      const std::filesystem::path& path = entry.path();
      if (path.filename().string().rfind(prefix, 0) == 0 && path.extension() == ".state")
        found.push_back(path);
    }
    std::sort(found.rbegin(), found.rend());
    return found;
  }

  const std::filesystem::path folder_;
  const std::size_t keep_;
  std::int64_t last_step_ = -1;
};

/// Writes `chain.jsonl` in a folder, in the format of farandole.chain (Python), for `farandole
/// verify A B`. Every rank gives it every line; the rank that writes appends those that the file
/// lacks, so another one can go on when that is lost.
///
/// Thread safety: write() from any thread, the rest from one.
class Chain {
 public:
  /// `folder` empty: nothing is written. `header` is the first line.
  Chain(std::string folder, std::string header)
      : folder_(std::move(folder)), header_(std::move(header)) {}

  /// A generation of `size` ranks begins with a step: whether this rank writes now.
  void start(bool writes, std::int64_t step, int size) {
    const std::lock_guard<std::mutex> lock(mutex_);
    file_ = std::ofstream();
    if (!writes || folder_.empty()) return;
    const std::int64_t last = open_at_end();
    for (const auto& [number, line] : latest_)
      if (number > last && number < step) append_line(line);
    append_line("{\"generation\": {\"size\": " + std::to_string(size) +
                "}, \"next_step\": " + std::to_string(step) + "}");
  }

  /// The line of a step that was applied.
  void append(std::int64_t step, const std::string& line) {
    write(line);
    latest_.emplace_back(step, line);
    if (latest_.size() > kKept) latest_.pop_front();
  }

  /// Any line, on the rank that writes. After one that could not be written, which is a warning,
  /// there are no more.
  void write(const std::string& line) {
    const std::lock_guard<std::mutex> lock(mutex_);
    append_line(line);
  }

 private:
  static constexpr std::size_t kKept = 256;
  static constexpr std::streamoff kTail = 1 << 16;  // bytes, in which the last step is looked for

  /// @return the last step in the file; -1: none.
  std::int64_t open_at_end() {
    std::error_code none;  // what fails, fails again below
    std::filesystem::create_directories(folder_, none);
    const std::string path = folder_ + "/chain.jsonl";
    std::ifstream before(path, std::ios::binary | std::ios::ate);
    before.seekg(-std::min<std::streamoff>(before.tellg(), kTail), std::ios::end);
    std::string text(std::istreambuf_iterator<char>(before), {});
    file_.open(path, std::ios::binary | std::ios::app);
    if (text.empty()) append_line(header_);
    if (!text.empty() && text.back() != '\n') append_line("");  // after a writer that was killed
    text.resize(text.rfind('\n') + 1);
    const std::size_t at = text.rfind("{\"step\": ");
    return at == std::string::npos ? -1 : std::atoll(text.c_str() + at + 9);
  }

  void append_line(const std::string& line) {
    if (!file_.is_open() && !file_.fail()) return;  // another rank writes
    file_ << line + "\n" << std::flush;
    if (file_.good() || folder_.empty()) return;
    warn("the chain of hashes in " + folder_ + " is not written any more");
    folder_.clear();
    file_ = std::ofstream();
  }

  std::string folder_;
  const std::string header_;
  std::mutex mutex_;
  std::ofstream file_;
  std::deque<std::pair<std::int64_t, std::string>> latest_;
};

}  // namespace detail
/// @endcond

}  // namespace farandole
