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

/// This process; its program is read from its command line.
ProcessName ThisProcess();
/// The program of a command line, whose words end with a zero byte each: of an interpreter the
/// script or module, as "train.py"; empty where it runs text from its command line.
std::string ProgramOf(const std::string& command_line);
/// Whether both cannot be ranks of one job: other users, or other programs that are both known.
bool AreOfOtherJobs(const ProcessName& a, const ProcessName& b);

}  // namespace farandole
