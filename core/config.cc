#include "core/config.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <optional>
#include <string_view>
#include <utility>
#include <variant>

#include "core/slots.h"

namespace farandole {

/// Keeps one row of the table: O(|a| |b|) time, O(|b|) memory. `diagonal` is what the row held one
/// column earlier.
size_t EditDistance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = std::exchange(row[0], i);
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t replaced = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({replaced, row[j] + 1, row[j - 1] + 1});
    }
  }
  return row[b.size()];
}

namespace {

using Field = std::variant<int64_t Config::*, double Config::*, bool Config::*, LogLevel Config::*,
                           NanCheck Config::*, PortRange Config::*, std::string Config::*>;

/// One row of the table below: all that is known about a setting.
struct Setting {
  const char* name;
  Field field;       // its type says how the text is parsed
  const char* unit;  // of numbers, as messages name it
  double least;      // range of numbers, both ends included; 0 to 0 for other types
  double most;
  bool agreed;             // compared at start; ranks that differ refuse the job
  const char* help;        // HelpText adds range, default and other names
  const char* alias = "";  // another FARANDOLE_ name of it, or ""
};

constexpr double kMaxBytes = 1099511627776;  // 1 TiB

// In the order in which they are documented, by the groups of docs/settings.md. Defaults are not
// repeated here: they are those of Config, from which HelpText takes them.
const std::array kSettings = {
    // Memory and speed
    Setting{"FARANDOLE_FUSION_THRESHOLD", &Config::fusion_threshold_bytes, "bytes", 0, kMaxBytes,
            true, "Tensors are fused into batches of at most this size; 0: each tensor by itself."},
    Setting{"FARANDOLE_GROUP_BYTES", &Config::group_bytes, "bytes", 0, kMaxBytes, true,
            "Gradients are announced in groups of about this size."},
    Setting{"FARANDOLE_AUTOTUNE", &Config::autotune, "", 0, 0, false,
            "Whether other sizes of groups are tried in the first steps of the first optimizer, "
            "and the best is kept if it is clearly better than FARANDOLE_GROUP_BYTES; what rank 0 "
            "is given counts."},
    Setting{"FARANDOLE_AUTOTUNE_LOG", &Config::autotune_log, "path", 0, 0, false,
            "File into which rank 0 then writes the setting that was found, and as comments what "
            "was measured; empty: none."},
    Setting{"FARANDOLE_ID_TABLE_SIZE", &Config::id_table_size, "entries", 0, 1'048'576, true,
            "Tensors whose readiness travels as a number; further tensors work, but slower."},
    Setting{"FARANDOLE_WINDOW", &Config::window, "batches", 1, 64, true,
            "Batches of a process set in flight at a time; further tensors wait and are fused."},
    Setting{"FARANDOLE_SHARED_MEMORY", &Config::shared_memory, "", 0, 0, true,
            "Whether ranks of one host use shared memory: for messages, and for the data of "
            "process sets whose ranks are all on that host; 0: the network."},
    Setting{"FARANDOLE_HIERARCHICAL_ALLREDUCE", &Config::hierarchical_allreduce, "", 0, 0, true,
            "Whether process sets on several hosts reduce and broadcast through shared memory "
            "within each host and over the network only between hosts; 0: over the network "
            "alone."},
    // Failures and members
    Setting{"FARANDOLE_LIVENESS_TIMEOUT_S", &Config::liveness_timeout_s, "seconds", 0,
            kMostSettingSeconds, false,
            "A rank that has been stopped this long, or that other hosts cannot reach, is lost, "
            "as if it had died. Ranks that all stop together are not lost, nor is one that a "
            "debugger stops, if its own host watches it; 0: never."},
    Setting{"FARANDOLE_PLANE_TIMEOUT_S", &Config::plane_timeout_s, "seconds", 0.001,
            kMostSettingSeconds, false,
            "A started operation fails after this long without progress; time during which the "
            "process was stopped, or the machine slept, does not count."},
    Setting{"FARANDOLE_INIT_TIMEOUT_S", &Config::init_timeout_s, "seconds", 0.001,
            kMostSettingSeconds, false, "How long init waits until all ranks have called it."},
    Setting{"FARANDOLE_SHUTDOWN_TIMEOUT_S", &Config::shutdown_timeout_s, "seconds", 0.001,
            kMostSettingSeconds, false,
            "How long one library call may take while the rank leaves or joins. A rank that ends "
            "with an exit code other than 0 waits this long for the others, but at most 2 s; one "
            "that ends with 0 waits as long as they live."},
    Setting{"FARANDOLE_STALL_SHUTDOWN_S", &Config::stall_shutdown_s, "seconds", 0,
            kMostSettingSeconds, false,
            "A tensor that has waited this long for a rank ends the job by an error on all ranks; "
            "0: never.",
            "FARANDOLE_STALL_SHUTDOWN_TIME_SECONDS"},
    Setting{"FARANDOLE_DIVERGENCE_CHECK", &Config::divergence_check, "", 0, 0, true,
            "Whether the job ends at once, by an error on all ranks, when ranks wait for "
            "different operations and none can go on; 0: only stalls are reported, for programs "
            "in which a thread makes its first call over a second after all others wait."},
    Setting{"FARANDOLE_ELASTIC", &Config::is_elastic, "", 0, 0, true,
            "Whether the job can go on with other ranks, by farandole_reinit, after some are lost "
            "or have left, and when some are added; over TCP."},
    Setting{"FARANDOLE_MEMBERS", &Config::members, "addresses", 0, 0, false,
            "Where ranks of a running elastic job listen for others, host:port, separated by "
            "commas: init asks them to be let in; empty: this process begins the job."},
    Setting{"FARANDOLE_SLOTS", &Config::slots, "slots", 0, kMostSlots, true,
            "Parts of each step's work, at least as many as ranks. Sums of floats "
            "over all ranks, on the CPU, then have the same bits for any number of ranks if each "
            "contributes the sum of its slots, and averages are these divided by the number of "
            "ranks; 0: they are added up in the order of ranks. What "
            "init is given wins; jobs that torch.distributed makes have none."},
    Setting{"FARANDOLE_JOIN_ALLREDUCE_ONLY", &Config::join_allreduce_only, "", 0, 0, true,
            "Whether only allreduces work while some ranks have joined, and other collectives "
            "fail, as in Horovod and in farandole.compat."},
    // Network
    Setting{"FARANDOLE_NETWORK", &Config::network, "name", 0, 0, false,
            "The network between ranks: mpi, tcp, or auto, which is MPI where an MPI launcher "
            "started them."},
    Setting{"FARANDOLE_INTERFACE", &Config::interfaces, "names", 0, 0, false,
            "Network interfaces that TCP uses, by name or as networks such as 10.1.0.0/16, "
            "separated by commas; empty: all, or loopback if rank 0's address is loopback."},
    Setting{"FARANDOLE_PORTS", &Config::ports, "ports", 0, 0, false,
            "Ports at which the job listens, FIRST-LAST, such as 50000-50100, but for one that "
            "is given, as MASTER_PORT is; empty: the system chooses."},
    Setting{"FARANDOLE_TCP_STREAMS", &Config::tcp_streams, "sockets", 1, 64, true,
            "TCP connections between two ranks for each data plane."},
    // GPU
    Setting{
        "FARANDOLE_CUDA_FUSION_THRESHOLD", &Config::cuda_fusion_threshold_bytes, "bytes", 0,
        kMaxBytes, true,
        "FARANDOLE_FUSION_THRESHOLD for tensors on a GPU, where copies overlap with computation."},
    Setting{"FARANDOLE_CUDA_TIMEOUT_S", &Config::cuda_timeout_s, "seconds", 0.001,
            kMostSettingSeconds, false,
            "FARANDOLE_PLANE_TIMEOUT_S for work on a GPU. It includes earlier work of other "
            "ranks' GPUs, but not of this rank's own GPU."},
    Setting{"FARANDOLE_SHARE_GPU", &Config::share_gpu, "", 0, 0, true,
            "Whether ranks that share a GPU use NCCL (2.30 or newer) instead of host memory."},
    Setting{"FARANDOLE_NCCL_REGISTER", &Config::nccl_register, "", 0, 0, true,
            "Whether tensors on a GPU are fused in memory that NCCL allocates and registers; not "
            "where ranks share a GPU."},
    // Diagnosis
    Setting{"FARANDOLE_LOG_LEVEL", &Config::log_level, "", 0, 0, false,
            "Least severe message written to stderr."},
    Setting{"FARANDOLE_STALL_WARNING_S", &Config::stall_warning_s, "seconds", 0,
            kMostSettingSeconds, false,
            "A tensor that has waited this long for a rank is reported; 0: never."},
    Setting{"FARANDOLE_STALL_CHECK_DISABLE", &Config::stall_check_disable, "", 0, 0, false,
            "Whether stalls are neither reported nor end the job, whatever their time limits."},
    Setting{"FARANDOLE_NAN_CHECK", &Config::nan_check, "", 0, 0, false,
            "Whether inputs of allreduces and reducescatters in host memory are searched for nan "
            "and infinity. raise: the operation fails on all ranks, by an error that names the "
            "rank, the element, and the tensor or the gradient and its step; warn: the rank logs "
            "the same."},
    Setting{
        "FARANDOLE_HASH_STEPS", &Config::hash_steps, "steps", 0, 1e9, true,
        "Of each so many-th step of a DistributedOptimizer the reduced gradients, in host memory, "
        "are hashed and compared between ranks: if they differ all get an error that names "
        "the step, the first tensor, and which ranks are alike; 0: of none."},
    Setting{"FARANDOLE_HASH_DIR", &Config::hash_dir, "path", 0, 0, false,
            "Folder where rank 0 writes these hashes, for `farandole verify`: chain.jsonl, of "
            "further optimizers chain.1.jsonl and so on, of those of process set 2 "
            "chain.set2.0.jsonl; empty: no files."},
    Setting{"FARANDOLE_TIMELINE", &Config::timeline, "path", 0, 0, false,
            "File for the timeline that chrome://tracing shows; with {rank} in its name every "
            "rank writes one, else only rank 0. Empty or DYNAMIC: none until one is started."},
    Setting{"FARANDOLE_TIMELINE_MARK_CYCLES", &Config::timeline_marks, "", 0, 0, false,
            "Whether rank 0's decisions are marked in the timeline."},
    Setting{"FARANDOLE_FLIGHT_RECORDER_DIR", &Config::flight_recorder_dir, "path", 0, 0, false,
            "Folder into which a rank writes its last operations, for `farandole explain`: at an "
            "error that ends the job, at a stall and on SIGUSR1. Not set: under farandolerun, "
            "torchrun, mpirun and srun one of the job's own in $XDG_STATE_HOME/farandole or "
            "~/.local/state/farandole; none: no files; empty: FARANDOLE_RECORD's folder, if set."},
    Setting{"FARANDOLE_METRICS", &Config::metrics, "targets", 0, 0, false,
            "Where the Python package exports a rank's metrics, separated by commas: "
            "file:PATH.prom, for node_exporter; port:NUMBER or port:ADDRESS:NUMBER, for "
            "Prometheus, plus the local rank; otlp, for OpenTelemetry; label:NAME=VALUE gives all "
            "a label; empty: nowhere."},
    Setting{"FARANDOLE_RECORD", &Config::record, "path", 0, 0, false,
            "Folder, made if it is missing, in which the Python package records the run of each "
            "rank for `farandole report`, in 1 MiB at most, and in which the flight recorder "
            "leaves its files if it has no folder of its own; empty: no record."},
    // For an administrator
    Setting{
        "FARANDOLE_ALLOW_PICKLE", &Config::allow_pickle, "", 0, 0, true,
        "Whether Python objects may travel as pickles, which can run code; 0: plain values only."},
    Setting{"FARANDOLE_MPI_PLUGIN", &Config::mpi_plugin, "path", 0, 0, false,
            "The MPI plug-in; empty: libfarandole_mpi.so beside libfarandole.so."},
    Setting{"FARANDOLE_MPI_LIBRARY", &Config::mpi_library, "path", 0, 0, false,
            "The libmpi to open before the plug-in; empty: the launcher's, else the loader's."},
    Setting{"FARANDOLE_CUDA_PLUGIN", &Config::cuda_plugin, "path", 0, 0, false,
            "The CUDA plug-in; empty: libfarandole_cuda.so beside libfarandole.so."},
    Setting{"FARANDOLE_NCCL", &Config::nccl_library, "path", 0, 0, false,
            "The libnccl.so.2 to use; empty: the one already loaded, PyPI's, the toolkit's, the "
            "loader's."},
};

// Names that other parts of the project read: the launchers, the scripts, the Python package.
constexpr std::array<std::string_view, 14> kNamesOfOthers = {
    "FARANDOLE_RANK",       "FARANDOLE_SIZE",           "FARANDOLE_LOCAL_RANK",
    "FARANDOLE_LOCAL_SIZE", "FARANDOLE_VENV",           "FARANDOLE_BUILD_DIR",
    "FARANDOLE_PYTHON",     "FARANDOLE_RANK_PROCESS",   "FARANDOLE_ADDRESS",
    "FARANDOLE_LISTEN_FD",  "FARANDOLE_KEY_FD",         "FARANDOLE_KEY_FILE",
    "FARANDOLE_AGENT",      "FARANDOLE_FULL_TRACEBACK",
};
constexpr std::string_view kPrefix = "FARANDOLE_";
// Names with this prefix are never refused: each test reads its own, and no list has them.
constexpr std::string_view kTestPrefix = "FARANDOLE_TEST_";

constexpr std::array kLevels = {LogLevel::kTrace,   LogLevel::kDebug, LogLevel::kInfo,
                                LogLevel::kWarning, LogLevel::kError, LogLevel::kOff};

constexpr std::array<const char*, 3> kNanChecks = {"off", "warn", "raise"};  // by number

/// The shortest text that reads back as the same number. to_chars knows no locale, unlike printf,
/// so the text is always one that ParseNumber accepts.
std::string NumberText(double value) {
  std::array<char, 32> text{};
  const auto end = std::to_chars(text.data(), text.data() + text.size(), value).ptr;
  return {text.data(), end};
}

std::string NumberText(int64_t value) { return std::to_string(value); }

std::string RangeText(const Setting& setting) {
  // Whole bounds are written as integers, because to_chars writes 100000.0 as 1e+05.
  const auto bound = [](double x) {
    return x == std::floor(x) ? NumberText(static_cast<int64_t>(x)) : NumberText(x);
  };
  return bound(setting.least) + " to " + bound(setting.most);
}

std::string LevelNames() {
  std::string names;
  for (const LogLevel level : kLevels) {
    names.append(names.empty() ? "" : ", ").append(Name(level));
  }
  return names;
}

Status Junk(std::string_view name, const std::string& text, const std::string& wanted) {
  return InvalidArgument(std::string(name) + "=\"" + text + "\" is not " + wanted);
}

/// Parses the whole of `text` as a number of type T within the setting's range into `out`.
template <class T>
bool ParseNumber(const Setting& setting, const std::string& text, T& out) {
  T value{};
  const char* end = text.data() + text.size();
  // from_chars knows no locale and skips no blanks. For a double it accepts "nan" and "inf".
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || stop != end) return false;
  // Bounds are far below 2^53, so the conversion cannot round an integer past one of them.
  const auto x = static_cast<double>(value);
  if (!(x >= setting.least && x <= setting.most)) return false;  // refuses NaN as well
  out = value;
  return true;
}

