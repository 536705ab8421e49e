// A job's status, for operators.
#include <algorithm>
#include <memory>

#include "ballast/services/job_parts.h"

namespace ballast::services {

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
  for (const std::string& what : prediction.unmeasured) message.add_unmeasured(what);
  return message;
}

v1::JobStatus Job::Status() const {
  std::shared_ptr<storage::ChunkStore> store;
  v1::JobStatus status;
  {
    absl::MutexLock lock(&mu_);
    const v1::GetJobResponse job = Describe();
    status.set_name(name_);
    status.set_committed(job.committed());
    status.set_oldest_chunk_version(job.committed());
    for (const auto& chunk : chunks_) {
      status.set_oldest_chunk_version(
          std::min(status.oldest_chunk_version(), chunk->version.value_or(job.committed())));
    }
    *status.mutable_epoch() = job.promised();
    status.set_world_size(job.open().tiling().world_size());
    if (plan_ != nullptr) status.set_parameters(plan_->layout().parameters());
    status.set_chunks(chunks_.size());
    for (const v1::Member& member : job.open().members()) status.add_member_ids(member.server_id());
    for (const auto& [version, pin] : pins_) {
      if (pin.ready && pin.status.ok()) status.add_pinned_versions(version);
    }
    for (const int64_t version : job.durable_versions()) status.add_durable_versions(version);
    status.set_durability(job.open().spec().durability());
    status.set_pin_interval(job.open().spec().pin_interval());
    *status.mutable_automatic_versions() = job.automatic_versions();
    if (job.state_lost()) {
      // The newest pin is what is left of the state.
      const int64_t newest = job.durable_versions().empty() ? -1 : *job.durable_versions().rbegin();
      status.set_state_lost(true);
      status.set_committed(newest);
      status.set_oldest_chunk_version(newest);
    }
    status.set_skipped_steps(machine_->skipped_steps());
    if (!failure_.ok()) status.set_failure(std::string(failure_.message()));
    status.set_chunks_moving(moves_ != nullptr ? moves_->left() : 0);
    status.set_chunks_moved(chunks_moved_);
    if (prediction_.has_value()) *status.mutable_prediction() = PredictionMessage(*prediction_);
    store = store_;
  }
  const auto residency = store != nullptr ? store->residency() : storage::ChunkStore::Residency{};
  for (int i = 0; i < storage::kTierKinds; ++i) {
    const auto kind = static_cast<storage::TierKind>(i);
    v1::TierStatus* tier = status.add_tiers();
    tier->set_tier(storage::TierName(kind));
    tier->set_state_bytes(residency.state[kind]);
    tier->set_working_bytes(residency.working[kind]);
    tier->set_used_bytes(tier->state_bytes() + tier->working_bytes());
  }
  return status;
}

}  // namespace ballast::services
