#include "ballast/services/monitoring/cluster_view.h"

#include <google/protobuf/util/json_util.h>

#include <algorithm>
#include <map>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "ballast/proto/model/verdict.h"
#include "ballast/services/monitoring/show.h"
#include "ballast/services/monitoring/waits.h"

namespace ballast::services {
namespace {

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

// What the server lacks, and chunks that it holds and that have too few copies.
void AddCopies(const std::string& address, const v1::JobStatus& job, JobView* view) {
  view->replicas = std::max(view->replicas, job.replicas());
  view->short_chunks += job.short_chunks();
  if (job.unfilled_chunks() == 0) return;
  view->unfilled_chunks += job.unfilled_chunks();
  view->unfilled_bytes += job.unfilled_bytes();
  view->filled_chunks += job.filled_chunks();
  view->fills.push_back(absl::StrCat(address, " fills: ", job.filled_chunks(), " of ",
                                     job.filled_chunks() + job.unfilled_chunks(), " chunks, ",
                                     ShowBytes(job.unfilled_bytes()), " left"));
}

void AddJob(const ServerView& server, const v1::JobStatus& job, std::map<std::string, JobView>* jobs) {
  const auto [entry, fresh] = jobs->try_emplace(job.name());
  JobView& view = entry->second;
  view.name = job.name();
  view.servers.push_back(server.address);
  view.world_size = std::max(view.world_size, job.world_size());
  view.parameters = std::max(view.parameters, job.parameters());
  view.chunks += job.chunks();
  view.chunks_moving += job.chunks_moving();
  AddCopies(server.address, job, &view);
  if (job.differing_chunks() > 0) {
    view.problems.push_back(absl::StrCat("job '", job.name(), "' has ", job.differing_chunks(),
                                         " chunk(s) whose copy on ", server.address,
                                         " differs from another server's, the first: ", job.differing(0)));
  }
  view.skipped_steps = std::max(view.skipped_steps, job.skipped_steps());
  view.member_ids.insert(job.member_ids().begin(), job.member_ids().end());
  view.pinned_versions.insert(job.pinned_versions().begin(), job.pinned_versions().end());
  view.durable_versions.insert(job.durable_versions().begin(), job.durable_versions().end());
  view.committed_min = fresh ? job.committed() : std::min(view.committed_min, job.committed());
  view.committed_max = fresh ? job.committed() : std::max(view.committed_max, job.committed());
  view.oldest_chunk_version =
      fresh ? job.oldest_chunk_version() : std::min(view.oldest_chunk_version, job.oldest_chunk_version());
  if (view.durability.empty() || view.durability == "-") view.durability = ShowDurability(job, "-");
  if (std::optional<Bound> bound = BoundOf(job);
      bound.has_value() && (!view.bound.has_value() || bound->waiting < view.bound->waiting)) {
    view.bound = *std::move(bound);
    view.bound_at = server.address;
  }
  view.state_lost = view.state_lost || job.state_lost();
  for (std::string& wait : ShowWaits(job)) {
    if (std::find(view.waits.begin(), view.waits.end(), wait) == view.waits.end())
      view.waits.push_back(std::move(wait));
  }
  if (job.state_lost()) {
    view.problems.push_back(LossOf(server.address, job));
  } else if (!job.failure().empty()) {
    view.problems.push_back(absl::StrCat("job '", job.name(), "' failed on ", server.address, ": ", job.failure()));
  }
  if (job.scrub().damaged() > 0) {
    view.problems.push_back(absl::StrCat("on the disk of ", server.address, " ", job.scrub().damaged(),
                                         " states of job '", job.name(),
                                         "' are damaged, the first: ", job.scrub().damage(0)));
  }
}

// Of each job the status with the newest epoch.
std::map<std::string, const v1::JobStatus*> Newest(const std::vector<ServerView>& servers) {
  std::map<std::string, const v1::JobStatus*> newest;
  for (const ServerView& server : servers) {
    for (const v1::JobStatus& job : server.status.jobs()) {
      const v1::JobStatus*& known = newest.try_emplace(job.name(), &job).first->second;
      if (model::Compare(job.epoch(), known->epoch()) > 0) known = &job;
    }
  }
  return newest;
}

// A group that lost the server went on without it; then the server came back.
bool WasLeftOut(const ServerView& server, const v1::JobStatus& job, const v1::JobStatus* newest) {
  const auto has = [](const v1::JobStatus& status, const std::string& id) {
    return std::find(status.member_ids().begin(), status.member_ids().end(), id) != status.member_ids().end();
  };
  const std::string& id = server.status.server_id();
  // Of one life: two jobs of a name have nothing to do with each other.
  return newest != &job && job.life() != 0 && job.life() == newest->life() &&
         model::Compare(job.epoch(), newest->epoch()) < 0 && has(job, id) && !has(*newest, id);
}

void AddShort(JobView* job) {
  if (job->short_chunks == 0) return;
  job->problems.push_back(absl::StrCat("job '", job->name, "' has ", job->short_chunks, " chunk(s) with fewer than ",
                                       job->replicas, " copies"));
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
    const absl::string_view way_out = job->replicas > 1 ? "its group copies anew what the server had, once it trains"
                                                        : "drop it everywhere with `ballastctl drop` and start again";
    job->problems.push_back(absl::StrCat("job '", job->name, "' is gone from its server '", server.status.server_id(),
                                         "' (", server.address, "): ", way_out));
  }
  if (missing.empty() || !all_answered) return;
  job->problems.push_back(absl::StrCat("job '", job->name, "' also lives on server(s) '",
                                       absl::StrJoin(missing, "', '"),
                                       "', none of which was asked; name all of them in --servers"));
}

// How long a server that is one step behind may go on as it is. A Commit that is lost is sent again within seconds.
constexpr double kBehindSecondsMax = 10;

// Seconds since anything happened to the job's step in flight on the server, as far as the server knows.
double QuietSeconds(const v1::GetServerStatusResponse& server, const v1::JobStatus& job) {
  const v1::StepInFlight& step = job.in_flight();
  double quiet = server.uptime_seconds();
  if (step.has_seconds_since_first_slice()) quiet = std::min(quiet, step.seconds_since_first_slice());
  if (step.has_seconds_since_first_seal()) quiet = std::min(quiet, step.seconds_since_first_seal());
  if (step.has_seconds_since_complete()) quiet = std::min(quiet, step.seconds_since_complete());
  if (step.has_seconds_since_prepared()) quiet = std::min(quiet, step.seconds_since_prepared());
  return quiet;
}

// One step apart is what training looks like from outside. It is a problem once it stays: nobody sends the Commit.
void AddBehind(const std::vector<ServerView>& servers, JobView* job) {
  if (job->committed_max - job->committed_min != 1 || job->state_lost) return;
  for (const ServerView& server : servers) {
    for (const v1::JobStatus& held : server.status.jobs()) {
      const double quiet = QuietSeconds(server.status, held);
      if (held.name() != job->name || held.committed() != job->committed_min || quiet <= kBehindSecondsMax) continue;
      job->problems.push_back(absl::StrFormat(
          "job '%s' is at version %d on %s, which has had no Commit for %.0f s, and at %d on another server: start the "
          "job's trainers, which send it",
          job->name, job->committed_min, server.address, quiet, job->committed_max));
    }
  }
}

void AddDuplicates(ClusterView* cluster) {
  std::map<std::string, std::string> addresses;
  for (const ServerView& server : cluster->servers) {
    if (!server.error.ok() || server.status.server_id().empty()) continue;
    const auto [first, fresh] = addresses.try_emplace(server.status.server_id(), server.address);
    if (fresh) continue;
    cluster->problems.push_back(absl::StrCat(
        "servers ", first->second, " and ", server.address, " both say that they are '", server.status.server_id(),
        "': you named one server twice, or two servers use one id; then stop one"));
  }
}

}  // namespace

