#include "test/simulation/scenario.h"

#include <algorithm>
#include <map>
#include <tuple>

#include "coordinator/control/rendezvous.h"
#include "test/simulation/random.h"

namespace farandole::simulation {
namespace {

constexpr uint32_t kUnknownUid = 4'000'000;

uint64_t HashOf(std::initializer_list<uint64_t> values) {
  uint64_t hash = 0;
  for (const uint64_t value : values) hash = Random(hash ^ value).Next();
  return hash;
}

uint64_t HashOf(const std::string& text) {
  uint64_t hash = text.size();
  for (const char c : text) hash = HashOf({hash, static_cast<uint64_t>(c)});
  return hash;
}

int DrawSize(Random& random) {
  const int kind = random.Below(100);
  if (kind < 50) return random.Between(1, 6);
  if (kind < 88) return random.Between(7, 16);
  return random.Between(17, 64);
}

std::vector<int> DrawTree(Random& random, int size) {
  const int hosts = random.Between(1, size);
  std::vector<int> host(static_cast<size_t>(size));
  for (int r = 0; r < size; ++r) {
    host[static_cast<size_t>(r)] = hosts == size ? r : random.Below(hosts);
  }
  return MakeTree(host, random.Percent(60) ? random.Between(1, 3) : 8);
}

void DrawSchedule(Random& random, Scenario& s) {
  s.link_delay = random.Percent(50) ? random.Between(1, 20) : random.Between(20, 500);
  s.think = random.Percent(50) ? random.Between(1, 10) : random.Between(10, 300);
  s.flush_delay = random.Percent(30) ? 0 : random.Between(1, 100);
  s.run_time = random.Percent(50) ? random.Between(1, 30) : random.Between(30, 1000);
  s.slow_link = s.size > 1 && random.Percent(30) ? random.Between(1, s.size - 1) : -1;
  s.look_ahead = random.Percent(30) ? 1 : random.Between(2, 12);
  s.eager = random.Percent(50);
  s.joined_ranks_run = random.Percent(50);
  s.serial_cuda = random.Percent(50);
  const int64_t thresholds[] = {0, 24, 200, 1 << 20};
  s.fusion_threshold_bytes = thresholds[random.Below(4)];
  s.window = random.Between(1, 3);
  const uint32_t ids[] = {0, 2, 5, 65'536, 65'536};
  s.max_ids = ids[random.Below(5)];
  s.stall_ns = random.Percent(30) ? random.Between(100, 3000) : 0;
  s.forgets = s.seed % 4 == 3;
  s.repeats = s.seed % 9 == 1 || s.seed % 9 == 8;
  if (!s.repeats) return;
  // Ranks submit the operations of a round before they flush, in the order of the script.
  s.look_ahead = 1;
  s.think = random.Percent(70) ? 0 : 2;
  s.flush_delay = random.Between(20, 100);
  s.fusion_threshold_bytes = thresholds[random.Between(1, 3)];
}

Flavour DrawFlavour(Random& random, OpKind kind) {
  if (random.Percent(70)) return Flavour::kPlain;
  if (kind == OpKind::kBroadcast && random.Percent(25)) return Flavour::kRootAbsent;
  const Flavour all[] = {Flavour::kVotes,  Flavour::kVotes,    Flavour::kVotes,
                         Flavour::kNobody, Flavour::kDisagree, Flavour::kFailed};
  return all[random.Below(6)];
}

/// Ranks of a new set that no other set of the scenario has; empty if none was found.
std::vector<int32_t> DrawRanks(Random& random, const Scenario& s) {
  std::vector<int32_t> ranks;
  for (int32_t r = 0; r < s.size; ++r) {
    if (random.Percent(50)) ranks.push_back(r);
  }
  const bool taken = std::find(s.sets.begin(), s.sets.end(), ranks) != s.sets.end();
  return taken ? std::vector<int32_t>() : ranks;
}

class Writer {
 public:
  Writer(Random& random, Scenario& s) : random_(random), s_(s), live_{0} {}

