#include "ops/hierarchical/one_shot.h"

#include <algorithm>

namespace farandole {

Status OneShotAllreduce::Begin(const Batch& batch, const Topology& topology, DataPlane& flat) {
  batch_ = &batch;
  topology_ = &topology;
  const size_t members = batch.ranks.size();
  row_bytes_ = static_cast<size_t>(batch.count * SizeOf(batch.wire));
  rows_.resize((members + topology.host.size() + 1) * row_bytes_);
  const bool contributes = !IsAbsent(batch, batch.my_index);
  std::byte* const own = Row(members + topology.host.size());
  if (contributes) {
    SegmentCursor cursor(batch.segments, batch.dtype);
    PackRuns(kernels_, batch, cursor, own, batch.count);
  }
  splits_.assign(members, batch.count);
  for (const int index : batch.absent) splits_[static_cast<size_t>(index)] = 0;
  const auto present = static_cast<int64_t>(members - batch.absent.size());
  gather_.Describe(batch, OpKind::kAllgather, batch.wire);
  gather_.batch.absent = batch.absent;
  gather_.batch.splits = splits_;
  Status started =
      gather_.Start(flat, {contributes ? own : nullptr, rows_.data(), present * batch.count});
  if (!started.ok()) pool_.Return(this);
  return started;
}

Progress OneShotAllreduce::Step() {
  const Progress progress = gather_.operation->Step();
  using State = Progress::State;
  if (progress.state != State::kDone && progress.state != State::kFailed) return progress;
  if (progress.state == State::kDone) Reduce();
  pool_.Return(this);
  return progress;
}

void OneShotAllreduce::Abandon() {
  gather_.Abandon();
  pool_.Return(this);
}

/// The roundings are those of the reduce-scatter in a host and of the allreduce between hosts.
void OneShotAllreduce::Reduce() {
  const size_t members = batch_->ranks.size();
  size_t present_hosts = 0;
  for (size_t h = 0; h < topology_->host.size(); ++h) {
    const auto is_absent = [this](int index) { return IsAbsent(*batch_, index); };
    if (std::ranges::all_of(topology_->host[h], is_absent)) continue;
    ReduceHost(h, Row(members + present_hosts++));
  }
  sources_.clear();
  for (size_t k = 0; k < present_hosts; ++k) sources_.push_back(Row(members + k));
  std::byte* const result = Row(members + topology_->host.size());
  kernels_.Reduce(
      result, sources_, batch_->count,
      {batch_->wire, batch_->op, static_cast<int64_t>(topology_->host.size()), batch_->postscale});
  SegmentCursor cursor(batch_->segments, batch_->dtype);
  UnpackRuns(kernels_, *batch_, cursor, result, batch_->count);
}

/// Contributions of absent members are not there: the rows of the others follow one another.
void OneShotAllreduce::ReduceHost(size_t number, std::byte* to) {
  const std::vector<int>& host = topology_->host[number];
  sources_.clear();
  for (const int index : host) {
    if (IsAbsent(*batch_, index)) continue;
    const auto absent_before =
        std::ranges::lower_bound(batch_->absent, index) - batch_->absent.begin();
    sources_.push_back(Row(static_cast<size_t>(index - absent_before)));
  }
  const ReduceSpec spec{batch_->wire, batch_->op, static_cast<int64_t>(host.size()), 1.0};
  const double weight = batch_->op == ReduceOp::kAverage ? topology_->WeightOf(number) : 1.0;
  std::byte* const average =
      weight == 1.0 ? to : Row(batch_->ranks.size() + topology_->host.size());
  kernels_.Reduce(average, sources_, batch_->count, spec);
  if (weight == 1.0) return;
  kernels_.Pack(to, batch_->wire, average, batch_->wire, batch_->count, weight);
}

}  // namespace farandole
