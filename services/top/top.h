// `ballastctl top`: the servers' status again and again, on the whole terminal, as plain text, or as JSON.
#pragma once

#include <functional>
#include <vector>

#include "absl/time/time.h"
#include "ballast/services/view/cluster_view.h"

namespace ballast::services {

struct TopOptions {
  std::function<std::vector<ServerView>()> look;  // asks all servers; runs on a thread of its own, and may block
  absl::Duration interval = absl::Seconds(1);
  bool once = false;
  bool json = false;  // a line of JSON per interval, in the words of `status --json`
};

// Returns once the user quits, or after a frame with `once`: 0 healthy, 1 degraded. Without a terminal frames are plain
// text, until a signal ends the process.
int RunTop(const TopOptions& options);

}  // namespace ballast::services