std::string ShowCopies(const JobView& job) {
  std::vector<std::string> parts;
  if (job.unfilled_chunks > 0) {
    parts.push_back(absl::StrCat(job.filled_chunks, " of ", job.filled_chunks + job.unfilled_chunks, " chunks copied, ",
                                 ShowBytes(job.unfilled_bytes), " left"));
  }
  if (job.short_chunks > 0) {
    parts.push_back(
        absl::StrCat(job.short_chunks, job.short_chunks == 1 ? " chunk has " : " chunks have ",
                     job.replicas == 2 ? "one copy" : absl::StrCat("fewer than ", job.replicas, " copies")));
  }
  return absl::StrJoin(parts, "; ");
}

ClusterView Judge(std::vector<ServerView> servers, Asked asked) {
  ClusterView cluster;
  std::map<std::string, JobView> jobs;
  std::map<std::string, std::vector<std::string>> left;  // by job: what servers keep that it went on without
  const std::map<std::string, const v1::JobStatus*> newest = Newest(servers);
  for (const ServerView& server : servers) {
    if (!server.error.ok()) {
      cluster.problems.push_back(absl::StrCat("server ", server.address, " does not answer: ", server.error.message()));
      continue;
    }
    if (server.status.state() == "recovering") {
      cluster.problems.push_back(absl::StrCat("server ", server.address,
                                              " recovers its jobs: ", ShowBytes(server.status.recovery_done_bytes()),
                                              " of ", ShowBytes(server.status.recovery_total_bytes())));
    }
    for (const v1::JobStatus& job : server.status.jobs()) {
      if (WasLeftOut(server, job, newest.at(job.name()))) {
        left.try_emplace(job.name());
        left[job.name()].push_back(absl::StrCat(
            "server ", server.address, " keeps a part of job '", job.name(), "' at version ", job.committed(),
            ", and the job went on without this server: free it with `ballastctl drop --job ", job.name(),
            " --servers ", server.address, "`"));
        continue;
      }
      AddJob(server, job, &jobs);
      for (const v1::Peer& peer : job.peers()) {
        std::string& page = cluster.peers[peer.server_id()];
        if (page.empty()) page = peer.page();
      }
    }
  }
  for (const ServerView& server : servers) cluster.peers.erase(server.status.server_id());
  for (auto& [name, job] : jobs) {
    if (asked == Asked::kAll) AddMissing(servers, &job);
    if (job.committed_max - job.committed_min > 1 && !job.state_lost) {
      job.problems.push_back(absl::StrCat("job '", name, "' is at versions ", job.committed_min, " to ",
                                          job.committed_max, " on its servers, expected at most one apart"));
    }
    AddBehind(servers, &job);
    AddShort(&job);
    job.problems.insert(job.problems.end(), left[name].begin(), left[name].end());
    cluster.problems.insert(cluster.problems.end(), job.problems.begin(), job.problems.end());
    cluster.jobs.push_back(job);
  }
  cluster.servers = std::move(servers);
  AddDuplicates(&cluster);
  return cluster;
}

