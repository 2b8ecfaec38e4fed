// A negotiation's listener for tests that want some of its calls only.
#pragma once

#include <string>

#include "coordinator/protocol/negotiation.h"

namespace farandole {

/// Ignores everything; a test overrides what it keeps.
class IgnoringListener : public NegotiationListener {
 public:
  void SendUp(int, const UpMessage&) override {}
  void SendDown(int, const DownMessage&) override {}
  void OnWork(const WorkDecision&) override {}
  void OnEnded(KeyId, const Status&) override {}
  void OnSetAdded(const ProcessSetInfo&) override {}
  void OnSetEnded(uint32_t, const Status&) override {}
  void OnJoinDone(int) override {}
  void OnLeft(int) override {}
  void OnShutdown() override {}
  void OnReport(const std::string&) override {}
  void OnStallShutdown(const Status&) override {}
};

}  // namespace farandole
