// Where ranks leave each other a few small values before they are connected: a user's key-value
// store, torch.distributed's, or a folder that all of them see.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "core/status.h"

namespace farandole {

/// A value set again replaces the one before, which others may have got. Thread safety: one thread
/// at a time. Lifetime: until the rank has joined.
class Store {
 public:
  virtual ~Store() = default;
  virtual Status Set(const std::string& key, const std::string& value) = 0;
  /// Waits until somebody has set `key`. @return Timeout naming the key.
  virtual Result<std::string> Get(const std::string& key, int64_t timeout_ns) = 0;
};

/// A folder that all ranks see, with a file for each key; it appears whole, by renaming. The folder
/// is made, mode 0700, if it does not exist. It and a value's file must belong to this user, and
/// nobody else may write to them: Get otherwise returns Unavailable.
/// @return InvalidArgument naming the path and the reason.
Result<std::unique_ptr<Store>> OpenFileStore(const std::string& folder);

}  // namespace farandole