bool ParseLevel(const std::string& text, LogLevel& out) {
  std::string lower = text;
  // Not std::tolower, which follows the locale that the application has set.
  std::transform(lower.begin(), lower.end(), lower.begin(), [](char c) {
    return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
  });
  if (lower == "fatal") lower = "off";  // we have no message that severe
  for (const LogLevel level : kLevels) {
    if (Name(level) == lower) {
      out = level;
      return true;
    }
  }
  return false;
}

/// Puts `text`, read from variable `name`, into the setting's field of `config`.
class Assign {
 public:
  Assign(const Setting& setting, std::string_view name, const std::string& text, Config& config)
      : setting_(setting), name_(name), text_(text), config_(config) {}

  // std::visit chooses the overload by the type of the setting's field.
  Status operator()(int64_t Config::*field) const {
    if (ParseNumber(setting_, text_, config_.*field)) return {};
    return Junk(name_, text_,
                std::string("a whole number of ") + setting_.unit + ", " + RangeText(setting_));
  }
  Status operator()(double Config::*field) const {
    if (ParseNumber(setting_, text_, config_.*field)) return {};
    return Junk(name_, text_,
                std::string("a number of ") + setting_.unit + ", " + RangeText(setting_));
  }
  Status operator()(bool Config::*field) const {
    if (text_ != "0" && text_ != "1") return Junk(name_, text_, "0 or 1");
    config_.*field = text_ == "1";
    return {};
  }
  Status operator()(LogLevel Config::*field) const {
    if (ParseLevel(text_, config_.*field)) return {};
    return Junk(name_, text_, "one of " + LevelNames());
  }
  Status operator()(NanCheck Config::*field) const {
    const auto* const word = std::ranges::find(kNanChecks, std::string_view(text_));
    if (word == kNanChecks.end()) return Junk(name_, text_, "one of off, warn, raise");
    config_.*field = static_cast<NanCheck>(word - kNanChecks.begin());
    return {};
  }
  Status operator()(PortRange Config::*field) const {
    const std::optional<PortRange> ports = ParsePortRange(text_);
    if (!ports) return Junk(name_, text_, "FIRST-LAST, ports from 1 to 65535, as 50000-50100");
    config_.*field = *ports;
    return {};
  }
  Status operator()(std::string Config::*field) const {
    config_.*field = text_;
    return {};
  }

