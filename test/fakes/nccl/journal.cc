#include "test/fakes/nccl/journal.h"

#include <cstdio>
#include <cstdlib>
#include <utility>

namespace farandole {

FakeNcclJournal& FakeNcclJournal::Get() {
  static auto* journal = new FakeNcclJournal;  // streams may use it until the very end
  return *journal;
}

void FakeNcclJournal::Set(const char* name, const char* value) {
  std::lock_guard lock(mutex_);
  if (value == nullptr) {
    settings_.erase(name);
  } else {
    settings_[name] = value;
  }
}

void FakeNcclJournal::Reset() {
  std::lock_guard lock(mutex_);
  settings_.clear();
  environment_.clear();
  times_.clear();
  calls_.clear();
  misuses_.clear();
}

std::string FakeNcclJournal::Text(const std::string& name) {
  {
    std::lock_guard lock(mutex_);
    const auto found = settings_.find(name);
    if (found != settings_.end()) return found->second;
  }
  const char* value = std::getenv(("FARANDOLE_TEST_NCCL_" + name).c_str());
  return value == nullptr ? "" : value;
}

int FakeNcclJournal::Number(const std::string& name, int otherwise) {
  const std::string text = Text(name);
  return text.empty() ? otherwise : std::atoi(text.c_str());
}

int FakeNcclJournal::NumberFor(int rank, const std::string& name, int otherwise) {
  return Number("RANK", rank) == rank ? Number(name, otherwise) : otherwise;
}

std::string FakeNcclJournal::Environment(const std::string& name) {
  std::lock_guard lock(mutex_);
  const auto found = environment_.find(name);
  if (found != environment_.end()) return found->second;
  const char* value = std::getenv(name.c_str());
  return environment_[name] = value == nullptr ? "" : value;
}

void FakeNcclJournal::Count(const char* name) {
  std::lock_guard lock(mutex_);
  ++times_[name];
}

void FakeNcclJournal::Add(const FakeNcclCall& call) {
  std::lock_guard lock(mutex_);
  calls_.push_back(call);
}

size_t FakeNcclJournal::calls() {
  std::lock_guard lock(mutex_);
  return calls_.size();
}

FakeNcclCall FakeNcclJournal::call(size_t index) {
  std::lock_guard lock(mutex_);
  return index < calls_.size() ? calls_[index] : FakeNcclCall{};
}

int64_t FakeNcclJournal::times(const char* name) {
  std::lock_guard lock(mutex_);
  const auto found = times_.find(name);
  return found == times_.end() ? 0 : found->second;
}

void FakeNcclJournal::Misuse(const std::string& what) {
  std::fprintf(stderr, "fake NCCL: misuse: %s\n", what.c_str());
  std::lock_guard lock(mutex_);
  misuses_ += what + "\n";
}

std::string FakeNcclJournal::TakeMisuses() {
  std::lock_guard lock(mutex_);
  return std::exchange(misuses_, {});
}

}  // namespace farandole
