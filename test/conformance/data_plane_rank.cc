#include "test/conformance/data_plane_rank.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "core/clock.h"
#include "ops/cpu/batch.h"

namespace farandole {
namespace {

constexpr std::byte kGuard{0xA5};
constexpr size_t kGuardElements = 3;

/// What is copied rather than reduced keeps the bits of a NaN: it is compared as an integer.
DType ComparedAs(const PlaneCase& c) {
  if (Reduces(c.kind)) return c.dtype;
  switch (SizeOf(c.dtype)) {
    case 1:
      return DType::kUint8;
    case 2:
      return DType::kInt16;
    case 4:
      return DType::kInt32;
    default:
      return DType::kInt64;
  }
}

/// Whether this rank compares case number `k` with the reference. A result that all members have
/// alike is compared by one that takes it, as the fingerprints are compared; the reference is slow.
bool Compares(const PlaneCase& c, size_t k, int my_index) {
  if (c.kind == OpKind::kReducescatter || c.kind == OpKind::kAlltoall) return true;
  int member = static_cast<int>(k) % c.members;
  for (int tried = 1; tried < c.members && !c.TakesResult(member); ++tried) {
    member = (member + 1) % c.members;
  }
  return member == my_index;
}

}  // namespace

SetView GlobalSet(int rank, int size) {
  SetView view;
  view.ranks.resize(static_cast<size_t>(size));
  std::iota(view.ranks.begin(), view.ranks.end(), 0);
  view.my_index = rank;
  return view;
}

RankRun::RankRun(const PlaneCase& c, const SetView& set, int64_t number,
                 std::span<const std::byte> expected)
    : case_(c),
      set_(set),
      expected_(expected),
      element_bytes_(static_cast<size_t>(SizeOf(c.dtype))),
      contributes_(!c.IsAbsent(set.my_index)),
      reads_(contributes_ && (c.kind != OpKind::kBroadcast || c.root == set.my_index)),
      takes_result_(c.TakesResult(set.my_index)),
      mine_(ResultOf(c, set.my_index)) {
  for (int peer = 0; peer < c.members && c.kind == OpKind::kAlltoall; ++peer) {
    sends_.push_back(c.SplitOf(set.my_index, peer));
    receives_.push_back(c.SplitOf(peer, set.my_index));
  }
  PlaceSegments();
  FillInputs();
  in_before_.assign(in_.begin(), in_.end());
  batch_.number = number;
  batch_.set = set_.set;
  batch_.ranks = set_.ranks;
  batch_.my_index = set_.my_index;
  batch_.kind = c.kind;
  batch_.dtype = c.dtype;
  batch_.wire = WireDType(c.dtype, c.wire);
  batch_.op = c.op;
  batch_.prescale = c.PrescaleOf(set.my_index);
  batch_.postscale = c.postscale;
  batch_.root_index = c.root;
  batch_.absent = case_.absent;
  batch_.slots = case_.slots;
  batch_.segments = segments_;
  batch_.count = c.Count();
  batch_.splits = case_.splits;
  batch_.sends = sends_;
  batch_.receives = receives_;
}

int64_t RankRun::InputCount(size_t segment) const {
  return IsVariableSize(case_.kind) ? case_.InputCount(set_.my_index) : case_.counts[segment];
}

int64_t RankRun::OutputCount(size_t segment) const {
  return IsVariableSize(case_.kind) ? mine_.count : case_.counts[segment];
}

void RankRun::AllocateInput(size_t bytes) {
  if (case_.kind == OpKind::kAllreduce && set_.buffers) in_buffer_ = set_.buffers(bytes);
  if (in_buffer_ != nullptr) {
    case_.in_place = true;
    in_ = {in_buffer_.get(), bytes};
  } else {
    in_heap_.resize(bytes);
    in_ = in_heap_;
  }
  std::ranges::fill(in_, kGuard);
}

void RankRun::PlaceSegments() {
  size_t in_end = kGuardElements * element_bytes_;
  size_t out_end = in_end;
  for (size_t k = 0; k < case_.counts.size(); ++k) {
    // A batch of several segments has no splits: both ends are the same.
    offsets_.push_back(in_end);
    in_end += (static_cast<size_t>(InputCount(k)) + kGuardElements) * element_bytes_;
    out_end += (static_cast<size_t>(OutputCount(k)) + kGuardElements) * element_bytes_;
  }
  AllocateInput(in_end);
  out_.assign(out_end, kGuard);
  for (size_t k = 0; k < case_.counts.size(); ++k) {
    Segment segment;
    segment.count = case_.counts[k];
    std::byte* out = (case_.in_place ? in_ : out_).data() + offsets_[k];
    if (takes_result_) segment.out = out;
    const bool needs_input = !IsVariableSize(case_.kind) || InputCount(k) > 0;
    if (reads_ && needs_input) segment.in = in_.data() + offsets_[k];
    segments_.push_back(segment);
  }
}

void RankRun::FillInputs() {
  int64_t index = 0;
  for (size_t k = 0; k < case_.counts.size(); ++k) {
    for (int64_t i = 0; i < InputCount(k); ++i, ++index) {
      const uint64_t bits = InputBits(case_, set_.my_index, index);
      std::memcpy(in_.data() + offsets_[k] + static_cast<size_t>(i) * element_bytes_, &bits,
                  element_bytes_);
    }
  }
}

Result<PlaneOperation*> RankRun::Start(DataPlane& plane) {
  if (!IsAdasum(batch_)) return plane.Start(batch_);
  FARANDOLE_RETURN_IF_ERROR(adasum_.Begin(plane, batch_));
  return static_cast<PlaneOperation*>(&adasum_);
}

std::string RankRun::Check() const {
  int64_t element = mine_.begin;
  for (size_t k = 0; k < segments_.size(); ++k) {
    if (takes_result_) {
      if (std::string wrong = CheckSegment(k, element); !wrong.empty()) return wrong;
    }
    element += OutputCount(k);
  }
  const bool writes_input = case_.in_place && takes_result_;
  if (!writes_input && !std::ranges::equal(in_, in_before_)) return "an input was written";
  // Everything but the results must still be guard bytes.
  const std::span<const std::byte> written =
      writes_input ? std::span<const std::byte>(in_) : std::span<const std::byte>(out_);
  std::vector<std::byte> rest(written.begin(), written.end());
  if (takes_result_) {
    for (size_t k = 0; k < segments_.size(); ++k) {
      const size_t bytes = static_cast<size_t>(OutputCount(k)) * element_bytes_;
      std::fill_n(rest.begin() + static_cast<std::ptrdiff_t>(offsets_[k]), bytes, kGuard);
    }
  }
  const auto is_guard = [](std::byte b) { return b == kGuard; };
  if (!std::all_of(rest.begin(), rest.end(), is_guard)) return "a guard byte was written";
  return {};
}

std::string RankRun::CheckSegment(size_t segment, int64_t first_element) const {
  const int64_t count = OutputCount(segment);
  if (count == 0 || expected_.empty()) return {};
  const std::byte* expected =
      expected_.data() + static_cast<size_t>(first_element) * element_bytes_;
  const auto* got = static_cast<const std::byte*>(segments_[segment].out);
  int64_t first = 0;
  const int64_t wrong = CountDifferences(ComparedAs(case_), got, expected, count, &first);
  if (wrong == 0 || IsCloseEnough(segment, first_element)) return {};
  uint64_t got_bits = 0;
  uint64_t expected_bits = 0;
  const size_t at = static_cast<size_t>(first) * element_bytes_;
  std::memcpy(&got_bits, got + at, element_bytes_);
  std::memcpy(&expected_bits, expected + at, element_bytes_);
  return std::to_string(wrong) + " of " + std::to_string(count) + " elements of segment " +
         std::to_string(segment) + " are wrong, first [" + std::to_string(first) + "]: bits " +
         std::to_string(got_bits) + ", expected " + std::to_string(expected_bits);
}

bool RankRun::IsCloseEnough(size_t segment, int64_t first_element) const {
  if (!case_.any_order || !IsFloating(case_.dtype)) return false;
  const auto value = [&](const void* elements, int64_t index) {
    uint64_t bits = 0;
    std::memcpy(
        &bits,
        static_cast<const std::byte*>(elements) + static_cast<size_t>(index) * element_bytes_,
        element_bytes_);
    return FloatFromBits(case_.dtype, bits);
  };
  for (int64_t i = 0; i < OutputCount(segment); ++i) {
    const double error =
        value(segments_[segment].out, i) - value(expected_.data(), first_element + i);
    if (error == 0) continue;
    if (!(std::abs(error) <= ErrorBound(case_, first_element + i))) return false;  // NaN too
  }
  return true;
}

uint64_t RankRun::Fingerprint() const {
  const bool differs = case_.kind == OpKind::kReducescatter || case_.kind == OpKind::kAlltoall;
  if (!takes_result_ || differs) return 0;
  uint64_t hash = 0xcbf29ce484222325u;  // FNV-1a, by 8 bytes: this hash only has to distinguish
  for (const Segment& segment : segments_) {
    const auto* bytes = static_cast<const std::byte*>(segment.out);
    const size_t size = static_cast<size_t>(segment.count) * element_bytes_;
    for (size_t i = 0; i < size; i += sizeof(uint64_t)) {
      uint64_t word = 0;
      std::memcpy(&word, bytes + i, std::min(sizeof word, size - i));
      hash = (hash ^ word) * 0x100000001b3u;
      hash ^= hash >> 29;
    }
  }
  return hash;
}

std::string DriveToEnd(DataPlane& plane, FutexDoorbell& bell, RankRun& run, int64_t patience_ns) {
  RankRun* const runs[] = {&run};
  return DriveAllToEnd(plane, bell, runs, patience_ns);
}

std::string DriveAllToEnd(DataPlane& plane, FutexDoorbell& bell, std::span<RankRun* const> runs,
                          int64_t patience_ns) {
  std::vector<PlaneOperation*> under_way;
  for (RankRun* run : runs) {
    Result<PlaneOperation*> started = run->Start(plane);
    if (!started.ok()) return "Start: " + started.status().ToString();
    under_way.push_back(started.value());
  }
  int64_t last_progress_ns = SteadyClock().NowNs();
  while (!under_way.empty()) {
    const uint32_t ticket = bell.Ticket();
    bool moved = false;
    int64_t poll_after_ns = kByDoorbell;
    for (PlaneOperation*& operation : under_way) {
      const Progress progress = operation->Step();
      if (progress.state == Progress::State::kFailed) return progress.status.ToString();
      if (progress.state == Progress::State::kDone) operation = nullptr;
      moved = moved || progress.state != Progress::State::kWaiting;
      if (progress.state == Progress::State::kWaiting && progress.poll_after_ns != kByDoorbell &&
          (poll_after_ns == kByDoorbell || progress.poll_after_ns < poll_after_ns)) {
        poll_after_ns = progress.poll_after_ns;
      }
    }
    std::erase(under_way, nullptr);
    const int64_t now_ns = SteadyClock().NowNs();
    if (moved) {
      bell.StayAwake();
      last_progress_ns = now_ns;
    } else if (now_ns - last_progress_ns > patience_ns) {
      return "no progress";
    } else if (poll_after_ns != 0 && bell.MaySleep()) {
      bell.Sleep(FutexDoorbell::Listener::kEngine, ticket,
                 poll_after_ns == kByDoorbell ? patience_ns : poll_after_ns);
    }
  }
  for (RankRun* run : runs) {
    if (std::string wrong = run->Check(); !wrong.empty()) return wrong;
  }
  return {};
}

std::string RunCasesOnRank(DataPlane& plane, FutexDoorbell& bell, const SetView& set,
                           std::span<const PlaneCase> cases, std::vector<uint64_t>* fingerprints) {
  std::vector<std::vector<std::byte>> expected(cases.size());
  for (size_t k = 0; k < cases.size(); ++k) {
    const bool compares = fingerprints == nullptr || Compares(cases[k], k, set.my_index);
    if (compares) expected[k] = ReferenceResult(cases[k]);
  }
  return RunCasesOnRank(plane, bell, set, cases, expected, fingerprints);
}

std::string RunCasesOnRank(DataPlane& plane, FutexDoorbell& bell, const SetView& set,
                           std::span<const PlaneCase> cases,
                           std::span<const std::vector<std::byte>> expected,
                           std::vector<uint64_t>* fingerprints) {
  if (Status added = plane.AddSet(set.set, set.ranks, set.my_index); !added.ok()) {
    return added.ToString();
  }
  std::string failures;
  for (size_t k = 0; k < cases.size(); ++k) {
    const PlaneCase& c = cases[k];
    RankRun run(c, set, static_cast<int64_t>(k), expected[k]);
    const std::string wrong = DriveToEnd(plane, bell, run);
    if (fingerprints != nullptr) fingerprints->push_back(run.Fingerprint());
    if (wrong.empty()) continue;
    failures += c.ToString() + ": member " + std::to_string(set.my_index) + ": " + wrong + "\n";
    if (wrong == "no progress") return failures;  // the plane cannot be trusted any further
  }
  plane.RemoveSet(set.set);
  return failures;
}

}  // namespace farandole
