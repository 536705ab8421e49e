// How a group opens its epoch on the servers.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "ballast/client/discovery/job_key.h"
#include "ballast/client/group/change.h"
#include "ballast/client/group/members.h"
#include "ballast/client/session_types.h"
#include "ballast/client/transport/router.h"
#include "ballast/v1/state_service.pb.h"

namespace ballast::client {

// Asks whether all servers would find space for the job. Changes nothing.
absl::Status TryOpen(Router* router, v1::OpenRequest open, absl::Time deadline);
// To the members, which come first among the router's servers.
absl::Status SendOpen(Router* router, const v1::OpenRequest& open, absl::Time deadline);
// Sends an Open that is the job's first on some server. Servers reserve the job's log, which can take a disk minutes.
// `timeout` applies to servers that are down. As long as a server says that it is at work, the call waits.
absl::Status SendFirstOpen(Router* router, const v1::OpenRequest& open, absl::Duration timeout);
// A server of the router.
struct OpenTo {
  uint32_t server = 0;
  bool briefly = false;  // it has the Open's spec, so that a brief Open is enough
  bool needed = true;
};
// Sends `open`, which is whole, to these servers. Returns their answers. Once all needed ones have answered, the others
// have `grace`, and after that are UNAVAILABLE (SERVER_DOWN).
std::vector<absl::StatusOr<v1::OpenResponse>> SendOpenTo(Router* router, const std::string& what,
                                                         const std::shared_ptr<const v1::OpenRequest>& open,
                                                         const std::vector<OpenTo>& servers, absl::Time deadline,
                                                         absl::Duration grace = absl::InfiniteDuration());

// The end of an opening by the table, once `change` has fenced the claimed epoch: chooses the next table, writes it,
// and opens `open`, which has all but base, step counts and table, and is brief if the group is at work. Then the
// router's servers are the members, in their order, and those that left behind them; lines say what has changed.
absl::Status OpenNext(Router* router, Members* members, JobKey* key, Change* change, const SessionOptions& options,
                      absl::Time deadline, v1::OpenRequest* open);

}  // namespace ballast::client
