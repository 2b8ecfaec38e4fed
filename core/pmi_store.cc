#include "core/pmi_store.h"

#include <dlfcn.h>
#include <link.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>

#include "core/clock.h"

namespace farandole {
namespace {

/// Of what needs no other rank.
constexpr int64_t kAnswerNs = 10 * kNsPerSecond;
constexpr int64_t kSliceNs = 20 * kNsPerMs;
/// What every launcher takes, where it does not say more.
constexpr size_t kLeastValueBytes = 256;
/// Stands at the end of a part of a value that goes on.
constexpr char kGoesOn = '+';

/// The value of `name` in a line "cmd=... name=value ..."; nullopt: it has none.
std::optional<std::string_view> FieldOf(std::string_view line, std::string_view name) {
  while (!line.empty()) {
    const std::string_view word = line.substr(0, line.find(' '));
    line.remove_prefix(std::min(line.size(), word.size() + 1));
    if (word.size() > name.size() && word.starts_with(name) && word[name.size()] == '=')
      return word.substr(name.size() + 1);
  }
  return std::nullopt;
}

/// Values may hold blanks, which end a word here.
std::string ToHex(std::string_view text) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string hex;
  for (const char one : text) {
    const auto byte = static_cast<unsigned char>(one);
    hex += kDigits[byte >> 4];
    hex += kDigits[byte & 15];
  }
  return hex;
}

std::optional<std::string> FromHex(std::string_view hex) {
  std::string text;
  for (size_t at = 0; at + 1 < hex.size(); at += 2) {
    int byte = 0;
    const auto [stop, error] = std::from_chars(&hex[at], &hex[at] + 2, byte, 16);
    if (error != std::errc() || stop != &hex[at] + 2) return std::nullopt;
    text += static_cast<char>(byte);
  }
  return hex.size() % 2 == 0 ? std::optional(text) : std::nullopt;
}

/// Whether this library is an MPI library that has been initialised, which then says the end
/// itself.
int IsMpi(dl_phdr_info* library, size_t, void*) {
  const std::string_view path = library->dlpi_name;
  if (!path.substr(path.rfind('/') + 1).starts_with("libmpi")) return 0;
  void* const handle = dlopen(library->dlpi_name, RTLD_LAZY | RTLD_NOLOAD);
  const auto is_initialised =
      handle == nullptr ? nullptr
                        : reinterpret_cast<int (*)(int*)>(dlsym(handle, "MPI_Initialized"));
  int is = 0;
  if (is_initialised != nullptr) is_initialised(&is);
  return is;
}

/// The process's connection to its launcher. Each call of Set or Get that succeeds is a rendezvous.
class Pmi {
 public:
  explicit Pmi(int descriptor) : descriptor_(descriptor), process_(getpid()) {}

  Status Set(const std::string& key, const std::string& value) {
    FARANDOLE_RETURN_IF_ERROR(Begin());
    // The value of a join that was given up has to be got first.
    if (in_barrier_ && value != put_) FARANDOLE_RETURN_IF_ERROR(Barrier(kSliceNs));
    if (!in_barrier_) FARANDOLE_RETURN_IF_ERROR(Put(key, ToHex(value)));
    put_ = value;
    return Barrier(kSliceNs);
  }

  Result<std::string> Get(const std::string& key, int64_t timeout_ns) {
    FARANDOLE_RETURN_IF_ERROR(Begin());
    FARANDOLE_RETURN_IF_ERROR(Barrier(timeout_ns));
    std::string hex;
    for (size_t part = 0; part == 0 || hex.back() == kGoesOn; ++part) {
      if (part > 0) hex.pop_back();
      const Result<std::string> line =
          Ask("cmd=get" + InSpace(rendezvous_ - 1, key, part), "value");
      if (!line.ok()) return line;
      hex += line.value();
    }
    const std::optional<std::string> value = FromHex(hex);
    return value ? Result<std::string>(*value) : Unavailable(Said("value=" + hex));
  }

  /// At exit.
  void End() {
    constexpr std::string_view kLine = "cmd=finalize\n";
    if (process_ != getpid() || space_.empty()) return;
    if (dl_iterate_phdr(&IsMpi, nullptr) != 0) return;
    if (send(descriptor_, kLine.data(), kLine.size(), MSG_NOSIGNAL) < 0) return;
    (void)Receive(kNsPerSecond);
  }

 private:
  /// What the other requests need to know, once.
  Status Begin() {
    if (!space_.empty()) return {};
    const auto init = Ask("cmd=init pmi_version=1 pmi_subversion=1", "pmi_version");
    if (!init.ok()) return init.status();
    if (init.value() != "1") return Unavailable(Said("pmi_version=" + init.value()));
    const auto most = Ask("cmd=get_maxes", "vallen_max");
    if (!most.ok()) return most.status();
    size_t bytes = 0;
    std::from_chars(most.value().data(), most.value().data() + most.value().size(), bytes);
    part_bytes_ = std::max(bytes, kLeastValueBytes) - 2;  // for kGoesOn, and C's end
    const auto space = Ask("cmd=get_my_kvsname", "kvsname");
    if (!space.ok()) return space.status();
    space_ = space.value();
    return {};
  }

