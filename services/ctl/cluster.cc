#include "ballast/services/ctl/cluster.h"

#include <google/protobuf/util/json_util.h>
#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <map>
#include <memory>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/time/clock.h"
#include "ballast/proto/model/status.h"
#include "ballast/services/ctl/show.h"
#include "ballast/services/rpc/status_codec.h"
#include "ballast/v1/admin_service.grpc.pb.h"
#include "ballast/v1/state_service.grpc.pb.h"

namespace ballast::services {
namespace {

std::unique_ptr<v1::AdminService::Stub> Connect(const std::string& address) {
  return v1::AdminService::NewStub(grpc::CreateChannel(address, grpc::InsecureChannelCredentials()));
}

void SetDeadline(grpc::ClientContext* context, absl::Duration timeout) {
  context->set_deadline(absl::ToChronoTime(absl::Now() + timeout));
}

std::string ShowDurability(const v1::JobStatus& job) {
  switch (job.durability()) {
    case v1::DURABILITY_NONE:
      return "none";
    case v1::DURABILITY_STEP:
      return "step";
    case v1::DURABILITY_EVERY_K:
      return absl::StrCat("every-", job.pin_interval());
    default:
      return "-";  // not opened yet, or not there any more
  }
}

// Describes the loss of a job whose state is gone on a server.
std::string LossOf(const std::string& address, const v1::JobStatus& job) {
  if (job.durability() == v1::DURABILITY_EVERY_K && job.failure().empty()) {
    return absl::StrCat("job '", job.name(), "' lost what came after version ", job.committed(), " on ", address,
                        ": start its trainers again with resume=auto, which goes back to what all servers have");
  }
  return absl::StrCat("job '", job.name(), "' lost its state on ", address, ": ",
                      job.failure().empty() ? "drop it with `ballastctl drop` and start again" : job.failure());
}

std::string Versions(int64_t min, int64_t max) { return min == max ? absl::StrCat(min) : absl::StrCat(min, "..", max); }

void AddJob(const ServerView& server, const v1::JobStatus& job, std::map<std::string, JobView>* jobs) {
  const auto [entry, fresh] = jobs->try_emplace(job.name());
  JobView& view = entry->second;
  view.name = job.name();
  view.servers.push_back(server.address);
  view.world_size = std::max(view.world_size, job.world_size());
  view.parameters = std::max(view.parameters, job.parameters());
  view.chunks += job.chunks();
  view.chunks_moving += job.chunks_moving();
  view.skipped_steps = std::max(view.skipped_steps, job.skipped_steps());
  view.member_ids.insert(job.member_ids().begin(), job.member_ids().end());
  view.pinned_versions.insert(job.pinned_versions().begin(), job.pinned_versions().end());
  view.durable_versions.insert(job.durable_versions().begin(), job.durable_versions().end());
  view.committed_min = fresh ? job.committed() : std::min(view.committed_min, job.committed());
  view.committed_max = fresh ? job.committed() : std::max(view.committed_max, job.committed());
  view.oldest_chunk_version =
      fresh ? job.oldest_chunk_version() : std::min(view.oldest_chunk_version, job.oldest_chunk_version());
  if (view.durability.empty() || view.durability == "-") view.durability = ShowDurability(job);
  view.state_lost = view.state_lost || job.state_lost();
  if (job.state_lost()) {
    view.problems.push_back(LossOf(server.address, job));
  } else if (!job.failure().empty()) {
    view.problems.push_back(absl::StrCat("job '", job.name(), "' failed on ", server.address, ": ", job.failure()));
  }
}

// Servers that should have the job and answer without it. A server that does not answer is a problem already.
void AddMissing(const std::vector<ServerView>& servers, JobView* job) {
  std::set<std::string> missing = job->member_ids;
  bool all_answered = true;
  for (const ServerView& server : servers) {
    all_answered = all_answered && server.error.ok();
    if (!server.error.ok() || missing.erase(server.status.server_id()) == 0) continue;
    const auto& held = server.status.jobs();
    if (std::any_of(held.begin(), held.end(), [&](const v1::JobStatus& j) { return j.name() == job->name; })) continue;
    job->problems.push_back(absl::StrCat("job '", job->name, "' is gone from its server '", server.status.server_id(),
                                         "' (", server.address,
                                         "): drop it everywhere with `ballastctl drop` and start again"));
  }
  if (missing.empty() || !all_answered) return;
  job->problems.push_back(absl::StrCat("job '", job->name, "' also lives on server(s) '",
                                       absl::StrJoin(missing, "', '"),
                                       "', none of which was asked; name all of them in --servers"));
}

}  // namespace

std::vector<ServerView> LookAt(const std::vector<std::string>& addresses, absl::Duration timeout) {
  std::vector<ServerView> views(addresses.size());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < addresses.size(); ++i) {
    threads.emplace_back([&view = views[i], &address = addresses[i], timeout] {
      view.address = address;
      grpc::ClientContext context;
      SetDeadline(&context, timeout);
      view.error = FromGrpc(Connect(address)->GetServerStatus(&context, v1::GetServerStatusRequest(), &view.status));
    });
  }
  for (std::thread& thread : threads) thread.join();
  return views;
}

