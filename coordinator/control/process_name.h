// Who a process is, for messages to the ranks of another job that come to the same address.
#pragma once

#include <cstdint>
#include <string>

namespace farandole {

struct ProcessName {
  uint32_t pid = 0;
  uint32_t user = 0;    ///< Its number.
  std::string host;     ///< 64 characters at most; so has the program.
  std::string program;  ///< The name of the executable, or of the script; empty: unknown.

  /// "process 12 on host a (train.py of user 1000)". What is not printable becomes "?".
  std::string ToString() const;
  bool operator==(const ProcessName&) const = default;
};

/// This process.
ProcessName ThisProcess();
/// The name of an executable; of Python that of the script or module, as "train.py", from its
/// command line, whose words end with a zero byte each. Empty where Python runs text of that line,
/// or where the program has put a title in its place, as "rank 3", which may differ by rank.
std::string ProgramOf(const std::string& executable, const std::string& command_line);
/// Whether both cannot be ranks of one job: other users, or other programs that are both known.
bool AreOfOtherJobs(const ProcessName& a, const ProcessName& b);

}  // namespace farandole
