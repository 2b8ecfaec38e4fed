#include "core/counters.h"

namespace farandole {

// Each is a literal and so has a NUL behind it: farandole_counters gives data() to C, where the
// pointers stay valid for ever. Scripts look counters up by these names, which therefore never
// change.
std::string_view CounterName(Counter counter) {
  switch (counter) {
    case Counter::kSubmissions:
      return "submissions";
    case Counter::kMessagesUp:
      return "messages_up";
    case Counter::kMessagesDown:
      return "messages_down";
    case Counter::kMessagesReceived:
      return "messages_received";
    case Counter::kControlBytesSent:
      return "control_bytes_sent";
    case Counter::kWakeUps:
      return "wake_ups";
    case Counter::kEngineLoops:
      return "engine_loops";
    case Counter::kDecisions:
      return "decisions";
    case Counter::kBatches:
      return "batches";
    case Counter::kTensors:
      return "tensors";
    case Counter::kBatchBytes:
      return "batch_bytes";
    case Counter::kBytesCopied:
      return "bytes_copied";
    case Counter::kBulkBytesSent:
      return "bulk_bytes_sent";
    case Counter::kQuarantinedBytes:
      return "quarantined_bytes";
    case Counter::kDeviceLaunches:
      return "device_launches";
    case Counter::kInPlaceBytes:
      return "in_place_bytes";
    case Counter::kBulkMessagesSent:
      return "bulk_messages_sent";
    case Counter::kCount:
      break;
  }
  return "unknown";
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
