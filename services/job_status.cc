// What operators see of a job.
#include <algorithm>
#include <memory>

#include "ballast/services/job_parts.h"

namespace ballast::services {

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
    status.set_skipped_steps(machine_->skipped_steps());
    if (!failure_.ok()) status.set_failure(std::string(failure_.message()));
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
