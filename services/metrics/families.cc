#include "ballast/services/metrics/families.h"

#include <prometheus/text_serializer.h>

#include <algorithm>
#include <limits>
#include <string>
#include <utility>

#include "ballast/services/counters/counters.h"

namespace ballast::services {
namespace {

using prometheus::ClientMetric;
using prometheus::MetricFamily;
using prometheus::MetricType;
using Labels = std::vector<ClientMetric::Label>;

class FamilyBuilder {
 public:
  FamilyBuilder(std::string name, std::string help, MetricType type)
      : family_{std::move(name), std::move(help), type, {}} {}

  FamilyBuilder& Add(Labels labels, double value) {
    ClientMetric metric;
    metric.label = std::move(labels);
    (family_.type == MetricType::Counter ? metric.counter.value : metric.gauge.value) = value;
    family_.metric.push_back(std::move(metric));
    return *this;
  }

  FamilyBuilder& Add(Labels labels, const DurationHistogram& histogram) {
    ClientMetric metric;
    metric.label = std::move(labels);
    uint64_t cumulative = 0;
    for (size_t i = 0; i <= DurationHistogram::kBoundsSeconds.size(); ++i) {
      cumulative += histogram.count(i);
      const bool last = i == DurationHistogram::kBoundsSeconds.size();
      metric.histogram.bucket.push_back(
          {cumulative, last ? std::numeric_limits<double>::infinity() : DurationHistogram::kBoundsSeconds[i]});
    }
    metric.histogram.sample_count = cumulative;
    metric.histogram.sample_sum = histogram.sum_seconds();
    family_.metric.push_back(std::move(metric));
    return *this;
  }

  MetricFamily Take() { return std::move(family_); }

