// The view that `ballastctl` has of all servers, and its verdict.
#pragma once

#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "ballast/v1/admin_service.pb.h"
#include "ballast/v1/state_service.pb.h"

namespace ballast::services {

struct ServerView {
  std::string address;
  absl::Status error;  // why there is no status
  v1::GetServerStatusResponse status;
};

// Asks all servers at once. Never fails as a whole: a server that does not answer within `timeout` gets its error.
std::vector<ServerView> LookAt(const std::vector<std::string>& addresses, absl::Duration timeout);

// A job, as seen over all servers.
struct JobView {
  std::string name;
  int64_t committed_min = 0;
  int64_t committed_max = 0;
  int64_t oldest_chunk_version = 0;
  uint64_t skipped_steps = 0;
  uint32_t world_size = 0;
  uint64_t parameters = 0;
  uint64_t chunks = 0;
  uint64_t chunks_moving = 0;
  std::vector<std::string> servers;
  std::set<std::string> member_ids;
  std::set<int64_t> pinned_versions;
  std::set<int64_t> durable_versions;
  std::string durability;   // none, step, every-K
  bool state_lost = false;  // on some server
  std::vector<std::string> problems;
};

struct ClusterView {
  std::vector<ServerView> servers;
  std::vector<JobView> jobs;
  // Empty: healthy.
  std::vector<std::string> problems;
};
// Degraded: a server down, a job failed, a job's state lost or missing on one of its servers, or versions more than one
// apart.
ClusterView Judge(std::vector<ServerView> servers);

// Verdict, servers, jobs, tiers: as aligned text, and as JSON (numbers of 64 bits as strings, as in protobuf's JSON).
std::string ShowText(const ClusterView& cluster);
std::string ShowJson(const ClusterView& cluster);

// Drops `job` on a server, at the epoch reported by the server. NOT_FOUND if the server has no such job.
absl::Status DropJob(const std::string& address, const std::string& job, absl::Duration timeout);

// Gives up a durable pin on a server, at the epoch reported by the server. NOT_FOUND if the server has no such pin.
absl::StatusOr<v1::UnpinResponse> UnpinVersion(const std::string& address, const std::string& job, int64_t version,
                                               absl::Duration timeout);

absl::StatusOr<v1::SetBudgetResponse> SetBudget(const std::string& address, const v1::SetBudgetRequest& request,
                                                absl::Duration timeout);

}  // namespace ballast::services
