// How the ranks of one group find each other: a small store of keys seen by all ranks.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace ballast::client {

// A store belongs to one start of the group: keys of earlier starts are not seen. Threads: any.
class Rendezvous {
 public:
  virtual ~Rendezvous() = default;
  // Replaces an earlier value. Values of control data: addresses, ids, epochs.
  virtual absl::Status Set(absl::string_view key, absl::string_view value) = 0;
  // Waits until some rank has set `key`. Errors: DEADLINE_EXCEEDED (RANK_MISSING).
  virtual absl::StatusOr<std::string> Get(absl::string_view key, absl::Time deadline) = 0;
};

}  // namespace ballast::client