 private:
  MetricFamily family_;
};

void AddTiers(const StateServer& state, const v1::GetServerStatusResponse& status, std::vector<MetricFamily>* out) {
  FamilyBuilder capacity("ballast_tier_capacity_bytes", "Budget of the tier.", MetricType::Gauge);
  FamilyBuilder used("ballast_tier_used_bytes", "Bytes taken of the tier's budget, slices in flight included.",
                     MetricType::Gauge);
  FamilyBuilder chunk_state("ballast_tier_state_bytes", "Chunk state (master weights and moments) in the tier.",
                            MetricType::Gauge);
  FamilyBuilder working("ballast_tier_working_bytes", "16-bit working copies in the tier.", MetricType::Gauge);
  for (const v1::TierStatus& tier : status.tiers()) {
    const Labels labels = {{"tier", tier.tier()}};
    capacity.Add(labels, static_cast<double>(tier.capacity_bytes()));
    used.Add(labels, static_cast<double>(tier.used_bytes()));
    chunk_state.Add(labels, static_cast<double>(tier.state_bytes()));
    working.Add(labels, static_cast<double>(tier.working_bytes()));
  }
  FamilyBuilder read("ballast_tier_read_bytes_total", "Bytes read from the tier.", MetricType::Counter);
  FamilyBuilder written("ballast_tier_written_bytes_total", "Bytes written to the tier.", MetricType::Counter);
  const storage::TierTraffic traffic = state.traffic();
  for (int i = 0; i < storage::kTierKinds; ++i) {
    const auto kind = static_cast<storage::TierKind>(i);
    const Labels labels = {{"tier", storage::TierName(kind)}};
    read.Add(labels, static_cast<double>(traffic.read[kind]));
    written.Add(labels, static_cast<double>(traffic.written[kind]));
  }
  for (FamilyBuilder* family : {&capacity, &used, &chunk_state, &working, &read, &written})
    out->push_back(family->Take());
}

void AddJobs(const v1::GetServerStatusResponse& status, std::vector<MetricFamily>* out) {
  FamilyBuilder committed("ballast_job_committed_version", "N of the last decided step; -1 before job creation.",
                          MetricType::Gauge);
  FamilyBuilder oldest("ballast_job_oldest_chunk_version", "Oldest version among this server's chunks.",
                       MetricType::Gauge);
  FamilyBuilder skipped("ballast_job_skipped_steps_total", "Steps skipped because a gradient was not finite.",
                        MetricType::Counter);
  FamilyBuilder failed("ballast_job_failed", "1 if the job takes no steps on this server: failed, or state lost.",
                       MetricType::Gauge);
  FamilyBuilder moving("ballast_job_moving_chunks", "Chunks that are not yet where new budgets want them.",
                       MetricType::Gauge);
  FamilyBuilder moved("ballast_job_moved_chunks_total", "Chunks that moved between tiers because budgets changed.",
                      MetricType::Counter);
  for (const v1::JobStatus& job : status.jobs()) {
    const Labels labels = {{"training_job", job.name()}};
    moving.Add(labels, static_cast<double>(job.chunks_moving()));
    moved.Add(labels, static_cast<double>(job.chunks_moved()));
    committed.Add(labels, static_cast<double>(job.committed()));
    oldest.Add(labels, static_cast<double>(job.oldest_chunk_version()));
    skipped.Add(labels, static_cast<double>(job.skipped_steps()));
    failed.Add(labels, job.state_lost() || !job.failure().empty() ? 1 : 0);
  }
  FamilyBuilder predicted("ballast_job_predicted_step_seconds",
                          "What the plan expects of a step: in total, and of each resource; none without a machine "
                          "profile.",
                          MetricType::Gauge);
  for (const v1::JobStatus& job : status.jobs()) {
    if (!job.has_prediction()) continue;
    const v1::StepPrediction& p = job.prediction();
    const std::pair<const char*, double> parts[] = {{"total", p.total_seconds()},
                                                    {"compute", p.compute_seconds()},
                                                    {"disk", p.disk_seconds()},
                                                    {"sync", p.sync_seconds()},
                                                    {"gpu_link", p.gpu_link_seconds()}};
    for (const auto& [resource, seconds] : parts) {
      predicted.Add({{"training_job", job.name()}, {"resource", resource}}, seconds);
    }
  }
  for (FamilyBuilder* family : {&committed, &oldest, &skipped, &failed, &moving, &moved, &predicted})
    out->push_back(family->Take());
}

void AddCalls(const ServerCounters& counters, std::vector<MetricFamily>* out) {
  FamilyBuilder seconds("ballast_rpc_duration_seconds", "From a request's arrival to its answer, waiting included.",
                        MetricType::Histogram);
  for (size_t i = 0; i < kCalls; ++i) seconds.Add({{"method", kCallNames[i]}}, counters.calls[i]);
  FamilyBuilder errors("ballast_rpc_errors_total", "Requests answered with an error, by reason.", MetricType::Counter);
  for (const auto& [key, count] : counters.errors.Get()) {
    errors.Add({{"method", kCallNames[static_cast<size_t>(key.first)]}, {"reason", key.second}},
               static_cast<double>(count));
  }
  out->push_back(seconds.Take());
  out->push_back(errors.Take());
  out->push_back(FamilyBuilder("ballast_received_bytes_total", "Payload bytes of slices pushed to this server.",
                               MetricType::Counter)
                     .Add({}, static_cast<double>(counters.received_bytes.load()))
                     .Take());
  out->push_back(
      FamilyBuilder("ballast_sent_bytes_total", "Payload bytes of ranges pulled from this server.", MetricType::Counter)
          .Add({}, static_cast<double>(counters.sent_bytes.load()))
          .Take());
  out->push_back(FamilyBuilder("ballast_waiting_requests", "Requests that wait for a version, a slice or a sync.",
                               MetricType::Gauge)
                     .Add({}, static_cast<double>(counters.waiting_requests.load()))
                     .Take());
}

void AddStages(const ServerCounters& counters, std::vector<MetricFamily>* out) {
  out->push_back(
      FamilyBuilder("ballast_step_duration_seconds", "From one decision of a job to the next.", MetricType::Histogram)
          .Add({}, counters.step)
          .Take());
  out->push_back(
      FamilyBuilder("ballast_stage_duration_seconds",
                    "Stages of a step on this server: update (decided step to stored chunks), seal_wait (a rank's seal "
                    "to its prepared answer).",
                    MetricType::Histogram)
          .Add({{"stage", "update"}}, counters.update)
          .Add({{"stage", "seal_wait"}}, counters.seal_wait)
          .Take());
}

void AddState(ServerState state, const RecoveryProgress& progress, std::vector<MetricFamily>* out) {
  FamilyBuilder states("ballast_server_state", "1 for the state that the server is in.", MetricType::Gauge);
  for (const ServerState known : kServerStates) states.Add({{"state", ServerStateName(known)}}, known == state ? 1 : 0);
  out->push_back(states.Take());
  out->push_back(FamilyBuilder("ballast_recovery_bytes",
                               "Recovery of the last run's jobs: states read and slices replayed, and how many there "
                               "are to do.",
                               MetricType::Gauge)
                     .Add({{"kind", "done"}}, static_cast<double>(progress.done_bytes.load()))
                     .Add({{"kind", "total"}}, static_cast<double>(progress.total_bytes.load()))
                     .Take());
}

void AddServer(const StateServer& state, std::vector<MetricFamily>* out) {
  const v1::GetServerStatusResponse status = state.Status();
  out->push_back(FamilyBuilder("ballast_server_info", "Always 1; labels say who answers.", MetricType::Gauge)
                     .Add({{"server_id", status.server_id()}, {"version", status.version()}}, 1)
                     .Take());
  out->push_back(FamilyBuilder("ballast_uptime_seconds", "Seconds since the server started.", MetricType::Gauge)
                     .Add({}, status.uptime_seconds())
                     .Take());
  AddTiers(state, status, out);
  AddJobs(status, out);
  AddCalls(state.counters(), out);
  AddStages(state.counters(), out);
}

}  // namespace

std::vector<MetricFamily> CollectFamilies(const StateServer* server, ServerState state,
                                          const RecoveryProgress& progress) {
  std::vector<MetricFamily> out;
  AddState(state, progress, &out);
  if (server != nullptr) AddServer(*server, &out);
  // A family without metrics would be a HELP line about nothing.
  out.erase(std::remove_if(out.begin(), out.end(), [](const MetricFamily& family) { return family.metric.empty(); }),
            out.end());
  return out;
}

std::string ShowMetrics(const StateServer* server, ServerState state, const RecoveryProgress& progress) {
  return prometheus::TextSerializer().Serialize(CollectFamilies(server, state, progress));
}

}  // namespace ballast::services