  void Write(int phases, int ops_per_phase) {
    for (int phase = 0; phase < phases; ++phase) {
      if (s_.repeats) {
        WriteRounds(phase, ops_per_phase);
      } else {
        for (int i = 0; i < ops_per_phase; ++i) WriteOp(phase);
      }
      s_.phase_end.push_back(static_cast<int>(s_.ops.size()));
    }
  }

 private:
  void WriteOp(int phase) {
    const int kind = random_.Below(100);
    if (kind < 8 && s_.sets.size() < 6) return WriteAddSet(phase);
    if (kind < 11 && live_.size() > 1) return WriteRemoveSet(phase);
    Op op;
    op.phase = phase;
    op.set = live_[static_cast<size_t>(random_.Below(static_cast<int>(live_.size())))];
    if (kind < 16) op.kind = OpKind::kBarrier;
    if (kind >= 16 && kind < 30) op.kind = OpKind::kBroadcast;
    if (kind >= 30 && kind < 36) op.kind = OpKind::kAllgather;
    if (kind >= 36 && kind < 41) op.kind = OpKind::kReducescatter;
    if (kind >= 41 && kind < 46) op.kind = OpKind::kAlltoall;
    op.name = "t" + std::to_string(random_.Below(5));
    op.variant = random_.Percent(85) ? 0 : 1;
    const bool moves = op.kind != OpKind::kBarrier;
    op.flavour = moves ? DrawFlavour(random_, op.kind) : Flavour::kPlain;
    Push(op);
  }

  /// Of the global set, and sometimes of one that may end.
  void WriteRounds(int phase, int ops) {
    const int names = random_.Between(2, 5);
    for (int i = 0; i < ops; ++i) {
      Op op;
      op.phase = phase;
      op.name = "round" + std::to_string(i % names);
      if (random_.Percent(5)) {
        op.variant = random_.Below(2);
        op.flavour = DrawFlavour(random_, op.kind);
      }
      Push(op);
      if (random_.Percent(2)) WriteOp(phase);
    }
  }

  void WriteAddSet(int phase) {
    Op op;
    op.phase = phase;
    op.kind = OpKind::kAddSet;
    op.name = "add" + std::to_string(random_.Below(3));
    if (random_.Percent(15)) {
      op.flavour = Flavour::kInvalid;
      return Push(op);
    }
    const std::vector<int32_t> ranks = DrawRanks(random_, s_);
    if (ranks.empty()) return;
    const bool agreed = s_.size == 1 || random_.Percent(85);
    op.flavour = agreed ? Flavour::kPlain : Flavour::kDisagree;
    op.target = static_cast<int>(s_.sets.size());
    s_.sets.push_back(ranks);
    s_.add_op.push_back(static_cast<int>(s_.ops.size()));
    if (agreed) live_.push_back(op.target);
    Push(op);
  }

  void WriteRemoveSet(int phase) {
    Op op;
    op.phase = phase;
    op.kind = OpKind::kRemoveSet;
    op.name = "remove" + std::to_string(random_.Below(2));
    if (random_.Percent(20)) {
      op.flavour = Flavour::kInvalid;
      return Push(op);
    }
    const auto at = static_cast<size_t>(random_.Between(1, static_cast<int>(live_.size()) - 1));
    op.target = live_[at];
    live_.erase(live_.begin() + static_cast<std::ptrdiff_t>(at));
    Push(op);
  }

  void Push(Op op) {
    op.salt = random_.Next();
    const auto [it, added] =
        last_.try_emplace({op.set, SpaceOf(op.kind), op.name}, static_cast<int>(s_.ops.size()));
    if (!added) op.previous = std::exchange(it->second, static_cast<int>(s_.ops.size()));
    s_.ops.push_back(std::move(op));
  }

