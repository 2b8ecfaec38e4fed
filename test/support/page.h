// Parts of the documentation that a test writes: it compares them with what the code says, and
// prints the text to put there when they differ.
#pragma once

#include <fstream>
#include <sstream>
#include <string>

namespace farandole {

/// What stands in a file between the lines `<!-- test: name -->` and `<!-- end -->`; empty if
/// nothing does.
inline std::string PartOfPage(const std::string& path, const std::string& name) {
  std::stringstream page;
  page << std::ifstream(path).rdbuf();
  const std::string text = page.str();
  const std::string begin = "<!-- test: " + name + " -->\n";
  const size_t from = text.find(begin);
  if (from == std::string::npos) return "";
  const size_t end = text.find("<!-- end -->", from);
  return end == std::string::npos ? ""
                                  : text.substr(from + begin.size(), end - from - begin.size());
}

}  // namespace farandole
