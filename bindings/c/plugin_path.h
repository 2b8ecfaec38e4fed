// Where the libraries that come with libfarandole.so are.
#pragma once

#include <string>

namespace farandole {

/// The file of that name in the directory of libfarandole.so.
std::string BesideThisLibrary(const char* file);

}  // namespace farandole
