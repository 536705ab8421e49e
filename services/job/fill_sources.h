// The servers that a job's missing chunks are copied from: which one is asked next, and which rest after an error.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "ballast/proto/model/epoch_plan.h"

namespace ballast::services {

// Threads: under the job's lock.
class FillSources {
 public:
  static constexpr absl::Duration kRestMin = absl::Seconds(1), kRestMax = absl::Seconds(10);

  // The index among the plan's members of the holder of `chunk` that member `self` asks now: holders in turn, those
  // that rest left out. None: all rest, the first until `*until`, which becomes no later; or there is no other holder.
  std::optional<uint32_t> Choose(const model::EpochPlan& plan, uint64_t chunk, uint32_t self, absl::Time now,
                                 absl::Time* until) const;
  void Answered(const std::string& server) { resting_.erase(server); }
  // The server rests, each time for twice as long. True if this cause has not been told yet.
  bool Failed(const std::string& server, const absl::Status& cause, absl::Time now);
  // A new table.
  void Clear() { resting_.clear(); }

 private:
  struct Rest {
    absl::Time until = absl::InfinitePast();
    absl::Duration length = absl::ZeroDuration();
    std::string told;
  };
  std::map<std::string, Rest> resting_;  // by server
};

}  // namespace ballast::services
