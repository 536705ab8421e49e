#include "ballast/services/space/prediction.h"

#include "ballast/services/job_state/job_core.h"
#include "ballast/services/journal/log_steps.h"
#include "ballast/storage/store/versioned_extents.h"

namespace ballast::services {

static_assert(kLogStepsFirst == storage::VersionedExtents::kRunsMax + 2);

v1::StepPrediction PredictionMessage(const storage::StepPrediction& prediction) {
  v1::StepPrediction message;
  message.set_total_seconds(prediction.total);
  message.set_compute_seconds(prediction.compute);
  message.set_disk_seconds(prediction.disk);
  message.set_disk_read_seconds(prediction.disk_read);
  message.set_disk_write_seconds(prediction.disk_write);
  message.set_log_write_seconds(prediction.log_write);
  message.set_disk_idle_seconds(prediction.disk_idle);
  message.set_sync_seconds(prediction.sync);
  message.set_gpu_link_seconds(prediction.gpu_link);
  message.set_pull_seconds(prediction.pulls);
  message.set_binds(prediction.binds());
  message.set_bound_seconds(prediction.bound());
  for (const std::string& what : prediction.unmeasured) message.add_unmeasured(what);
  return message;
}

storage::StepShape Prediction::of_job() const {
  uint64_t elements = 0, read_back = 0;
  for (const auto& chunk : core_->state.chunks()) {
    if (chunk->is_frozen()) continue;
    elements += chunk->elements;
    if (chunk->intake.Logs(v1::SLICE_KIND_GRADIENT)) read_back += chunk->elements;
  }
  const uint64_t interval = core_->state.plan() == nullptr ? 0 : core_->state.plan()->open().spec().pin_interval();
  return {.machine = core_->around.machine,
          .threads = core_->around.compute->threads(),
          .logged = interval == 0,
          .flushed_share = interval == 0 ? FlushedShare(FirstLogSteps(core_->around.log_steps))
                                         : 1.0 / static_cast<double>(interval),
          .read_back_share = elements == 0 ? 0 : static_cast<double>(read_back) / static_cast<double>(elements)};
}

storage::StepShape Prediction::ShapeOf(const storage::ChunkStore& store) const {
  storage::StepShape shape;
  {
    JobMutexLock lock(&core_->mu);
    shape = of_job();
  }
  shape.staging_bytes = store.slot_memory_bytes();
  shape.durable = store.durable();
  return shape;
}

}  // namespace ballast::services
