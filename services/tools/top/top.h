// `ballastctl top`: shows the servers' status again and again, on the whole terminal, as plain text, or as JSON.
#pragma once

#include <functional>
#include <vector>

#include "absl/time/time.h"
#include "ballast/services/monitoring/cluster_view.h"

namespace ballast::services {

struct TopOptions {
  std::function<std::vector<ServerView>()> look;  // asks all servers; runs on a thread of its own, and may block
  absl::Duration interval = absl::Seconds(1);
  bool once = false;
  bool json = false;  // a line of JSON per interval, in the words of `status --json`
};

// On a terminal, runs until the user quits, and returns 0. Without a terminal, or with `json`, prints frames until a
// signal ends the process. With `once`, prints one frame, and returns 0 if the servers are healthy, 1 if not.
int RunTop(const TopOptions& options);

}  // namespace ballast::services
