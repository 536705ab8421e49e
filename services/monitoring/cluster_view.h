// The verdict on several servers and their jobs, from their status: for `ballastctl status`, and for a single
// server's /status.json.
#pragma once

#include <google/protobuf/message.h>

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "ballast/services/monitoring/bound.h"
#include "ballast/v1/admin_service.pb.h"

namespace ballast::services {

struct ServerView {
  std::string address;
  absl::Status error;  // why there is no status
  v1::GetServerStatusResponse status;
};

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
  uint64_t unfilled_chunks = 0;    // that servers lack and copy from each other
  uint64_t unfilled_bytes = 0;     // of their states
  uint64_t filled_chunks = 0;      // of these servers, copied so far
  std::vector<std::string> fills;  // such servers, a sentence each
  uint32_t replicas = 0;           // copies of each chunk that the job wants; 0: without a table
  uint64_t short_chunks = 0;       // that have fewer
  std::vector<std::string> servers;
  std::set<std::string> member_ids;
  std::set<int64_t> pinned_versions;
  std::set<int64_t> durable_versions;
  std::string durability;   // none, step, every-K
  bool state_lost = false;  // on some server
  std::vector<std::string> problems;
  std::vector<std::string> waits;  // who waits for whom, a sentence each
  // The stage that binds the last steps, on the server that waits least for others. nullopt: no step was decided.
  std::optional<Bound> bound;
  std::string bound_at;
};

struct ClusterView {
  std::vector<ServerView> servers;
  std::vector<JobView> jobs;
  // Servers that were not asked and have a part of some job: host:port of their status pages by id, empty if not known.
  std::map<std::string, std::string> peers;
  // Empty: healthy.
  std::vector<std::string> problems;
};

// Degraded: a server down, two of one id, a job failed, a job's state lost or missing on one of its servers, or
// versions more than one apart, or one apart for a while. `asked`: with kOne, nothing is said about a job's servers
// that were not asked.
enum class Asked { kAll, kOne };
ClusterView Judge(std::vector<ServerView> servers, Asked asked = Asked::kAll);

// "12 of 40 chunks copied, 480.0 MiB left; 6 chunks have one copy". Empty if the job has all copies.
std::string ShowCopies(const JobView& job);

// Verdict, servers, jobs, tiers: as aligned text, and as JSON (numbers of 64 bits as strings, as in protobuf's JSON).
std::string ShowText(const ClusterView& cluster);
std::string ShowJson(const ClusterView& cluster);
// A message as /status.json spells it.
std::string ShowMessage(const google::protobuf::Message& message);

}  // namespace ballast::services
