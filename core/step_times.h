// How long steps of training took, and where the time went.
#pragma once

#include <array>
#include <cstdint>

namespace farandole {

/// Of one step of a rank, or of all its steps; what of the time is no computing may overlap.
struct StepTimes {
  int32_t rank = 0;
  int64_t step = 0;  ///< Its number; of all steps: how many.
  int64_t ns = 0;
  int64_t blocked_ns = 0;       ///< Its thread waited for operations of all ranks.
  int64_t input_ns = 0;         ///< It waited for input, as far as a frontend notes that.
  int64_t queued_ns = 0;        ///< It could have run, and had no processor.
  int64_t collecting_ns = 0;    ///< The garbage collector of its language ran.
  int64_t other_groups_ns = 0;  ///< It waited for operations of other sets or groups of ranks.
  int64_t link_ns = 0;     ///< The network needed for what went to another host: see SendMeter.
  int64_t link_bytes = 0;  ///< That was; not a time.
  bool operator==(const StepTimes&) const = default;
};

/// Its times, in the order of their counters and of the flight recorder's memory.
inline constexpr std::array kTimesOfStep = {
    &StepTimes::ns,        &StepTimes::blocked_ns,    &StepTimes::input_ns,
    &StepTimes::queued_ns, &StepTimes::collecting_ns, &StepTimes::other_groups_ns,
    &StepTimes::link_ns};

}  // namespace farandole
