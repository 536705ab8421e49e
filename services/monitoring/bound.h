// The stage that limits a job's steps, for `ballastctl top`, the status page and --json.
#pragma once

#include <optional>
#include <string>

#include "absl/strings/string_view.h"
#include "ballast/v1/admin_service.pb.h"

namespace ballast::services {

// "state from disk" for "state_read", and so on; a stage of a newer server has its own name.
std::string WordsOf(absl::string_view stage);

struct Bound {
  std::string stage;   // with the largest share of the last steps' time
  double share = 0;    // 0 to 1
  double waiting = 0;  // the share of waits for trainers and for other servers
};

// nullopt: no step has been decided since the server started. Ignores seconds that are not above zero.
std::optional<Bound> BoundOf(const v1::JobStatus& job);

// "state_read 61 %", or in words "state from disk 61 %".
std::string ShowBound(const Bound& bound, bool words);

}  // namespace ballast::services