namespace {

// Sentences about each job. Empty if there are none.
std::string ShowSentences(const char* title, const std::vector<JobView>& jobs,
                          const std::vector<std::string> JobView::*sentences) {
  std::string out;
  for (const JobView& job : jobs) {
    for (const std::string& sentence : job.*sentences) {
      absl::StrAppend(&out, "  ", Printable(job.name), ": ", Printable(sentence), "\n");
    }
  }
  return out.empty() ? out : absl::StrCat("\n", title, "\n", out);
}

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
    const auto printable = [](std::string* to, const std::string& problem) { *to += Printable(problem); };
    absl::StrAppend(&out, "DEGRADED: ", absl::StrJoin(cluster.problems, "\n          ", printable), "\n");
  }
  Table servers({"SERVER", "ID", "UP", "VERSION", "IO"});
  Table tiers({"SERVER", "TIER", "USED", "CAPACITY", "STATE", "WORKING"});
  Table devices({"SERVER", "DIRECTORY", "USED", "CAPACITY"});
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
      for (const v1::NvmeDeviceStatus& device : tier.devices()) {
        devices.Add({server.address, Printable(device.directory()), ShowBytes(device.used_bytes()),
                     ShowBytes(device.capacity_bytes())});
      }
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
                      ShowSentences("Waiting", cluster.jobs, &JobView::waits),
                      ShowSentences("Filling", cluster.jobs, &JobView::fills), "\nTiers\n", tiers.Show(),
                      devices.empty() ? "" : absl::StrCat("\nDisks of the nvme tier\n", devices.Show()),
                      ShowPlans(cluster));
}

