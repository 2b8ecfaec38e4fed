#include "coordinator/control/process_name.h"

#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <vector>

#include "core/status.h"

namespace farandole {
namespace {

constexpr size_t kMostCharacters = 64;

std::vector<std::string> WordsOf(const std::string& command_line) {
  std::vector<std::string> words;
  for (size_t at = 0; at < command_line.size();) {
    const size_t end = std::min(command_line.find('\0', at), command_line.size());
    words.push_back(command_line.substr(at, end - at));
    at = end + 1;
  }
  return words;
}

std::string BaseName(const std::string& path) {
  return path.substr(path.rfind('/') + 1);  // npos + 1 is 0
}

}  // namespace

std::string ProcessName::ToString() const {
  std::string text = "process " + std::to_string(pid) + " on host " + host + " (" +
                     (program.empty() ? "" : program + " of ") + "user " + std::to_string(user) +
                     ")";
  std::ranges::replace_if(
      text, [](unsigned char c) { return c < ' ' || c > '~'; }, '?');
  return text;
}

// Options of Python that take a word of their own are -W and -X; -c and -m end its options.
std::string ProgramOf(const std::string& executable, const std::string& command_line) {
  const std::string name = BaseName(executable);
  if (!name.starts_with("python")) return name;
  const std::vector<std::string> words = WordsOf(command_line);
  if (words.empty() || !BaseName(words[0]).starts_with("python")) return "";
  for (size_t i = 1; i < words.size(); ++i) {
    const std::string& word = words[i];
    if (!word.starts_with('-')) return BaseName(word);
    if (word == "-m") return i + 1 < words.size() ? words[i + 1] : "";
    if (word.starts_with("-c") || word == "-") return "";
    if (word == "-W" || word == "-X") ++i;
  }
  return "";
}

ProcessName ThisProcess() {
  char executable[4096];
  const ssize_t length = readlink("/proc/self/exe", executable, sizeof executable);
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  const std::string command_line(std::istreambuf_iterator<char>(file), {});
  ProcessName name;
  name.pid = static_cast<uint32_t>(getpid());
  name.user = geteuid();
  name.host = HostName().substr(0, kMostCharacters);
  name.program =
      ProgramOf({executable, static_cast<size_t>(std::max<ssize_t>(length, 0))}, command_line)
          .substr(0, kMostCharacters);
  return name;
}

bool AreOfOtherJobs(const ProcessName& a, const ProcessName& b) {
  const bool programs_are_known = !a.program.empty() && !b.program.empty();
  return a.user != b.user || (programs_are_known && a.program != b.program);
}

}  // namespace farandole
