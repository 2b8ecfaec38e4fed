#include "core/counters.h"

namespace farandole {

// Each is a literal and so has a NUL behind it: farandole_counters gives data() to C, where the
// pointers stay valid for ever. Scripts look counters up by these names, which therefore never
// change.
std::string_view CounterName(Counter counter) {
  static constexpr std::string_view kNames[] = {"submissions",
                                                "messages_up",
                                                "messages_down",
                                                "messages_received",
                                                "control_bytes_sent",
                                                "wake_ups",
                                                "engine_loops",
                                                "decisions",
                                                "batches",
                                                "tensors",
                                                "batch_bytes",
                                                "bytes_copied",
                                                "bulk_bytes_sent",
                                                "quarantined_bytes",
                                                "device_launches",
                                                "in_place_bytes",
                                                "bulk_messages_sent",
                                                "agreements",
                                                "steps",
                                                "step_ns",
                                                "blocked_ns",
                                                "input_ns",
                                                "queued_ns",
                                                "collecting_ns",
                                                "other_groups_ns",
                                                "link_ns",
                                                "allreduces",
                                                "broadcasts",
                                                "allgathers",
                                                "reducescatters",
                                                "alltoalls",
                                                "barriers",
                                                "operation_errors",
                                                "negotiation_ns",
                                                "execution_ns",
                                                "votes_by_name",
                                                "wire_bytes",
                                                "stall_reports"};
  static_assert(std::size(kNames) == kCounterCount);
  return NameAt(kNames, counter, "unknown");
}

std::vector<NamedCount> Snapshot(const Counters& counters) {
  std::vector<NamedCount> counts;
  counts.reserve(kCounterCount);
  for (size_t i = 0; i < kCounterCount; ++i) {
    const auto counter = static_cast<Counter>(i);
    counts.push_back({CounterName(counter), counters.Get(counter)});
  }
  return counts;
}

}  // namespace farandole
