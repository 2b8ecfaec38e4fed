// Every setting of the library in one struct, parsed once. The only place that reads environment
// variables.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "core/log.h"
#include "core/net/address.h"
#include "core/status.h"

namespace farandole {

/// Name -> value. A plain map, so that tests never touch the real environment.
using Environment = std::map<std::string, std::string>;

/// The longest time that can be set: a year.
inline constexpr int kMostSettingSeconds = 31'536'000;

/// The process's environment as it is now. The library's only use of it.
Environment ReadEnvironment();
/// A variable's value; nullptr if it is unset or empty, or without a name.
const std::string* Find(const Environment& environment, const char* name);

/// What is done about a contribution that is nan or infinite.
enum class NanCheck : uint8_t { kOff, kWarn, kRaise };

/// Its defaults are those of the settings; each field's variable, range and meaning stand in
/// kSettings in config.cc.
struct Config {
  int64_t fusion_threshold_bytes = int64_t{128} << 20;  ///< 0: every tensor is its own batch.
  int64_t group_bytes = int64_t{4} << 20;  ///< Gradients travel in groups of about this size.
  bool autotune = false;                   ///< Other sizes are tried while the job trains.
  std::string autotune_log;                ///< Where rank 0 writes what was found; empty: nowhere.
  int64_t id_table_size = 65'536;          ///< Keys with a one-bit vote; beyond, slower.
  int64_t window = 2;           ///< Unfinished batches per (set, device kind) before rank 0 waits.
  double stall_warning_s = 10;  ///< Age of an incomplete key before it is reported; 0: never.
  double liveness_timeout_s = 2;       ///< A stopped or unreachable rank is lost; 0: never.
  double stall_shutdown_s = 0;         ///< Age at which such a key ends the job; 0: never.
  bool stall_check_disable = false;    ///< Neither of the two.
  bool divergence_check = true;        ///< Ranks none of which can go on end the job.
  double plane_timeout_s = 60;         ///< Started work without progress for so long fails.
  double init_timeout_s = 60;          ///< All ranks must have arrived within this.
  double shutdown_timeout_s = 30;      ///< Waiting for the others at a bad end.
  bool shared_memory = true;           ///< 0: ranks of one host use the network, too.
  bool hierarchical_allreduce = true;  ///< 0: sets on several hosts know no hosts.
  bool is_elastic = false;             ///< Ranks that are lost end a generation, not the job.
  std::string members;  ///< Of a running job that this process asks to be let in; or empty.
  int64_t slots = 0;    ///< Of the job, see core/slots.h; 0: none.
  bool join_allreduce_only = false;  ///< Once a rank has joined, as Horovod has it.
  NanCheck nan_check = NanCheck::kOff;
  int64_t hash_steps = 0;  ///< The Python package hashes gradients of each n-th step; 0: of none.
  std::string hash_dir;    ///< Where it writes the hashes; empty: nowhere.
  LogLevel log_level = LogLevel::kWarning;
  bool allow_pickle = true;     ///< 0: the Python package neither sends nor reads pickles.
  std::string timeline;         ///< Path of the file to write from the start; see core/timeline.h.
  bool timeline_marks = false;  ///< Marks decisions in it.
  std::string flight_recorder_dir;  ///< Where it writes files; empty: in `record`; "none": nowhere.
  std::string metrics;              ///< Where the Python package exports metrics; empty: nowhere.
  std::string record;               ///< Folder for what `farandole report` shows; empty: none.
  std::string mpi_plugin;           ///< Path of libfarandole_mpi.so; empty: beside libfarandole.so.
  int64_t cuda_fusion_threshold_bytes = int64_t{25} << 20;  ///< Of batches on a GPU.
  double cuda_timeout_s = 600;                              ///< plane_timeout_s for work on a GPU.
  std::string network = "auto";  ///< Or "mpi", "tcp": what the ranks exchange messages over.
  std::string interfaces;        ///< For TCP: names or networks, separated by commas; empty: found.
  PortRange ports;               ///< Where the job's sockets listen; see core/net/listener.h.
  int64_t tcp_streams = 1;       ///< Sockets between two ranks for each data plane.
  std::string cuda_plugin;       ///< Path of libfarandole_cuda.so; empty: beside libfarandole.so.
  std::string nccl_library;  ///< Path of the libnccl to use; empty: found (ops/gpu/nccl/library.h).
  bool share_gpu = false;    ///< NCCL also where several ranks share a GPU.
  bool nccl_register = false;  ///< Fusion buffers on a GPU are registered with NCCL.
  std::string
      mpi_library;  ///< Path of the libmpi to open first; empty: the launcher's, else the loader's.
};

/// Edits (insert, delete, replace a character) that turn `a` into `b`, for names that were
/// misspelt. Source: Wagner and Fischer, "The string-to-string correction problem", JACM
/// 21(1):168-173, 1974.
size_t EditDistance(std::string_view a, std::string_view b);

/// Reads FARANDOLE_*; an empty value counts as unset. Names of Horovod are the frontends' (Python:
/// farandole/_horovod.py).
/// @return InvalidArgument naming variable, value and range for junk; InvalidArgument naming the
/// nearest known name for an unknown FARANDOLE_ name.
Result<Config> ParseConfig(const Environment& environment);

/// One setting as text.
struct SettingText {
  std::string name;     ///< "FARANDOLE_FUSION_THRESHOLD"
  std::string value;    ///< In the form that is accepted as input.
  std::string help;     ///< Meaning, unit, default, range and other name in one line.
  bool agreed;          ///< Shapes the protocol: must be equal on all ranks.
  std::string initial;  ///< The default, as `value`.
};

/// All settings in table order: for documentation, `doctor`, and comparing ranks at start.
std::vector<SettingText> Describe(const Config& config);

}  // namespace farandole
