// The servers of an open job, as a session calls them.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "ballast/client/transport.h"
#include "ballast/proto/model/epoch_plan.h"

namespace ballast::client {

// The reason of a call that ended because the job's servers changed: the caller starts over with the new ones. It stays
// within the client.
inline constexpr absl::string_view kRoutesChanged = "ROUTES_CHANGED";

inline bool AreRoutesChanged(const absl::Status& status) { return model::ReasonOf(status) == kRoutesChanged; }

struct Routes {
  std::shared_ptr<const model::EpochPlan> plan;
  std::vector<Transport*> servers;  // by place in the plan; valid as long as the router

  const v1::OpenRequest& open() const { return plan->open(); }
  const v1::Epoch& epoch() const { return open().epoch(); }
  // A group with a name may change the job's servers while it trains.
  bool may_change() const { return open().has_table() && !open().group().empty(); }
  // What a server says of an epoch that it promised: it is later than this one, and this group's, or the server forgot
  // whose it is.
  bool IsOwn(absl::string_view group) const { return group.empty() || group == open().group(); }
};

}  // namespace ballast::client
