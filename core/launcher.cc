#include "core/launcher.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdint>
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
};

// The first that has announced itself counts. torchrun has to show one more variable, because other
// tools set RANK and WORLD_SIZE, too. Launchers that speak PMI agree on the names of rank and size,
// but not on those of the local ones.
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
           {"TORCHELASTIC_RUN_ID", "MASTER_ADDR"}},
    Source{"openmpi",
           "OMPI_COMM_WORLD_RANK",
           "OMPI_COMM_WORLD_SIZE",
           {"OMPI_COMM_WORLD_LOCAL_RANK"},
           {"OMPI_COMM_WORLD_LOCAL_SIZE"},
           {}},
    Source{"mvapich2",
           "MV2_COMM_WORLD_RANK",
           "MV2_COMM_WORLD_SIZE",
           {"MV2_COMM_WORLD_LOCAL_RANK"},
           {"MV2_COMM_WORLD_LOCAL_SIZE"},
           {}},
    Source{"pmi",
           "PMI_RANK",
           "PMI_SIZE",
           {"MPI_LOCALRANKID", "PMI_LOCAL_RANK", "PALS_LOCAL_RANKID", "SLURM_LOCALID"},
           {"MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"},
           {}},
    Source{"pmix",
           "PMIX_RANK",
           "SLURM_STEP_NUM_TASKS",
           {"SLURM_LOCALID"},
           {},
           {},
           "SLURM_STEP_TASKS_PER_NODE",
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

/// An empty value counts as unset, as in ParseConfig.
const std::string* Find(const Environment& environment, const char* name) {
  if (name == nullptr) return nullptr;
  const auto it = environment.find(name);
  return it == environment.end() || it->second.empty() ? nullptr : &it->second;
}

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
  return identity;
}

Status Disagree(const Launcher& a, const Launcher& b) {
  const auto says = [](const Launcher& x) { return x.source + " says " + std::to_string(x.size); };
  return InvalidArgument("two launchers disagree on the number of ranks: " + says(a) + ", " +
                         says(b) + "; start the job with one of them only");
}

}  // namespace

Result<Launcher> DetectLauncher(const Environment& environment) {
  // Half an announcement of ours is a mistake worth an error; half of others' may be a leftover.
  if (Find(environment, "FARANDOLE_RANK") != nullptr &&
      Find(environment, "FARANDOLE_SIZE") == nullptr) {
    return InvalidArgument("FARANDOLE_RANK is set but FARANDOLE_SIZE is not");
  }
  std::optional<Launcher> found;
  for (const Source& source : kSources) {
    if (!Speaks(environment, source) || (source.slurm_step && found)) continue;
    // All are read, also after the first: variables of two launchers in one environment mean the
    // same job only if they agree on the size.
    Result<Launcher> launcher = Read(environment, source);
    if (!launcher.ok()) return launcher;
    if (found && found->size != launcher.value().size) return Disagree(*found, launcher.value());
    if (!found) found = std::move(launcher).value();
  }
  if (!found) return Launcher{};
  // mpirun of Open MPI 5 sets it. Whether the file exists matters only where it is to be loaded
  // (bindings/c/process.cc).
  const std::string* folder = Find(environment, "OMPI_LIBDIR_LOC");
  if (folder != nullptr) found->mpi_library = *folder + "/libmpi.so.40";
  found->identity = Identity(environment, *found);
  return *found;
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