 private:
  const Setting& setting_;
  std::string_view name_;
  const std::string& text_;
  Config& config_;
};

std::string ValueText(const Setting& setting, const Config& config) {
  struct Show {
    const Config& config;
    std::string operator()(int64_t Config::*field) const { return NumberText(config.*field); }
    std::string operator()(double Config::*field) const { return NumberText(config.*field); }
    std::string operator()(bool Config::*field) const { return config.*field ? "1" : "0"; }
    // Name returns a view of a literal, so there is a NUL after its data().
    std::string operator()(LogLevel Config::*field) const { return {Name(config.*field).data()}; }
    std::string operator()(NanCheck Config::*field) const {
      return kNanChecks[static_cast<size_t>(config.*field)];
    }
    std::string operator()(PortRange Config::*field) const { return Format(config.*field); }
    std::string operator()(std::string Config::*field) const { return config.*field; }
  };
  return std::visit(Show{config}, setting.field);
}

std::string HelpText(const Setting& setting) {
  std::string text = setting.help;
  if (std::holds_alternative<LogLevel Config::*>(setting.field)) {
    text += " One of " + LevelNames() + ".";
  } else if (std::holds_alternative<NanCheck Config::*>(setting.field)) {
    text += " One of off, warn, raise.";
  } else if (std::holds_alternative<bool Config::*>(setting.field)) {
    text += " 0 or 1.";
  } else if (setting.most > 0) {
    // A number: paths, the only other type that is left, have the range 0 to 0.
    text += " In " + std::string(setting.unit) + ", " + RangeText(setting) + ".";
  }
  const std::string value = ValueText(setting, Config{});
  if (!value.empty()) text += " Default " + value + ".";
  if (*setting.alias != '\0') text += " Also read from " + std::string(setting.alias) + ".";
  return text;
}

