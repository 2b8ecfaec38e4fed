// Finds a plug-in on disk and asks it for its backends.
#pragma once

#include <string>

#include "core/plugin.h"
#include "core/status.h"

namespace farandole {

/// Where to look. Paths go to dlopen as they are: with a slash a file, without one a search.
struct PluginFiles {
  std::string plugin;    ///< e.g. ".../libfarandole_mpi.so".
  std::string library;   ///< The third-party library to open before it (libmpi.so.40), or empty.
  std::string advice{};  ///< Ends the error message that says that one of them cannot be loaded.
};

/// Why the calling thread's last dlopen or dlsym failed, in the loader's own words.
std::string LoaderText();

/// Loads `files.plugin` (RTLD_NOW | RTLD_LOCAL, never unloaded) and returns what it offers. Opening
/// `files.library` first decides which libmpi is used: the plug-in's own dependency has the same
/// soname and is then satisfied by the one already mapped.
/// @return Unavailable with the loader's own text and what to install if a file cannot be loaded,
///         InvalidArgument if the plug-in belongs to another build or is no plug-in.
/// `services` is borrowed for the rest of the process.
Result<Backends> LoadPlugin(const PluginFiles& files, const Services& services);

}  // namespace farandole