  Status Put(const std::string& key, const std::string& hex) {
    for (size_t at = 0, part = 0; at == 0 || at < hex.size(); at += part_bytes_, ++part) {
      std::string value = hex.substr(at, part_bytes_);
      if (at + part_bytes_ < hex.size()) value += kGoesOn;
      const auto put = Ask("cmd=put" + InSpace(rendezvous_, key, part) + " value=" + value, "rc");
      if (!put.ok()) return put.status();
    }
    return {};
  }

  Status Barrier(int64_t timeout_ns) {
    if (!in_barrier_) FARANDOLE_RETURN_IF_ERROR(Send("cmd=barrier_in"));
    in_barrier_ = true;
    const Result<std::string> line = Receive(timeout_ns);
    if (line.status().code() == Code::kTimeout)
      return Timeout("the launcher's barrier waits for a rank that has not called init()");
    if (!line.ok()) return line.status();
    in_barrier_ = false;
    ++rendezvous_;
    return FieldOf(line.value(), "cmd") == "barrier_out" ? Status()
                                                         : Unavailable(Said(line.value()));
  }

  /// A key is set once for each rendezvous, as most launchers do not replace a value.
  std::string InSpace(uint64_t number, const std::string& key, size_t part) const {
    return " kvsname=" + space_ + " key=" + key + "." + std::to_string(number) + "." +
           std::to_string(part);
  }

  /// @return the field of the answer.
  Result<std::string> Ask(const std::string& request, std::string_view field) {
    FARANDOLE_RETURN_IF_ERROR(Send(request));
    Result<std::string> line = Receive(kAnswerNs);
    if (line.status().code() == Code::kTimeout)
      return Unavailable(Said("nothing to \"" + request.substr(0, request.find(' ')) + "\""));
    if (!line.ok()) return line;
    const std::optional<std::string_view> value = FieldOf(line.value(), field);
    const bool is_refused = FieldOf(line.value(), "rc").value_or("0") != "0";
    if (!value || is_refused) return Unavailable(Said(line.value()));
    return std::string(*value);
  }

  Status Send(const std::string& request) {
    const std::string line = request + "\n";
    for (size_t at = 0; at < line.size();) {
      const ssize_t sent = send(descriptor_, &line[at], line.size() - at, MSG_NOSIGNAL);
      if (sent < 0 && errno != EINTR) return Unavailable(Said(std::strerror(errno)));
      at += static_cast<size_t>(std::max<ssize_t>(sent, 0));
    }
    return {};
  }

  /// The next line, without its end.
  Result<std::string> Receive(int64_t timeout_ns) {
    const int64_t until_ns = SteadyClock().NowNs() + timeout_ns;
    for (;;) {
      if (const size_t end = received_.find('\n'); end != std::string::npos) {
        std::string line = received_.substr(0, end);
        received_.erase(0, end + 1);
        return line;
      }
      const int64_t left_ns = std::max<int64_t>(until_ns - SteadyClock().NowNs(), 0);
      pollfd ready{descriptor_, POLLIN, 0};
      const int found = poll(&ready, 1, static_cast<int>((left_ns + kNsPerMs - 1) / kNsPerMs));
      if (found == 0) return Timeout("nothing has come");
      char bytes[1024];
      const ssize_t count = found < 0 ? -1 : read(descriptor_, bytes, sizeof bytes);
      if (count < 0 && errno == EINTR) continue;
      if (count < 0) return Unavailable(Said(std::strerror(errno)));
      if (count == 0) return Unavailable(Said("that it has ended, or that MPI was finalized"));
      received_.append(bytes, static_cast<size_t>(count));
    }
  }

  std::string Said(std::string_view what) const {
    return "the launcher, at PMI_FD=" + std::to_string(descriptor_) +
           ", says: " + std::string(what.substr(0, 200));
  }

  const int descriptor_;
  const pid_t process_;
  std::string space_;  // the launcher's name of the job's key-value space
  size_t part_bytes_ = 0;
  std::string received_;
  bool in_barrier_ = false;
  std::string put_;  // this rendezvous's value, of the rank that sets it
  uint64_t rendezvous_ = 0;
};

/// The value of one rendezvous, which may be got more than once.
class Rendezvous final : public Store {
 public:
  explicit Rendezvous(Pmi& pmi) : pmi_(pmi) {}
  Status Set(const std::string& key, const std::string& value) override {
    return pmi_.Set(key, value);
  }
  Result<std::string> Get(const std::string& key, int64_t timeout_ns) override {
    if (value_) return *value_;
    Result<std::string> value = pmi_.Get(key, timeout_ns);
    if (value.ok()) value_ = value.value();
    return value;
  }

 private:
  Pmi& pmi_;
  std::optional<std::string> value_;
};

}  // namespace

std::shared_ptr<Store> PmiStore(int descriptor) {
  static auto& pmi = *new Pmi(descriptor);
  static const int registered = std::atexit([] { pmi.End(); });
  (void)registered;  // fails without memory only
  return std::make_shared<Rendezvous>(pmi);
}

}  // namespace farandole