std::vector<std::string_view> KnownNames() {
  std::vector<std::string_view> names(kNamesOfOthers.begin(), kNamesOfOthers.end());
  for (const Setting& setting : kSettings) {
    names.emplace_back(setting.name);
    if (*setting.alias != '\0') names.emplace_back(setting.alias);
  }
  return names;
}

/// `known` has at least one name. Computes the distance to each of them, which is fine for the text
/// of an error but not for each variable.
std::string_view Nearest(std::string_view name, const std::vector<std::string_view>& known) {
  return *std::ranges::min_element(
      known, {}, [name](std::string_view one) { return EditDistance(name, one); });
}

/// A misspelt setting would keep its default unnoticed, perhaps on some ranks only. The map is
/// ordered, so names with our prefix follow one another.
Status RefuseUnknownNames(const Environment& environment) {
  const std::vector<std::string_view> known = KnownNames();
  for (auto it = environment.lower_bound(std::string(kPrefix));
       it != environment.end() && it->first.starts_with(kPrefix); ++it) {
    const std::string& name = it->first;
    if (name.starts_with(kTestPrefix)) continue;
    if (std::find(known.begin(), known.end(), name) != known.end()) continue;
    return InvalidArgument(name + " is not a setting of Farandole; did you mean " +
                           std::string(Nearest(name, known)) + "?");
  }
  return {};
}

}  // namespace

