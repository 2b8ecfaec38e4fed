// Sockets between the ranks of this process, over the loopback interface.
#pragma once

#include <memory>
#include <vector>

#include "core/doorbell.h"
#include "core/net/data_streams.h"

namespace farandole {

struct LoopbackOptions {
  int streams = 1;
  int send_buffer_bytes = 0;  ///< Of each socket; 0: as the system has it.
};

/// By rank; `bells` likewise, which outlive them. A thread of theirs rings.
std::vector<std::unique_ptr<DataStreams>> MakeLoopbackStreams(const std::vector<Doorbell*>& bells,
                                                              const LoopbackOptions& options = {});

}  // namespace farandole
