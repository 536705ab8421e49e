#include "ballast/services/server/job_steps.h"

#include <algorithm>

namespace ballast::services {
namespace {

double Since1970(absl::Time time) {
  return time == absl::InfinitePast() ? 0 : absl::ToDoubleSeconds(time - absl::UnixEpoch());
}

void Show(const SeenStep& step, v1::StepTimes* out) {
  out->set_step(step.step);
  out->set_began_seconds(Since1970(step.began));
  out->set_first_push_seconds(Since1970(step.first_push));
  out->set_first_seal_seconds(Since1970(step.first_seal));
  out->set_last_seal_seconds(Since1970(step.last_seal));
  out->set_prepared_seconds(Since1970(step.prepared));
  out->set_decided_seconds(Since1970(step.decided));
  out->set_update_began_seconds(Since1970(step.update_began));
  out->set_updated_seconds(Since1970(step.updated));
  out->set_flushed_seconds(Since1970(step.flushed));
  for (size_t i = 0; i < kStages; ++i) {
    v1::StageTime* const stage = out->add_stages();
    stage->set_stage(kStageNames[i]);
    stage->set_seconds(absl::ToDoubleSeconds(step.stages[i]));
  }
  out->set_ranks(step.ranks);
  out->set_slowest_rank(step.slowest_rank);
  for (size_t i = 0; i < kTrainerSpans; ++i) {
    v1::TrainerTime* const time = out->add_trainers();
    time->set_what(kTrainerSpanNames[i]);
    time->set_sum_seconds(absl::ToDoubleSeconds(step.trainers_sum[i]));
    time->set_max_seconds(absl::ToDoubleSeconds(step.trainers_max[i]));
  }
}

}  // namespace

v1::JobSteps ShowSteps(const std::string& job, const StepLog& log, uint32_t last) {
  v1::JobSteps out;
  out.set_job(job);
  const std::vector<SeenStep> steps = log.Steps();
  const size_t count = last == 0 ? steps.size() : std::min<size_t>(last, steps.size());
  for (size_t i = steps.size() - count; i < steps.size(); ++i) Show(steps[i], out.add_steps());
  return out;
}

}  // namespace ballast::services
