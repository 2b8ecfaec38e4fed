#include "ops/hierarchical/one_shot.h"

#include <algorithm>

#include "ops/cpu/batch.h"

namespace farandole {

Status OneShotAllreduce::Begin(const Batch& batch, const Topology& topology, DataPlane& flat) {
  batch_ = &batch;
  topology_ = &topology;
  const size_t members = batch.ranks.size();
  row_bytes_ = static_cast<size_t>(batch.count * SizeOf(batch.wire));
  rows_.resize((members + topology.host.size() + 1) * row_bytes_);
  const bool contributes = !IsAbsent(batch, batch.my_index);
  std::byte* const own = Row(members + topology.host.size());
  if (contributes) PackOwn(own);
  splits_.assign(members, batch.count);
  for (const int position : batch.absent) splits_[static_cast<size_t>(position)] = 0;
  const auto present = static_cast<int64_t>(members - batch.absent.size());
  segment_ = {contributes ? own : nullptr, rows_.data(), present * batch.count};

  gather_ = Batch();
  gather_.kind = OpKind::kAllgather;
  gather_.number = batch.number;
  gather_.index = batch.index;
  gather_.set = batch.set;
  gather_.ranks = batch.ranks;
  gather_.my_index = batch.my_index;
  gather_.dtype = gather_.wire = batch.wire;
  gather_.absent = batch.absent;
  gather_.segments = {&segment_, 1};
  gather_.count = segment_.count;
  gather_.splits = splits_;
  Result<PlaneOperation*> started = flat.Start(gather_);
  if (started.ok()) gathering_ = started.value();
  return started.status();
}

Progress OneShotAllreduce::Step() {
  const Progress progress = gathering_->Step();
  using State = Progress::State;
  if (progress.state != State::kDone && progress.state != State::kFailed) return progress;
  gathering_ = nullptr;
  if (progress.state == State::kDone) Reduce();
  return progress;
}

void OneShotAllreduce::Abandon() {
  gathering_->Abandon();
  gathering_ = nullptr;
}

void OneShotAllreduce::PackOwn(std::byte* to) const {
  SegmentCursor cursor(batch_->segments, batch_->dtype);
  for (int64_t left = batch_->count; left > 0;) {
    const Run run = cursor.Next(left);
    kernels_.Pack(to, batch_->wire, run.in, batch_->dtype, run.count, batch_->prescale);
    to += run.count * SizeOf(batch_->wire);
    left -= run.count;
  }
}

/// The roundings are those of the reduce-scatter in a host and of the allreduce between hosts.
void OneShotAllreduce::Reduce() {
  const size_t members = batch_->ranks.size();
  size_t present_hosts = 0;
  for (size_t h = 0; h < topology_->host.size(); ++h) {
    const auto is_absent = [this](int position) { return IsAbsent(*batch_, position); };
    if (std::ranges::all_of(topology_->host[h], is_absent)) continue;
    ReduceHost(h, Row(members + present_hosts++));
  }
  sources_.clear();
  for (size_t k = 0; k < present_hosts; ++k) sources_.push_back(Row(members + k));
  std::byte* const result = Row(members + topology_->host.size());
  kernels_.Reduce(
      result, sources_, batch_->count,
      {batch_->wire, batch_->op, static_cast<int64_t>(topology_->host.size()), batch_->postscale});
  Unpack(result);
}

/// Contributions of absent members are not there: the rows of the others follow one another.
void OneShotAllreduce::ReduceHost(size_t number, std::byte* to) {
  const std::vector<int>& host = topology_->host[number];
  sources_.clear();
  for (const int position : host) {
    if (IsAbsent(*batch_, position)) continue;
    const auto absent_before =
        std::ranges::lower_bound(batch_->absent, position) - batch_->absent.begin();
    sources_.push_back(Row(static_cast<size_t>(position - absent_before)));
  }
  const ReduceSpec spec{batch_->wire, batch_->op, static_cast<int64_t>(host.size()), 1.0};
  const double weight = batch_->op == ReduceOp::kAverage ? topology_->WeightOf(number) : 1.0;
  std::byte* const average =
      weight == 1.0 ? to : Row(batch_->ranks.size() + topology_->host.size());
  kernels_.Reduce(average, sources_, batch_->count, spec);
  if (weight == 1.0) return;
  kernels_.Pack(to, batch_->wire, average, batch_->wire, batch_->count, weight);
}

void OneShotAllreduce::Unpack(const std::byte* from) const {
  SegmentCursor cursor(batch_->segments, batch_->dtype);
  for (int64_t left = batch_->count; left > 0;) {
    const Run run = cursor.Next(left);
    if (run.out != nullptr) {
      kernels_.Unpack(run.out, batch_->dtype, from, batch_->wire, run.count);
    }
    from += run.count * SizeOf(batch_->wire);
    left -= run.count;
  }
}

}  // namespace farandole
