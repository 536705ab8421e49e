// Versions of a job that its servers keep on their disks.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "ballast/client/session_types.h"
#include "ballast/client/transport/router.h"

namespace ballast::client {

// A version on the disks of some servers.
struct PinnedOn {
  KeptVersion kept;
  uint32_t servers = 0;
  bool differs = false;  // two servers keep different states under this number
};
// Versions of a job on its servers.
struct Pins {
  uint64_t life = 0;               // as KeptVersion's
  uint32_t servers = 0;            // that were asked and have the job
  std::vector<PinnedOn> versions;  // ascending
};
// By the answers of all servers.
Pins PinsOf(absl::Span<const v1::GetJobResponse> answers);
// `may_change`: a server without the job has left it, and does not count: a rank may not know yet.
absl::StatusOr<Pins> AskPins(Router* router, const std::string& job, bool may_change, absl::Time deadline);

// Whether a server may lack the version because it is still to copy it: the version is older than the last table that
// let a server begin.
bool IsBeforeFill(const KeptVersion& kept, const v1::Table& table);

// Drops kept versions that some server lacks, because a rank died amid its pin: no restore can use them. Not those that
// servers may still copy. For rank 0 of a group that opens the job, before any rank pins.
absl::Status DropPartialPins(Router* router, const v1::OpenRequest& open, absl::Time deadline);

}  // namespace ballast::client
