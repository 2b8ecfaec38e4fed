// What a rank has done lately, in memory that outlives it, and as a file once something goes wrong.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "core/clock.h"
#include "core/status.h"
#include "core/step_times.h"
#include "core/types.h"

namespace farandole {

/// The numbers are part of the memory's layout, which farandole/flight.py reads, too.
enum class FlightStep : uint8_t {
  kNone = 0,
  kSubmitted = 1,
  kStalled = 2,  ///< Some rank has not submitted it for long.
  kFailed = 3,   ///< The final error; its name is the beginning of the message.
};

struct FlightFacts {
  FlightStep step = FlightStep::kNone;
  OpKind kind = OpKind::kAllreduce;
  DType dtype = DType::kUint8;
  uint32_t set = 0;
  int64_t at_ns = 0;  ///< On the engine's clock, which all ranks of a host share.
  int64_t bytes = 0;
};

struct FlightEvent : FlightFacts {
  // Of a submission.
  int64_t decided_ns = 0;   ///< When all ranks had submitted it and it was started; 0: not yet.
  int64_t finished_ns = 0;  ///< When it ended; 0: not yet.
  Code code = Code::kOk;    ///< How.
  /// To the set of all ranks: how many there had been, with this one, so that those of several
  /// ranks can be compared; 0: of anything else.
  uint32_t call = 0;
  std::string name = {};  ///< Of a long one the end, after "..".
};

/// The last events of a rank, in memory that is zero at first and may be shared. It has one writer,
/// at any time also none, and any number of readers. An event begins with its number, which is 0
/// while it is written: so a reader notices, and skips, what it has seen half written, also if the
/// writer has died in the middle. What becomes of a submission is noted in its event. Of that most
/// names fill one cache line.
struct FlightRing {
  static constexpr size_t kEvents = 2048;
  /// Number, time, when decided and finished, bytes, what it is, call and code; name.
  static constexpr size_t kWords = 16;
  static constexpr size_t kNameWord = 7;
  static constexpr size_t kNameBytes = 8 * (kWords - kNameWord);
  static constexpr uint64_t kMagic = 0x32746867696c6666;  // "fflight2", little endian

  using Word = std::atomic<uint64_t>;
  alignas(64) Word magic;
  Word written;               // events, ever
  Word place;                 // rank << 32 | size
  Word process;               // its number
  Word wall_ns;               // time of day minus the engine's clock
  alignas(64) Word steps[8];  // of all: StepTimes, from its number on
  alignas(64) Word events[kEvents][kWords];
};
static_assert(FlightRing::Word::is_always_lock_free && sizeof(FlightRing) == 2 * 64 + 2048 * 128);

/// The events that can be read, oldest first.
std::vector<FlightEvent> ReadFlight(const FlightRing& ring);
/// What the rank submitted last, as text: allreduce "x"; empty: nothing that is still known.
/// @param age_ns  Since then, or -1.
std::string DescribeLast(const FlightRing& ring, int64_t now_ns, int64_t* age_ns);

/// Writes a rank's ring, and files with what is in it.
///
/// Thread safety: Record and notes by the holder of the engine lock, Dump by any thread; none
/// waits. Files are written by a thread of its own, which exists if there is a folder. Lifetime:
/// should the file system not answer, that thread keeps what it needs.
class FlightRecorder {
 public:
  struct Options {
    int rank = 0;
    int size = 1;
    std::string folder = {};  ///< Of the files, made with the first one; empty: none are written.
    std::string job = {};     ///< Part of their names; empty: the process's number.
    std::string host = {};
    std::string version = {};
    /// Of the ranks of this host that share memory, with this rank's; empty: memory of its own.
    std::vector<FlightRing*> rings = {};
    size_t mine = 0;                    ///< Position in `rings`.
    std::shared_ptr<void> memory = {};  ///< Holds the rings.
  };

  /// With a folder, SIGUSR1 writes a file from now on, unless the program has a use for it.
  /// @return Unavailable if there is no memory.
  static Result<std::unique_ptr<FlightRecorder>> Create(Options options);
  /// Waits for files that were asked for, but not for ever.
  ~FlightRecorder();

  /// @return the event's number, for the two below.
  uint64_t Record(const FlightFacts& event, std::string_view name);
  void NoteDecided(uint64_t number, int64_t now_ns);
  void NoteFinished(uint64_t number, Code code, int64_t now_ns);
  /// Adds a step to the totals. Thread safety: any thread.
  void NoteStep(const StepTimes& times);
  /// Asks for a file. @param error  The final error, once there is one.
  void Dump(const std::string& reason, const Status& error = {});
  /// Waits until all files that were asked for are written, but not for long.
  void FinishDumps();

 private:
  struct Shared;

  FlightRecorder(Options options, int file);
  static void Write(const std::shared_ptr<Shared>& shared, uint32_t seen_signals);

  FlightRing::Word* Find(uint64_t number);

  const int file_;  // of memory of its own; -1: none
  FlightRing& ring_;
  uint64_t written_ = 0;
  uint32_t calls_ = 0;
  const std::shared_ptr<Shared> shared_;  // with the thread
  std::thread thread_;                    // writes files; none without a folder
};

}  // namespace farandole