  Random& random_;
  Scenario& s_;
  std::vector<int> live_;
  std::map<std::tuple<int, OpKind, std::string>, int> last_;
};

void DrawJoins(Random& random, Scenario& s) {
  const bool early = random.Percent(s.repeats ? 30 : 70);
  s.join_at.resize(static_cast<size_t>(s.size));
  for (auto& phases : s.join_at) {
    int begin = 0;
    for (const int end : s.phase_end) {
      phases.push_back(early && random.Percent(40) ? random.Between(begin, end) : end);
      begin = end;
    }
  }
}

void DrawLeaves(Random& random, Scenario& s) {
  s.leave_at.assign(static_cast<size_t>(s.size), -1);
  if (!random.Percent(15)) return;
  for (int i = random.Between(1, 2); i > 0; --i) {
    s.leave_at[static_cast<size_t>(random.Below(s.size))] =
        random.Below(static_cast<int>(s.ops.size()) + 1);
  }
}

/// The signature all members of `op` agree on.
Signature Agreed(const Scenario& s, const Op& op, uint32_t uid) {
  Signature signature;
  signature.kind = op.kind;
  if (op.kind == OpKind::kAddSet) {
    signature.ranks = s.sets[static_cast<size_t>(op.target)];
    if (op.flavour == Flavour::kInvalid) signature.ranks = s.sets[0];
  }
  if (op.kind == OpKind::kRemoveSet) {
    signature.ranks = {static_cast<int32_t>(op.flavour == Flavour::kInvalid ? kUnknownUid : uid)};
  }
  if (op.kind == OpKind::kBarrier || !signature.ranks.empty()) return signature;
  Random random(HashOf({s.seed, static_cast<uint64_t>(op.set), static_cast<uint64_t>(op.kind),
                        HashOf(op.name), static_cast<uint64_t>(op.variant)}));
  const int tensors = random.Percent(70) ? 1 : random.Percent(90) ? random.Between(2, 6) : 70;
  const bool one_dtype = random.Percent(60);
  for (int t = 0; t < tensors; ++t) {
    TensorSignature tensor;
    if (tensors > 1) tensor.name = "t" + std::to_string(t);
    tensor.dtype = one_dtype || random.Percent(50) ? DType::kFloat32 : DType::kInt64;
    tensor.shape = {random.Between(0, 4), random.Between(1, 3)};
    if (RowsMayDiffer(op.kind)) tensor.shape.front() = 0;
    signature.tensors.push_back(tensor);
  }
  if (op.name.starts_with("round")) return signature;  // fuses with the others
  signature.op = random.Percent(80) ? ReduceOp::kSum : ReduceOp::kAverage;
  signature.device = random.Percent(60) ? DeviceKind::kCpu : DeviceKind::kCuda;
  if (op.kind != OpKind::kBroadcast) return signature;
  const std::vector<int32_t>& ranks = s.sets[static_cast<size_t>(op.set)];
  signature.root = random.Percent(95)
                       ? ranks[static_cast<size_t>(random.Below(static_cast<int>(ranks.size())))]
                       : s.size;
  return signature;
}

void Alter(Random& random, Signature& signature) {
  if (signature.tensors.empty()) {
    signature.ranks.back() += 1'000'000;
    return;
  }
  switch (random.Below(10)) {
    case 0:
      signature.tensors.back().dtype = DType::kFloat64;
      return;
    case 1:
      signature.tensors.front().shape.push_back(2);
      return;
    case 2:
      signature.op = ReduceOp::kMax;
      return;
    case 3:
      signature.root += 1;
      return;
    case 4:
      signature.prescale = 0.5;
      return;
    case 5:
      signature.postscale = 2.0;
      return;
    case 6:
      signature.wire_format = WireFormat::kFloat16;
      return;
    case 7:
      signature.tensors.push_back(signature.tensors.back());
      return;
    case 8:
      signature.kind =
          signature.kind == OpKind::kAllreduce ? OpKind::kReducescatter : OpKind::kAllreduce;
      return;
    default:
      signature.tensors.back().name += "'";
      return;
  }
}

}  // namespace

bool Scenario::IsMember(const Op& op, int rank) const {
  const std::vector<int32_t>& ranks = sets[static_cast<size_t>(op.set)];
  return std::binary_search(ranks.begin(), ranks.end(), rank);
}

bool Scenario::WaitsAt(int rank, int position) const {
  // As a training loop does after a step; else hardly any round comes whole.
  if (repeats && position < std::ssize(ops) && ops[static_cast<size_t>(position)].name == "round0")
    return true;
  return !repeats &&
         HashOf({seed, static_cast<uint64_t>(rank), static_cast<uint64_t>(position)}) % 10 == 0;
}

Signature Scenario::SignatureOf(const Op& op, int rank, uint32_t uid) const {
  Signature signature = Agreed(*this, op, uid);
  const std::vector<int32_t>& ranks = sets[static_cast<size_t>(op.set)];
  Random random(op.salt);
  const int32_t odd = ranks[static_cast<size_t>(random.Below(static_cast<int>(ranks.size())))];
  if (op.flavour == Flavour::kDisagree && odd == rank) Alter(random, signature);
  return signature;
}

Vote Scenario::VoteOf(const Op& op, int rank) const {
  Vote vote;
  const Signature signature = Agreed(*this, op, 0);
  const std::vector<int32_t>& ranks = sets[static_cast<size_t>(op.set)];
  Random one(op.salt);
  const int32_t odd = ranks[static_cast<size_t>(one.Below(static_cast<int>(ranks.size())))];
  Random random(HashOf({op.salt, static_cast<uint64_t>(rank)}));
  const auto tensors = static_cast<int>(signature.tensors.size());
  const int absent = op.flavour == Flavour::kVotes ? one.Below(60) : 50;
  const int clean = op.flavour == Flavour::kVotes ? one.Below(60) : 100;
  for (int t = 0; t < tensors; ++t) {
    const bool may = op.flavour == Flavour::kVotes || op.flavour == Flavour::kNobody;
    if (op.flavour == Flavour::kRootAbsent && rank == signature.root)
      SetBit(vote.absent, t, tensors);
    if (!may) continue;
    if (random.Percent(absent)) {
      SetBit(vote.absent, t, tensors);
    } else if (random.Percent(clean)) {
      SetBit(vote.clean, t, tensors);
    }
  }
  if (op.flavour == Flavour::kFailed && odd == rank) vote.failed = "out of luck";
  // Rows of an allgather: often those of the key's last use, else of this use alone.
  const Signature own = SignatureOf(op, rank, 0);
  Random rows(HashOf({op.salt % 3 == 0 ? op.salt : HashOf(op.name), static_cast<uint64_t>(rank)}));
  for (size_t t = 0; own.kind == OpKind::kAllgather && t < own.tensors.size(); ++t) {
    vote.rows.push_back(rows.Percent(40) ? 0 : rows.Between(1, 300));
  }
  return vote;
}

Scenario MakeScenario(uint64_t seed) {
  Random random(HashOf({seed}));
  Scenario s;
  s.seed = seed;
  s.size = DrawSize(random);
  s.parent = DrawTree(random, s.size);
  DrawSchedule(random, s);
  std::vector<int32_t> everyone(static_cast<size_t>(s.size));
  for (int32_t r = 0; r < s.size; ++r) everyone[static_cast<size_t>(r)] = r;
  s.sets.push_back(everyone);
  s.add_op.push_back(-1);
  const int budget = s.size > 24 ? 24 : s.size > 8 ? 40 : 60;
  const int phases = random.Between(1, s.repeats ? 2 : 3);
  Writer(random, s).Write(phases, random.Between(2, budget / phases));
  DrawJoins(random, s);
  DrawLeaves(random, s);
  return s;
}

void SlowDown(Scenario& scenario, int factor) {
  for (int* time :
       {&scenario.link_delay, &scenario.think, &scenario.flush_delay, &scenario.run_time}) {
    *time *= factor;
  }
  scenario.stall_ns *= factor;
}

void LetRanksPart(Scenario& scenario) {
  Random random(HashOf({scenario.seed, 0x9a27}));
  scenario.part_at = random.Below(static_cast<int>(scenario.ops.size()) + 1);
  scenario.part_at = std::min(scenario.part_at, scenario.phase_end.back() - 1);
  for (std::vector<int>& phases : scenario.join_at) phases = scenario.phase_end;
  scenario.leave_at.assign(static_cast<size_t>(scenario.size), -1);
  for (const char* name : {"even", "odd"}) {
    Op op;
    op.kind = OpKind::kBarrier;
    op.name = name;
    scenario.ops.push_back(std::move(op));
  }
}

}  // namespace farandole::simulation
