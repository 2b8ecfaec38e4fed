#include "core/launcher.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdint>
#include <cstdlib>
#include <optional>
#include <string_view>
#include <utility>

namespace farandole {
namespace {

constexpr size_t kMaxAlternatives = 4;
/// Variables that say the same; the first that is set counts.
using Names = std::array<const char*, kMaxAlternatives>;

/// One launcher's variables. It has announced itself where `rank` and `size` are set, and what else
/// the last three fields demand (Speaks).
struct Source {
  const char* name;
  const char* rank;
  const char* size;
  Names local_rank;
  Names local_size;
  Names needs_one_of;                    // empty: rank and size are proof enough
  const char* tasks_per_node = nullptr;  // Slurm's list, where the local size is not a number
  bool slurm_step = false;               // counts only in a numeric step, and only by itself
  bool is_mpi = false;                   // its ranks find each other by MPI
};

// The first that has announced itself counts. torchrun and env:// have to show one more variable,
// because other tools set RANK and WORLD_SIZE, too. Launchers that speak PMI agree on the names of
// rank and size, but not on those of the local ones.
const std::array kSources = {
    Source{"farandole",
           "FARANDOLE_RANK",
           "FARANDOLE_SIZE",
           {"FARANDOLE_LOCAL_RANK"},
           {"FARANDOLE_LOCAL_SIZE"},
           {}},
    Source{"horovod",
           "HOROVOD_RANK",
           "HOROVOD_SIZE",
           {"HOROVOD_LOCAL_RANK"},
           {"HOROVOD_LOCAL_SIZE"},
           {}},
    Source{"torchrun",
           "RANK",
           "WORLD_SIZE",
           {"LOCAL_RANK"},
           {"LOCAL_WORLD_SIZE"},
           {"TORCHELASTIC_RUN_ID"}},
    Source{"env://", "RANK", "WORLD_SIZE", {"LOCAL_RANK"}, {"LOCAL_WORLD_SIZE"}, {"MASTER_ADDR"}},
    Source{"openmpi",
           "OMPI_COMM_WORLD_RANK",
           "OMPI_COMM_WORLD_SIZE",
           {"OMPI_COMM_WORLD_LOCAL_RANK"},
           {"OMPI_COMM_WORLD_LOCAL_SIZE"},
           {},
           nullptr,
           false,
           true},
    Source{"mvapich2",
           "MV2_COMM_WORLD_RANK",
           "MV2_COMM_WORLD_SIZE",
           {"MV2_COMM_WORLD_LOCAL_RANK"},
           {"MV2_COMM_WORLD_LOCAL_SIZE"},
           {},
           nullptr,
           false,
           true},
    Source{"pmi",
           "PMI_RANK",
           "PMI_SIZE",
           {"MPI_LOCALRANKID", "PMI_LOCAL_RANK", "PALS_LOCAL_RANKID", "SLURM_LOCALID"},
           {"MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"},
           {},
           nullptr,
           false,
           true},
    Source{"pmix",
           "PMIX_RANK",
           "SLURM_STEP_NUM_TASKS",
           {"SLURM_LOCALID"},
           {},
           {},
           "SLURM_STEP_TASKS_PER_NODE",
           true,
           true},
    Source{"slurm",
           "SLURM_PROCID",
           "SLURM_STEP_NUM_TASKS",
           {"SLURM_LOCALID"},
           {},
           {},
           "SLURM_STEP_TASKS_PER_NODE",
           true},
};

const char* FirstSet(const Environment& environment, const Names& names) {
  for (const char* name : names) {
    if (Find(environment, name) != nullptr) return name;
  }
  return nullptr;
}

std::optional<int> ParseInt(std::string_view text) {
  int value = 0;
  const auto [stop, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || stop != text.data() + text.size()) return std::nullopt;
  return value;
}

/// The number in `name`, which is set, or why it is none within [least, most].
Result<int> Number(const Environment& environment, const char* name, int least, int most) {
  const std::string& text = *Find(environment, name);
  const std::optional<int> value = ParseInt(text);
  if (value && *value >= least && *value <= most) return *value;
  return InvalidArgument(std::string(name) + "=\"" + text + "\" is not a whole number, " +
                         std::to_string(least) + " to " + std::to_string(most));
}

/// The first of `names` that is set, as a number; -1 when none is.
Result<int> OptionalNumber(const Environment& environment, const Names& names, int least,
                           int most) {
  const char* name = FirstSet(environment, names);
  return name == nullptr ? Result<int>(-1) : Number(environment, name, least, most);
}

/// Reads Slurm's "4(x3),2" (three nodes with 4 tasks, then one with 2) at position `node`.
std::optional<int> TasksOfNode(std::string_view list, int node) {
  // The number of the first node that is not passed yet. A sum of counts, so it needs 64 bits.
  int64_t first = 0;
  while (!list.empty()) {
    const std::string_view item = list.substr(0, list.find(','));
    list.remove_prefix(std::min(list.size(), item.size() + 1));
    const size_t open = item.find("(x");
    const std::optional<int> tasks = ParseInt(item.substr(0, open));
    int64_t nodes = 1;
    if (open != std::string_view::npos) {
      if (item.back() != ')') return std::nullopt;
      // The item holds "(x" and ends with ')', so that the length cannot be negative.
      const std::optional<int> n = ParseInt(item.substr(open + 2, item.size() - open - 3));
      if (!n) return std::nullopt;
      nodes = *n;
    }
    if (!tasks || nodes < 1) return std::nullopt;
    first += nodes;
    if (node < first) return tasks;
  }
  return std::nullopt;
}

/// -1 when Slurm's list is missing or not understood: the transport can count the ranks of a host.
int LocalSizeFromSlurm(const Environment& environment, const char* list_name) {
  const std::string* list = Find(environment, list_name);
  const std::string* node_text = Find(environment, "SLURM_NODEID");
  if (list == nullptr || node_text == nullptr) return -1;
  const std::optional<int> node = ParseInt(*node_text);
  return node && *node >= 0 ? TasksOfNode(*list, *node).value_or(-1) : -1;
}

bool Speaks(const Environment& environment, const Source& source) {
  if (Find(environment, source.rank) == nullptr) return false;
  if (Find(environment, source.size) == nullptr) return false;
  if (source.needs_one_of[0] != nullptr && FirstSet(environment, source.needs_one_of) == nullptr) {
    return false;
  }
  if (!source.slurm_step) return true;
  // A batch script has a step id, too, but a word. Slurm has started one process then, whatever
  // number of tasks the variables announce.
  const std::string* step = Find(environment, "SLURM_STEP_ID");
  return step != nullptr && ParseInt(*step).has_value();
}

Result<Launcher> Read(const Environment& environment, const Source& source) {
  Launcher launcher;
  launcher.source = source.name;
  launcher.variable = source.rank;
  // The size first, as it bounds the other numbers.
  const Result<int> size = Number(environment, source.size, 1, INT32_MAX);
  if (!size.ok()) return size.status();
  launcher.size = size.value();
  const Result<int> rank = Number(environment, source.rank, 0, launcher.size - 1);
  if (!rank.ok()) return rank.status();
  launcher.rank = rank.value();
  const Result<int> local_size = OptionalNumber(environment, source.local_size, 1, launcher.size);
  if (!local_size.ok()) return local_size.status();
  launcher.local_size = local_size.value();
  const Result<int> local_rank =
      OptionalNumber(environment, source.local_rank, 0, launcher.size - 1);
  if (!local_rank.ok()) return local_rank.status();
  launcher.local_rank = local_rank.value();
  if (source.tasks_per_node != nullptr) {
    launcher.local_size = LocalSizeFromSlurm(environment, source.tasks_per_node);
  }
  return launcher;
}

/// What distinguishes jobs, by the launchers that say so; a nested job differs in one of them. None
/// that an MPI library sets in the process.
constexpr std::array kJobIds = {"PMIX_NAMESPACE", "PMI_JOBID", "SLURM_JOB_ID", "SLURM_STEP_ID",
                                "TORCHELASTIC_RUN_ID"};

std::string Identity(const Environment& environment, const Launcher& launcher) {
  std::string identity = std::to_string(launcher.rank) + "/" + std::to_string(launcher.size);
  for (const char* name : kJobIds) {
    // A missing id holds its place, so that the id of one launcher is not taken for another's.
    const std::string* id = Find(environment, name);
    identity += " " + (id == nullptr ? "-" : *id);
  }
  return identity + " " + launcher.address + launcher.folder;
}

Status Disagree(const Launcher& a, const Launcher& b) {
  const auto says = [](const Launcher& x) { return x.source + " says " + std::to_string(x.size); };
  return InvalidArgument("two launchers disagree on the number of ranks: " + says(a) + ", " +
                         says(b) + "; start the job with one of them only");
}

/// All are read, also after the first: variables of two launchers in one environment mean the same
/// job only if they agree on the size.
Result<Launcher> FindLauncher(const Environment& environment) {
  std::optional<Launcher> found;
  bool has_mpi = false;
  for (const Source& source : kSources) {
    if (!Speaks(environment, source) || (source.slurm_step && found)) continue;
    Result<Launcher> launcher = Read(environment, source);
    if (!launcher.ok()) return launcher;
    if (found && found->size != launcher.value().size) return Disagree(*found, launcher.value());
    if (!found) found = std::move(launcher).value();
    has_mpi = has_mpi || source.is_mpi;
  }
  if (!found) return Launcher{};
  found->has_mpi = has_mpi;
  return *found;
}

Status Contradiction(const std::string& what, const std::string& said, const Launcher& launcher,
                     const std::string& theirs) {
  return InvalidArgument("init says " + what + " " + said + ", but " + launcher.source + " says " +
                         theirs + "; leave one of them out");
}

/// What the caller of init says about his rank, put into `launcher`.
Status TakeRank(const InitOptions& options, Launcher& launcher) {
  if (options.size == 0 || options.size < -1) {
    return InvalidArgument("init: size " + std::to_string(options.size) + "; expected 1 or more");
  }
  const bool is_alone = launcher.size == 1;
  const bool says_job = options.rank >= 0 || !options.address.empty() || options.store != nullptr;
  if (options.size < 0 && launcher.source == "single" && says_job) {
    return InvalidArgument("init: no size was given, and no launcher says it either");
  }
  if (options.size > 0 && is_alone && options.size > 1) {
    launcher = Launcher{};  // a launcher of one process knows nothing of this job
    launcher.source = "init";
    launcher.variable = "rank";
    launcher.size = options.size;
    launcher.rank = -1;
  } else if (options.size > 0 && options.size != launcher.size) {
    return Contradiction("size", std::to_string(options.size), launcher,
                         std::to_string(launcher.size));
  }
  if (options.rank == -1) {
    return launcher.rank >= 0 ? Status()
                              : InvalidArgument("init: size " + std::to_string(launcher.size) +
                                                " without a rank, which no launcher says either");
  }
  if (options.rank < 0 || options.rank >= launcher.size) {
    return InvalidArgument("init: rank " + std::to_string(options.rank) + " of a job of size " +
                           std::to_string(launcher.size) + "; expected 0 to " +
                           std::to_string(launcher.size - 1));
  }
  if (launcher.rank >= 0 && options.rank != launcher.rank) {
    return Contradiction("rank", std::to_string(options.rank), launcher,
                         std::to_string(launcher.rank));
  }
  launcher.rank = options.rank;
  return {};
}

/// "host:port" with a port number; else what is wrong with it.
Status CheckAddress(const std::string& address, const std::string& name) {
  const size_t colon = address.rfind(':');
  const bool has_port = colon != std::string::npos;
  const int port = has_port ? ParseInt(address.substr(colon + 1)).value_or(0) : 0;
  const std::string host = address.substr(0, std::min(colon, address.size()));
  const bool is_plain = host.find(':') == std::string::npos;
  const bool is_bracketed = host.size() > 2 && host.front() == '[' && host.back() == ']';
  if (port > 0 && port <= UINT16_MAX && !host.empty() && (is_plain || is_bracketed)) {
    return {};
  }
  return InvalidArgument(name + "=\"" + address +
                         "\" is not host:port, such as node7:29500 or [::1]:29500");
}

constexpr const char* kMasterNames[] = {"MASTER_ADDR", "MASTER_PORT"};

/// MASTER_ADDR and MASTER_PORT, if both are set; an IPv6 address in brackets.
std::optional<std::string> MasterAddress(const Environment& environment) {
  const std::string* host = Find(environment, kMasterNames[0]);
  const std::string* port = Find(environment, kMasterNames[1]);
  if (host == nullptr || port == nullptr) return std::nullopt;
  const bool is_ipv6 = host->find(':') != std::string::npos && host->front() != '[';
  return (is_ipv6 ? "[" + *host + "]" : *host) + ":" + *port;
}

Status TakeMaster(const Environment& environment, Launcher& launcher) {
  const std::optional<std::string> address = MasterAddress(environment);
  if (!address) return {};
  launcher.address = *address;
  const std::string* agent = Find(environment, "TORCHELASTIC_USE_AGENT_STORE");
  launcher.is_taken = agent != nullptr && *agent == "True";
  return CheckAddress(launcher.address, "MASTER_ADDR:MASTER_PORT");
}

/// The first host of Slurm's list: "rack1-n[03-04,7],x" is rack1-n03.
std::string FirstHost(std::string_view list) {
  std::string host;
  while (!list.empty() && list.front() != ',') {
    if (list.front() != '[') {
      host += list.front();
      list.remove_prefix(1);
      continue;
    }
    host += list.substr(1, list.find_first_of("-,]") - 1);
    list.remove_prefix(std::min(list.size(), list.find(']') + 1));
  }
  return host;
}

/// Below the ports that kernels give to outgoing connections (32768 and up).
constexpr PortRange kSlurmPorts = {15'000, 31'999};

/// Of a step with as many tasks as the job has ranks: rank 0 runs on its first node.
Status TakeSlurmStep(const Environment& environment, Launcher& launcher) {
  const Source& slurm = kSources.back();
  if (!Speaks(environment, slurm)) return {};
  const Result<int> size = Number(environment, slurm.size, 1, INT32_MAX);
  if (!size.ok()) return size.status();
  const char* list = FirstSet(environment, {"SLURM_STEP_NODELIST", "SLURM_NODELIST"});
  const std::string* job = Find(environment, "SLURM_JOB_ID");
  if (size.value() != launcher.size || list == nullptr || job == nullptr) return {};
  const std::string* step = Find(environment, "SLURM_STEP_ID");
  const int64_t number = int64_t{ParseInt(*job).value_or(0)} * 31 + ParseInt(*step).value_or(0);
  const std::string* range = Find(environment, "FARANDOLE_PORTS");
  const auto given = ParsePortRange(range != nullptr ? *range : "");
  const PortRange ports = given.value_or(kSlurmPorts);
  const int64_t named = given ? NamedPorts(*given) : 0;
  const int64_t count = named > 0 ? named : ports.last - ports.first + 1;
  const int64_t port = ports.first + std::abs(number) % count;
  launcher.address = FirstHost(*Find(environment, list)) + ":" + std::to_string(port);
  launcher.job = "slurm " + *job + "." + *step;
  return {};
}

/// What the caller of init says about where rank 0 is, put into `launcher`.
Status TakeAddress(const Environment& environment, const InitOptions& options, Launcher& launcher) {
  constexpr std::string_view kFile = "file://";
  constexpr std::string_view kTcp = "tcp://";
  launcher.is_chosen = true;
  launcher.store = options.store;
  const std::string& address = options.address;
  if (options.store != nullptr) {
    return address.empty() ? Status()
                           : InvalidArgument("init: a store and the address \"" + address +
                                             "\"; give one of them");
  }
  if (address == "env://") {
    for (const char* name : kMasterNames) {
      if (Find(environment, name) != nullptr) continue;
      return InvalidArgument(std::string("init: the address is env://, but ") + name +
                             " is not set");
    }
    return TakeMaster(environment, launcher);
  }
  if (address.starts_with(kFile)) {
    launcher.folder = address.substr(kFile.size());
    return launcher.folder.starts_with('/')
               ? Status()
               : InvalidArgument("init: address \"" + address +
                                 "\" names no folder from the root, such as file:///shared/job7");
  }
  launcher.address = address.starts_with(kTcp) ? address.substr(kTcp.size()) : address;
  return CheckAddress(launcher.address, "init: address");
}

/// Where rank 0 is to be found.
Status FindRankZero(const Environment& environment, const InitOptions& options,
                    Launcher& launcher) {
  if (launcher.source == "torchrun") launcher.job = *Find(environment, "TORCHELASTIC_RUN_ID");
  const std::string* ours = Find(environment, "FARANDOLE_ADDRESS");
  if (options.store != nullptr || !options.address.empty()) {
    FARANDOLE_RETURN_IF_ERROR(TakeAddress(environment, options, launcher));
    const bool differs = ours != nullptr && !launcher.address.empty() && launcher.address != *ours;
    return differs ? InvalidArgument("init says address " + launcher.address +
                                     ", but FARANDOLE_ADDRESS says " + *ours +
                                     "; leave one of them out")
                   : Status();
  }
  if (ours != nullptr) {
    launcher.is_chosen = true;
    launcher.address = *ours;
    return CheckAddress(launcher.address, "FARANDOLE_ADDRESS");
  }
  if (launcher.source == "pmi") {
    const Result<int> socket = OptionalNumber(environment, {"PMI_FD"}, 0, INT32_MAX);
    if (!socket.ok()) return socket.status();
    launcher.pmi_descriptor = socket.value();
    if (launcher.pmi_descriptor >= 0) return {};
  }
  FARANDOLE_RETURN_IF_ERROR(TakeMaster(environment, launcher));
  return launcher.address.empty() ? TakeSlurmStep(environment, launcher) : Status();
}

/// What a launcher of ours hands over beside the address.
Status FindDescriptors(const Environment& environment, Launcher& launcher) {
  const Result<int> socket = OptionalNumber(environment, {"FARANDOLE_LISTEN_FD"}, 0, INT32_MAX);
  if (!socket.ok()) return socket.status();
  // Other ranks of the host may have inherited the variable, but not the socket.
  if (launcher.rank == 0) launcher.listen_descriptor = socket.value();
  const Result<int> key = OptionalNumber(environment, {"FARANDOLE_KEY_FD"}, 0, INT32_MAX);
  if (!key.ok()) return key.status();
  launcher.key_descriptor = key.value();
  const std::string* file = Find(environment, "FARANDOLE_KEY_FILE");
  if (file != nullptr) launcher.key_file = *file;
  return {};
}

}  // namespace

Result<Launcher> DetectLauncher(const Environment& environment, const InitOptions& options) {
  if (options.apart && !environment.empty()) return DetectLauncher({}, options);
  if (options.apart && (options.rank < 0 || options.size < 0)) {
    return InvalidArgument("init: a job apart from the launcher's needs a rank and a size");
  }
  // Half an announcement of ours is a mistake worth an error; half of others' may be a leftover.
  for (const auto& [name, other] : {std::pair("FARANDOLE_RANK", "FARANDOLE_SIZE"),
                                    std::pair("FARANDOLE_SIZE", "FARANDOLE_RANK")}) {
    const bool is_half = Find(environment, name) != nullptr && Find(environment, other) == nullptr;
    if (is_half && options.rank < 0) {
      return InvalidArgument(std::string(name) + " is set but " + other + " is not");
    }
  }
  Result<Launcher> found = FindLauncher(environment);
  if (!found.ok()) return found;
  Launcher& launcher = found.value();
  FARANDOLE_RETURN_IF_ERROR(TakeRank(options, launcher));
  launcher.is_apart = options.apart;
  if (options.local_rank >= 0) launcher.local_rank = options.local_rank;
  if (launcher.size == 1) {
    if (options.is_elastic) FARANDOLE_RETURN_IF_ERROR(FindDescriptors(environment, launcher));
    launcher.identity = Identity(environment, launcher);
    return found;
  }
  FARANDOLE_RETURN_IF_ERROR(FindRankZero(environment, options, launcher));
  FARANDOLE_RETURN_IF_ERROR(FindDescriptors(environment, launcher));
  // mpirun of Open MPI 5 sets it. Whether the file exists matters only where it is to be loaded
  // (coordinator/job/world.cc).
  const std::string* folder = Find(environment, "OMPI_LIBDIR_LOC");
  if (folder != nullptr) launcher.mpi_library = *folder + "/libmpi.so.40";
  launcher.identity = Identity(environment, launcher);
  return found;
}

Result<std::string> ChooseNetwork(const Launcher& launcher, const std::string& setting) {
  if (setting != "auto" && setting != "mpi" && setting != "tcp") {
    return InvalidArgument("FARANDOLE_NETWORK=\"" + setting + "\" is not auto, mpi or tcp");
  }
  if (setting == "mpi" && !launcher.is_apart) return setting;
  const bool has_pmi = launcher.pmi_descriptor >= 0;
  const bool is_mpi = launcher.has_mpi && !has_pmi && !launcher.is_chosen;
  if (setting == "auto" && is_mpi) return std::string("mpi");
  const std::string ranks =
      launcher.source + " says " + std::to_string(launcher.size) + " ranks, but ";
  if (launcher.is_taken) {
    return InvalidArgument(ranks + "its own store listens at " + launcher.address +
                           ": pass a store, or set FARANDOLE_ADDRESS to another port there");
  }
  if (launcher.address.empty() && launcher.folder.empty() && launcher.store == nullptr &&
      !has_pmi) {
    return InvalidArgument(ranks +
                           "nobody says where rank 0 is: set FARANDOLE_ADDRESS=host:port, or "
                           "MASTER_ADDR and MASTER_PORT, or pass an address or a store to init");
  }
  return std::string("tcp");
}

std::string RankProcess(const Launcher& launcher, int64_t process_id) {
  return std::to_string(process_id) + " " + launcher.identity;
}

Status RefuseDescendant(const Environment& environment, const Launcher& launcher) {
  const std::string* joined = Find(environment, kRankProcess);
  if (joined == nullptr) return {};
  // The first blank ends the process id; the identity contains blanks itself.
  const size_t space = joined->find(' ');
  if (space == std::string::npos || joined->substr(space + 1) != launcher.identity) return {};
  return Unimplemented(
      "rank " + std::to_string(launcher.rank) + " of this job has joined as process " +
      joined->substr(0, space) +
      ", from which this process inherited its environment: keep workers that import the script "
      "from calling init() by `if __name__ == \"__main__\":`, or start a program that is to be a "
      "job of its own without " +
      launcher.variable + " and the launcher's other variables");
}

}  // namespace farandole
