// What the fake NCCL keeps for tests: settings, calls, misuses. One per process.
#pragma once

#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "test/fakes/nccl/control.h"

namespace farandole {

/// Thread safety: any thread. Lifetime: until process exit.
class FakeNcclJournal {
 public:
  static FakeNcclJournal& Get();

  void Set(const char* name, const char* value);
  void Reset();
  /// A setting's text; "" where it is not set.
  std::string Text(const std::string& name);
  int Number(const std::string& name, int otherwise);
  /// The same for a rank: `otherwise` for those that RANK excludes.
  int NumberFor(int rank, const std::string& name, int otherwise);
  /// A variable of NCCL's own as it was at the first look since Reset, whatever came later.
  std::string Environment(const std::string& name);

  void Count(const char* name);
  void Add(const FakeNcclCall& call);
  size_t calls();
  FakeNcclCall call(size_t index);
  int64_t times(const char* name);

  void Misuse(const std::string& what);
  std::string TakeMisuses();

 private:
  std::mutex mutex_;
  std::map<std::string, std::string> settings_;
  std::map<std::string, std::string> environment_;
  std::map<std::string, int64_t> times_;
  std::vector<FakeNcclCall> calls_;
  std::string misuses_;
};

}  // namespace farandole
