// A job as its servers have it, asked without a fence.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "ballast/client/group/members.h"
#include "ballast/client/transport/router.h"
#include "ballast/v1/state_service.pb.h"

namespace ballast::client {

struct Sight {
  std::vector<v1::GetJobResponse> answers;
  bool exists = false;   // on some server
  int64_t version = -1;  // the highest decided one
};

// Asks all servers. `with_open`: answers have the servers' newest Opens.
absl::StatusOr<Sight> LookAt(Router* router, const std::string& job, bool with_open, absl::Time deadline);
Sight SightOf(std::vector<v1::GetJobResponse> answers);
// The newest Open that any server has, or nullptr.
const v1::OpenRequest* NewestOpen(absl::Span<const v1::GetJobResponse> answers);
// Leaves servers, and their answers, out that `open` of the job does not need. Errors: those of
// Members::LeaveOthersOut.
absl::Status LeaveOthersOut(const v1::OpenRequest& open, const std::string& job, Members* members, Sight* sight);

}  // namespace ballast::client
