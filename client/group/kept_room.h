// The room that a change of servers takes for kept versions. Who copies a shard takes over what versions on the disk
// have of it, too, and a change that has no room for that would never end.
#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "ballast/proto/model/members.h"
#include "ballast/v1/state_service.pb.h"

namespace ballast::client {

// What the members of a next table have to copy of kept versions.
struct KeptNeed {
  // By member: bytes of NVMe beside what the member has of them. 0 for a member that only goes on with copies:
  // their room was looked at when they began.
  std::vector<uint64_t> bytes;
  std::set<int64_t> versions;  // that members keep
};

// By what the servers told: a holder has so many bytes of a shard, and who copies the shard will have as many. Servers
// of earlier builds tell nothing, and count as having nothing. `found`: of table `now`, in `answers`.
KeptNeed KeptToCopy(const v1::Table& now, const model::Found& found, const v1::Table& next,
                    absl::Span<const v1::GetJobResponse> answers);

// RESOURCE_EXHAUSTED (BUDGET) if the server has room for the Open, as `dry_run` says, and none for `kept_bytes` beside
// it. OK where its build does not tell what is free.
absl::Status CheckKeptRoom(const std::string& server_id, uint64_t kept_bytes, const std::set<int64_t>& versions,
                           const v1::OpenResponse& dry_run);

}  // namespace ballast::client