std::string ShowMessage(const google::protobuf::Message& message) {
  google::protobuf::util::JsonPrintOptions options;
  options.preserve_proto_field_names = true;
  options.always_print_primitive_fields = true;
  std::string json;
  // Cannot fail on a message without Any fields.
  (void)google::protobuf::util::MessageToJsonString(message, &json, options);
  return json;
}

namespace {

// As a JSON object, or null.
std::string BoundJson(const JobView& job) {
  if (!job.bound.has_value()) return "null";
  return absl::StrFormat("{\"stage\":%s,\"words\":%s,\"share\":%.4f,\"server\":%s}", Quote(job.bound->stage),
                         Quote(WordsOf(job.bound->stage)), job.bound->share, Quote(job.bound_at));
}

}  // namespace

std::string ShowJson(const ClusterView& cluster) {
  std::vector<std::string> servers;
  for (const ServerView& server : cluster.servers) {
    const std::string status = server.error.ok() ? ShowMessage(server.status) : "null";
    servers.push_back(
        absl::StrCat("{\"address\":", Quote(server.address), ",\"reachable\":", server.error.ok() ? "true" : "false",
                     ",\"error\":", Quote(std::string(server.error.message())), ",\"status\":", status, "}"));
  }
  std::vector<std::string> jobs;
  for (const JobView& job : cluster.jobs) {
    jobs.push_back(absl::StrFormat(
        "{\"name\":%s,\"durability\":%s,\"committed_min\":%d,\"committed_max\":%d,\"oldest_chunk_version\":%d,"
        "\"skipped_steps\":%d,\"world_size\":%d,\"parameters\":%d,\"chunks\":%d,\"servers\":%s,"
        "\"pinned_versions\":[%s],\"durable_versions\":[%s],\"chunks_moving\":%d,\"unfilled_chunks\":%d,"
        "\"filled_chunks\":%d,\"short_chunks\":%d,\"copies\":%s,\"waits\":%s,\"bound_by\":%s}",
        Quote(job.name), Quote(job.durability), job.committed_min, job.committed_max, job.oldest_chunk_version,
        job.skipped_steps, job.world_size, job.parameters, job.chunks, QuoteAll(job.servers),
        absl::StrJoin(job.pinned_versions, ","), absl::StrJoin(job.durable_versions, ","), job.chunks_moving,
        job.unfilled_chunks, job.filled_chunks, job.short_chunks, Quote(ShowCopies(job)), QuoteAll(job.waits),
        BoundJson(job)));
  }
  std::vector<std::string> peers;
  for (const auto& [id, page] : cluster.peers) {
    peers.push_back(absl::StrCat("{\"server_id\":", Quote(id), ",\"page\":", Quote(page), "}"));
  }
  return absl::StrCat("{\"verdict\":", cluster.problems.empty() ? "\"healthy\"" : "\"degraded\"",
                      ",\"problems\":", QuoteAll(cluster.problems), ",\"servers\":[", absl::StrJoin(servers, ","),
                      "],\"jobs\":[", absl::StrJoin(jobs, ","), "],\"peers\":[", absl::StrJoin(peers, ","), "]}\n");
}

}  // namespace ballast::services