ClusterView Judge(std::vector<ServerView> servers) {
  ClusterView cluster;
  std::map<std::string, JobView> jobs;
  for (const ServerView& server : servers) {
    if (!server.error.ok()) {
      cluster.problems.push_back(absl::StrCat("server ", server.address, " does not answer: ", server.error.message()));
      continue;
    }
    for (const v1::JobStatus& job : server.status.jobs()) AddJob(server, job, &jobs);
  }
  for (auto& [name, job] : jobs) {
    AddMissing(servers, &job);
    if (job.committed_max - job.committed_min > 1 && !job.state_lost) {
      job.problems.push_back(absl::StrCat("job '", name, "' is at versions ", job.committed_min, " to ",
                                          job.committed_max, " on its servers, expected at most one apart"));
    }
    cluster.problems.insert(cluster.problems.end(), job.problems.begin(), job.problems.end());
    cluster.jobs.push_back(job);
  }
  cluster.servers = std::move(servers);
  return cluster;
}

namespace {

// The servers' predictions for a step. Empty if no server has a machine profile.
std::string ShowPlans(const ClusterView& cluster) {
  Table plans({"SERVER", "JOB", "STEP SHOULD TAKE", "COMPUTE", "DISK", "SYNC", "GPU LINK", "NOT COUNTED"});
  bool any = false;
  for (const ServerView& server : cluster.servers) {
    for (const v1::JobStatus& job : server.status.jobs()) {
      if (!job.has_prediction()) continue;
      any = true;
      const v1::StepPrediction& p = job.prediction();
      const auto seconds = [](double s) { return absl::StrFormat("%.4f s", s); };
      plans.Add({server.address, job.name(), seconds(p.total_seconds()), seconds(p.compute_seconds()),
                 seconds(p.disk_seconds()), seconds(p.sync_seconds()), seconds(p.gpu_link_seconds()),
                 p.unmeasured().empty() ? "-" : absl::StrJoin(p.unmeasured(), ", ")});
    }
  }
  return any ? absl::StrCat("\nPlans\n", plans.Show()) : "";
}

}  // namespace

std::string ShowText(const ClusterView& cluster) {
  std::string out;
  if (cluster.problems.empty()) {
    absl::StrAppend(&out, "HEALTHY: ", cluster.servers.size(), " server(s), ", cluster.jobs.size(), " job(s)\n");
  } else {
    absl::StrAppend(&out, "DEGRADED: ", absl::StrJoin(cluster.problems, "\n          "), "\n");
  }
  Table servers({"SERVER", "ID", "UP", "VERSION", "IO"});
  Table tiers({"SERVER", "TIER", "USED", "CAPACITY", "STATE", "WORKING"});
  for (const ServerView& server : cluster.servers) {
    if (!server.error.ok()) {
      servers.Add({server.address, "-", "down", "-", "-"});
      continue;
    }
    const v1::GetServerStatusResponse& s = server.status;
    servers.Add(
        {server.address, s.server_id(), absl::StrFormat("%.0f s", s.uptime_seconds()), s.version(), s.io_backend()});
    for (const v1::TierStatus& tier : s.tiers()) {
      tiers.Add({server.address, tier.tier(), ShowBytes(tier.used_bytes()), ShowBytes(tier.capacity_bytes()),
                 ShowBytes(tier.state_bytes()), ShowBytes(tier.working_bytes())});
    }
  }
  Table jobs({"JOB", "DURABILITY", "VERSION", "OLDEST CHUNK", "SKIPPED", "RANKS", "PARAMETERS", "CHUNKS", "MOVING",
              "SERVERS", "PINS", "DURABLE PINS"});
  for (const JobView& job : cluster.jobs) {
    jobs.Add({job.name, job.durability, Versions(job.committed_min, job.committed_max),
              absl::StrCat(job.oldest_chunk_version), absl::StrCat(job.skipped_steps), absl::StrCat(job.world_size),
              absl::StrCat(job.parameters), absl::StrCat(job.chunks), absl::StrCat(job.chunks_moving),
              absl::StrCat(job.servers.size()),
              job.pinned_versions.empty() ? "-" : absl::StrJoin(job.pinned_versions, ","),
              job.durable_versions.empty() ? "-" : absl::StrJoin(job.durable_versions, ",")});
  }
  return absl::StrCat(out, "\nServers\n", servers.Show(), "\nJobs\n", cluster.jobs.empty() ? "  none\n" : jobs.Show(),
                      "\nTiers\n", tiers.Show(), ShowPlans(cluster));
}

