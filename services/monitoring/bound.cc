#include "ballast/services/monitoring/bound.h"

#include <algorithm>
#include <array>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace ballast::services {
namespace {

constexpr std::array<std::pair<absl::string_view, absl::string_view>, 10> kWords = {{
    {"push", "slices coming in"},
    {"seal_wait", "waiting for the last rank"},
    {"log_sync", "log to disk"},
    {"state_read", "state from disk"},
    {"kernel", "computing"},
    {"state_write", "state to disk"},
    {"flush", "flushing"},
    {"pin", "pinning"},
    {"move", "moving chunks"},
    {"idle", "waiting for trainers"},
}};

}  // namespace

std::string WordsOf(absl::string_view stage) {
  const auto found =
      std::find_if(kWords.begin(), kWords.end(), [&](const auto& known) { return known.first == stage; });
  return std::string(found == kWords.end() ? stage : found->second);
}

std::optional<Bound> BoundOf(const v1::JobStatus& job) {
  double total = 0, most = 0, waiting = 0;
  Bound bound;
  for (const v1::StageTime& stage : job.last_stages()) {
    const double seconds = stage.seconds();
    if (!(seconds > 0)) continue;
    total += seconds;
    if (stage.stage() == "idle" || stage.stage() == "seal_wait") waiting += seconds;
    if (seconds <= most) continue;
    most = seconds;
    bound.stage = stage.stage();
  }
  if (total <= 0) return std::nullopt;
  bound.share = most / total;
  bound.waiting = waiting / total;
  return bound;
}

std::string ShowBound(const Bound& bound, bool words) {
  return absl::StrFormat("%s %.0f %%", words ? WordsOf(bound.stage) : bound.stage, 100 * bound.share);
}

}  // namespace ballast::services
