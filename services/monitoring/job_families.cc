#include "ballast/services/monitoring/job_families.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/time/time.h"
#include "ballast/services/monitoring/show.h"

namespace ballast::services {
namespace {

Labels Of(const std::string& job) { return {{"training_job", job}}; }

// For each job that is served: its status and its counters.
template <typename Visit>
void ForEach(const v1::GetServerStatusResponse& status, const ServerFigures& figures, const Visit& visit) {
  for (const v1::JobStatus& job : status.jobs()) {
    const auto found = figures.jobs.find(job.name());
    if (found != figures.jobs.end()) visit(job, *found->second);
  }
}

void AddPredictions(const v1::GetServerStatusResponse& status, Families* out) {
  Gauge predicted(out, "ballast_job_predicted_step_seconds",
                  "Prediction of a step's time: in total, and of each resource; none without a machine profile.");
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
}

void AddPins(const v1::GetServerStatusResponse& status, Families* out) {
  Gauge pins(out, "ballast_job_pins", "Versions pinned here: for reading, or durably on the disk.");
  Gauge newest(out, "ballast_job_newest_durable_pin_version", "Newest version kept on the disk by a pin; -1: none.");
  for (const v1::JobStatus& job : status.jobs()) {
    pins.Add({{"training_job", job.name()}, {"kind", "read"}}, job.pinned_versions_size());
    pins.Add({{"training_job", job.name()}, {"kind", "durable"}}, job.durable_versions_size());
    newest.Add(Of(job.name()), job.durable_versions().empty() ? -1 : *job.durable_versions().rbegin());
  }
}

void AddScrub(const v1::GetServerStatusResponse& status, Families* out) {
  Counter read(out, "ballast_scrub_read_bytes_total", "Bytes of states that the scrub has read from the disk.");
  Gauge pass(out, "ballast_scrub_pass_bytes", "The scrub's pass under way: bytes read, and bytes there are.");
  Gauge last(out, "ballast_scrub_last_pass_timestamp_seconds",
             "End of the scrub's last complete pass, in seconds since 1970; 0: none since the server started.");
  Gauge damaged(out, "ballast_scrub_damaged_states",
                "Damaged states on disk that cannot be repaired; the status names them.");
  Counter mended(out, "ballast_scrub_mended_states_total", "Damaged states that were repaired from memory.");
  for (const v1::JobStatus& job : status.jobs()) {
    const Labels labels = Of(job.name());
    read.Add(labels, job.scrub().read_bytes());
    pass.Add({{"training_job", job.name()}, {"kind", "done"}}, job.scrub().done_bytes());
    pass.Add({{"training_job", job.name()}, {"kind", "total"}}, job.scrub().total_bytes());
    last.Add(labels, job.scrub().last_pass_seconds());
    damaged.Add(labels, job.scrub().damaged());
    mended.Add(labels, job.scrub().mended());
  }
}

}  // namespace

void AddJobs(const v1::GetServerStatusResponse& status, Families* out) {
  {
    Gauge info(out, "ballast_job_info", "Always 1; labels say what the job is.");
    Gauge committed(out, "ballast_job_committed_version", "N of the last decided step; -1 before job creation.");
    Gauge oldest(out, "ballast_job_oldest_chunk_version", "Oldest version among this server's chunks.");
    Gauge failed(out, "ballast_job_failed", "1 if the job takes no steps on this server: failed, or state lost.");
    Gauge lost(out, "ballast_job_state_lost", "1 if this server came back without the job's state.");
    Gauge world(out, "ballast_job_world_size", "Ranks of the open epoch.");
    Gauge parameters(out, "ballast_job_parameters", "Parameters of the job on all servers.");
    Gauge epoch(out, "ballast_job_epoch",
                "Counter of the newest promised epoch: a new group of trainers counts it up.");
    Gauge servers(out, "ballast_job_servers", "Servers of the job, this one included.");
    Gauge chunks(out, "ballast_job_chunks", "Chunks of the job on this server.");
    Gauge copies(out, "ballast_job_copies", "Copies of each chunk that the job wants; 0: its servers never change.");
    Gauge unfilled(out, "ballast_job_unfilled_chunks",
                   "Chunks that this server still copies from the job's other servers.");
    Gauge lacking(out, "ballast_job_short_chunks",
                  "Chunks with fewer copies than the job wants, by the table of the newest Open. Only a chunk's first "
                  "holder counts it, so the job's servers add up. A copy that is being made does not count yet.");
    Gauge differing(out, "ballast_job_differing_chunks",
                    "Chunks whose copies were found to differ when they were last compared, this server's among them. "
                    "Every server that has a copy counts the chunk.");
    Gauge moving(out, "ballast_job_moving_chunks", "Chunks that are not yet where new budgets want them.");
    Counter moved(out, "ballast_job_moved_chunks_total", "Chunks that moved between tiers because budgets changed.");
    Counter skipped(out, "ballast_job_skipped_steps_total", "Steps skipped because a gradient was not finite.");
    for (const v1::JobStatus& job : status.jobs()) {
      const Labels labels = Of(job.name());
      info.Add({{"training_job", job.name()}, {"durability", ShowDurability(job, "unknown")}}, 1);
      committed.Add(labels, job.committed());
      oldest.Add(labels, job.oldest_chunk_version());
      failed.Add(labels, job.state_lost() || !job.failure().empty() ? 1 : 0);
      lost.Add(labels, job.state_lost() ? 1 : 0);
      world.Add(labels, job.world_size());
      parameters.Add(labels, job.parameters());
      epoch.Add(labels, job.epoch().counter());
      servers.Add(labels, job.member_ids_size());
      chunks.Add(labels, job.chunks());
      copies.Add(labels, job.replicas());
      unfilled.Add(labels, job.unfilled_chunks());
      lacking.Add(labels, job.short_chunks());
      differing.Add(labels, job.differing_chunks());
      moving.Add(labels, job.chunks_moving());
      moved.Add(labels, job.chunks_moved());
      skipped.Add(labels, job.skipped_steps());
    }
  }
  AddPins(status, out);
  AddScrub(status, out);
  AddPredictions(status, out);
}

void AddSteps(const v1::GetServerStatusResponse& status, const ServerFigures& figures, Families* out) {
  Histogram seconds(out, "ballast_step_seconds", "From one decision of the job to the next.");
  Counter stages(out, "ballast_step_stage_seconds_total",
                 "Time of the job on this server by stage. The job is in one stage at a time, so stages sum to the "
                 "wall time; idle: the server had nothing to do for the job.");
  Gauge last(out, "ballast_last_step_seconds", "From the decision before the last to the last.");
  Gauge decided(out, "ballast_last_decision_timestamp_seconds", "Last decision, in seconds since 1970.");
  Gauge spread(out, "ballast_seal_spread_seconds", "Last step: from the first rank's seal to the last rank's.");
  Gauge slowest(out, "ballast_slowest_rank", "Last step: the rank that sealed last.");
  Counter trainers(out, "ballast_trainer_seconds_total",
                   "Seconds of trainers' own, as their seals tell: the sum over ranks, and of each step the largest.");
  Gauge queued(out, "ballast_queued_steps", "Decided steps that wait for their update, or are being applied.");
  Gauge queued_limit(out, "ballast_queued_steps_limit", "Bound of ballast_queued_steps; beyond it seals wait.");
  Counter dropped(out, "ballast_dropped_attempts_total", "Attempts at a step that trainers dropped for another.");
  ForEach(status, figures, [&](const v1::JobStatus& job, const JobCounters& counters) {
    const Labels labels = Of(job.name());
    const StepLog& steps = counters.steps;
    seconds.Add(labels, steps.seconds());
    const StageTimes totals = steps.clock().totals();
    for (size_t i = 0; i < kStages; ++i) {
      stages.Add({{"training_job", job.name()}, {"stage", kStageNames[i]}}, absl::ToDoubleSeconds(totals[i]));
    }
    const TrainerTimes sum = steps.trainers_sum(), max = steps.trainers_max();
    for (size_t i = 0; i < kTrainerSpans; ++i) {
      const char* const what = kTrainerSpanNames[i];
      trainers.Add({{"training_job", job.name()}, {"what", what}, {"of", "sum"}}, absl::ToDoubleSeconds(sum[i]));
      trainers.Add({{"training_job", job.name()}, {"what", what}, {"of", "max"}}, absl::ToDoubleSeconds(max[i]));
    }
    queued.Add(labels, job.queued_steps());
    queued_limit.Add(labels, kQueuedStepsMax);
    dropped.Add(labels, steps.dropped_attempts());
    const std::optional<SeenStep> newest = steps.newest();
    if (!newest.has_value()) return;
    decided.Add(labels, absl::ToDoubleSeconds(newest->decided - absl::UnixEpoch()));
    last.Add(labels, absl::ToDoubleSeconds(newest->decided - newest->began));
    if (newest->ranks == 0) return;
    spread.Add(labels, absl::ToDoubleSeconds(newest->last_seal - newest->first_seal));
    slowest.Add(labels, newest->slowest_rank);
  });
}

void AddTraffic(const v1::GetServerStatusResponse& status, const ServerFigures& figures, Families* out) {
  Counter received(out, "ballast_received_bytes_total", "Payload bytes of slices pushed to this server.");
  Counter in_place(out, "ballast_received_in_place_bytes_total",
                   "Of ballast_received_bytes_total: read in a trainer's memory, and not copied.");
  Counter sent(out, "ballast_sent_bytes_total", "Payload bytes of ranges pulled from this server.");
  Counter imported(out, "ballast_job_imported_bytes_total",
                   "Bytes of whole chunks that this server has copied from the job's other servers.");
  Counter differ(out, "ballast_job_replicas_differ_total",
                 "Comparisons of a chunk's copies in which this server's copy and another's were not the same.");
  Counter exported(out, "ballast_job_exported_bytes_total",
                   "Bytes of whole chunks that this server has sent to the job's other servers.");
  Counter damaged(
      out, "ballast_job_damaged_chunks_total",
      "Chunks of which a state on this server, the newest or a kept version's, was damaged, so that it copies it from "
      "the job's other servers.");
  Counter duplicates(out, "ballast_duplicate_pushes_total", "Slices that came again and were acknowledged again.");
  Counter fences(out, "ballast_fences_total", "Fences that were promised: new groups of trainers, and their retries.");
  Counter flushed(out, "ballast_flushed_chunks_total",
                  "Chunks in memory that were written to the disk, so that the log can be cut.");
  Gauge capacity(out, "ballast_log_capacity_bytes", "Size of the job's gradient log, or of its spill.");
  Gauge used(out, "ballast_log_used_bytes", "Segments of the log that hold something that is still needed.");
  Counter waited(out, "ballast_log_wait_seconds_total", "Time in which pushes waited for the log to be cut.");
  ForEach(status, figures, [&](const v1::JobStatus& job, const JobCounters& counters) {
    const Labels labels = Of(job.name());
    received.Add(labels, counters.received_bytes.load());
    in_place.Add(labels, counters.received_in_place_bytes.load());
    sent.Add(labels, counters.sent_bytes.load());
    imported.Add(labels, counters.imported_bytes.load());
    differ.Add(labels, counters.differing_copies.load());
    exported.Add(labels, counters.exported_bytes.load());
    damaged.Add(labels, counters.damaged_chunks.load());
    duplicates.Add(labels, counters.duplicate_pushes.load());
    fences.Add(labels, counters.fences.load());
    flushed.Add(labels, counters.flushed_chunks.load());
    if (job.log_capacity_bytes() == 0) return;
    capacity.Add(labels, job.log_capacity_bytes());
    used.Add(labels, job.log_used_bytes());
    waited.Add(labels, job.log_waited_seconds());
  });
}

}  // namespace ballast::services
