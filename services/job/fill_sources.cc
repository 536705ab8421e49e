#include "ballast/services/job/fill_sources.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ballast/proto/base/status.h"

namespace ballast::services {

std::optional<uint32_t> FillSources::Choose(const model::EpochPlan& plan, uint64_t chunk, uint32_t self, absl::Time now,
                                            absl::Time* until) const {
  const absl::Span<const uint32_t> holders = plan.holders_of(chunk);
  // Servers that fill at the same time begin with different holders.
  const uint32_t first = plan.SourceFor(chunk, self);
  const auto begin = static_cast<size_t>(std::find(holders.begin(), holders.end(), first) - holders.begin());
  for (size_t i = 0; i < holders.size(); ++i) {
    const uint32_t holder = holders[(begin + i) % holders.size()];
    if (holder == self) continue;
    const auto rest = resting_.find(plan.members()[static_cast<int>(holder)].server_id());
    if (rest == resting_.end() || rest->second.until <= now) return holder;
    *until = std::min(*until, rest->second.until);
  }
  return std::nullopt;
}

bool FillSources::Failed(const std::string& server, const absl::Status& cause, absl::Time now) {
  Rest& rest = resting_[server];
  const std::string told = absl::StrCat(absl::StatusCodeToString(cause.code()), " ", model::ReasonOf(cause));
  const bool fresh = std::exchange(rest.told, told) != told;
  if (rest.until > now) return fresh;  // a copy that began before the server rested
  rest.length = std::clamp(rest.length * 2, kRestMin, kRestMax);
  rest.until = now + rest.length;
  return fresh;
}

}  // namespace ballast::services