std::string ShowJson(const ClusterView& cluster) {
  google::protobuf::util::JsonPrintOptions options;
  options.preserve_proto_field_names = true;
  options.always_print_primitive_fields = true;
  std::vector<std::string> servers;
  for (const ServerView& server : cluster.servers) {
    std::string status = "null";
    if (server.error.ok()) {
      status.clear();
      // Cannot fail on a message without Any fields.
      (void)google::protobuf::util::MessageToJsonString(server.status, &status, options);
    }
    servers.push_back(
        absl::StrCat("{\"address\":", Quote(server.address), ",\"reachable\":", server.error.ok() ? "true" : "false",
                     ",\"error\":", Quote(std::string(server.error.message())), ",\"status\":", status, "}"));
  }
  std::vector<std::string> jobs;
  for (const JobView& job : cluster.jobs) {
    jobs.push_back(absl::StrFormat(
        "{\"name\":%s,\"durability\":%s,\"committed_min\":%d,\"committed_max\":%d,\"oldest_chunk_version\":%d,"
        "\"skipped_steps\":%d,\"world_size\":%d,\"parameters\":%d,\"chunks\":%d,\"servers\":%s,"
        "\"pinned_versions\":[%s],\"durable_versions\":[%s]"
        "}",
        Quote(job.name), Quote(job.durability), job.committed_min, job.committed_max, job.oldest_chunk_version,
        job.skipped_steps, job.world_size, job.parameters, job.chunks, QuoteAll(job.servers),
        absl::StrJoin(job.pinned_versions, ","), absl::StrJoin(job.durable_versions, ",")));
  }
  return absl::StrCat("{\"verdict\":", cluster.problems.empty() ? "\"healthy\"" : "\"degraded\"",
                      ",\"problems\":", QuoteAll(cluster.problems), ",\"servers\":[", absl::StrJoin(servers, ","),
                      "],\"jobs\":[", absl::StrJoin(jobs, ","), "]}\n");
}

namespace {

// Empty if the server has no such job.
absl::StatusOr<v1::JobStatus> LookAtJob(const std::string& address, const std::string& job, absl::Duration timeout) {
  grpc::ClientContext context;
  SetDeadline(&context, timeout);
  v1::GetServerStatusResponse status;
  BALLAST_RETURN_IF_ERROR(FromGrpc(Connect(address)->GetServerStatus(&context, v1::GetServerStatusRequest(), &status)));
  for (const v1::JobStatus& known : status.jobs()) {
    if (known.name() == job) return known;
  }
  return v1::JobStatus();
}

}  // namespace

absl::Status DropJob(const std::string& address, const std::string& job, absl::Duration timeout) {
  BALLAST_ASSIGN_OR_RETURN(const v1::JobStatus known, LookAtJob(address, job, timeout));
  v1::DropJobRequest request;
  request.set_job(job);
  *request.mutable_epoch() = known.epoch();
  grpc::ClientContext context;
  SetDeadline(&context, timeout);
  v1::DropJobResponse response;
  return FromGrpc(Connect(address)->DropJob(&context, request, &response));
}

absl::StatusOr<v1::UnpinResponse> UnpinVersion(const std::string& address, const std::string& job, int64_t version,
                                               absl::Duration timeout) {
  BALLAST_ASSIGN_OR_RETURN(const v1::JobStatus known, LookAtJob(address, job, timeout));
  // The pins of a job that was refused at start are unknown: the server will say why.
  const auto& pins = known.durable_versions();
  if (known.failure().empty() && std::find(pins.begin(), pins.end(), version) == pins.end()) {
    return absl::NotFoundError(absl::StrCat("no durable pin of version ", version, " of job '", job, "'"));
  }
  v1::UnpinRequest request;
  request.set_job(job);
  request.set_version(version);
  request.set_durable(true);
  *request.mutable_epoch() = known.epoch();
  grpc::ClientContext context;
  SetDeadline(&context, timeout);
  v1::UnpinResponse response;
  const auto stub = v1::StateService::NewStub(grpc::CreateChannel(address, grpc::InsecureChannelCredentials()));
  BALLAST_RETURN_IF_ERROR(FromGrpc(stub->Unpin(&context, request, &response)));
  return response;
}

absl::StatusOr<v1::SetBudgetResponse> SetBudget(const std::string& address, const v1::SetBudgetRequest& request,
                                                absl::Duration timeout) {
  grpc::ClientContext context;
  SetDeadline(&context, timeout);
  v1::SetBudgetResponse response;
  BALLAST_RETURN_IF_ERROR(FromGrpc(Connect(address)->SetBudget(&context, request, &response)));
  return response;
}

}  // namespace ballast::services