const std::string* Find(const Environment& environment, const char* name) {
  if (name == nullptr) return nullptr;
  const auto it = environment.find(name);
  return it == environment.end() || it->second.empty() ? nullptr : &it->second;
}

Environment ReadEnvironment() {
  Environment environment;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    const std::string_view text(*entry);
    const size_t equals = text.find('=');
    if (equals == std::string_view::npos) continue;
    // Of a name that occurs twice the first counts, as for getenv: emplace keeps what is there.
    environment.emplace(text.substr(0, equals), text.substr(equals + 1));
  }
  return environment;
}

Result<Config> ParseConfig(const Environment& environment) {
  FARANDOLE_RETURN_IF_ERROR(RefuseUnknownNames(environment));
  Config config;
  for (const Setting& setting : kSettings) {
    for (const char* name : {setting.name, setting.alias}) {
      const std::string* text = Find(environment, name);
      if (text == nullptr) continue;
      FARANDOLE_RETURN_IF_ERROR(std::visit(Assign(setting, name, *text, config), setting.field));
      break;
    }
  }
  return config;
}

std::vector<SettingText> Describe(const Config& config) {
  std::vector<SettingText> texts;
  texts.reserve(kSettings.size());
  for (const Setting& setting : kSettings) {
    texts.push_back({setting.name, ValueText(setting, config), HelpText(setting), setting.agreed,
                     ValueText(setting, Config{})});
  }
  return texts;
}

}  // namespace farandole
