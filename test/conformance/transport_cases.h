// What every Transport must do, as bodies that all ranks run: as threads of one test process, or
// one per MPI process.
#pragma once

#include <span>

#include "core/status.h"
#include "core/transport.h"

namespace farandole {

struct TransportCase {
  const char* name;
  /// Run by every rank at the same time. @return what went wrong on this rank.
  Status (*body)(Transport& transport);
};

/// In this order; each leaves the transport empty, the last one unusable.
std::span<const TransportCase> TransportCases();

}  // namespace farandole
