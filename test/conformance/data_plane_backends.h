// The backends whose ranks can share a process: a new one is a row here.
#pragma once

#include <string>
#include <vector>

#include "test/conformance/data_plane_harness.h"

namespace farandole {

/// A backend and a number of ranks.
struct PlaneParam {
  PlaneBackend backend;
  int ranks = 1;
  bool any_order = false;  ///< See PlaneCase.

  /// "SharedMemory3Ranks".
  std::string Name() const { return backend.name + std::to_string(ranks) + "Ranks"; }
};

std::vector<PlaneParam> BackendsInOneProcess();

/// Those where messages go between ranks or, with played hosts, between hosts: over TCP.
std::vector<PlaneParam> BackendsOverTcp();

/// What data_plane_test.cc asks; each program that has it says this itself.
std::vector<PlaneParam> PlanesUnderTest();

}  // namespace farandole
