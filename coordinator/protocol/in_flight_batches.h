// Batches somebody still has to report: a decider's window and a reporter's own duties.
//
// Thread safety: none; one holder of the engine lock at a time. Internal to the negotiation.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace farandole {

/// Few decisions are open at a time (the window), so a search is linear. No allocation once grown.
class InFlightBatches {
 public:
  /// Batches of a decision are added one after the other, by ascending index; `tag` comes back from
  /// Take.
  void Add(int64_t number, uint32_t tag, int32_t index);
  /// Strikes a batch off. @return false if it is not (or no longer) listed.
  bool Take(int64_t number, int32_t index, uint32_t* tag);

 private:
  struct Entry {
    int64_t number = 0;
    uint32_t tag = 0;
    int32_t open = 0;
    std::vector<uint8_t> listed;  // by batch index
  };
  std::vector<Entry> entries_;  // the first `used_` are in use: something is open
  size_t used_ = 0;
};

}  // namespace farandole
