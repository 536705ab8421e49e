// A job's status, for operators.
#include <algorithm>
#include <memory>
#include <optional>
#include <vector>

#include "absl/time/clock.h"
#include "ballast/proto/model/table.h"
#include "ballast/services/job/job.h"
#include "ballast/services/job/job_parts.h"

namespace ballast::services {
namespace {

constexpr size_t kRanksNamed = 8;  // a person reads no more, and a job may have 4096

}  // namespace

v1::StepInFlight Job::DescribeStepInFlight() const {
  const absl::Time now = absl::Now();
  v1::StepInFlight out;
  out.set_step(parts_->core.machine->committed() + 1);
  if (const std::optional<SeenStep> newest = parts_->core.counters.steps.newest();
      newest.has_value() && newest->updated == absl::InfinitePast() && parts_->updates.queued() > 0) {
    out.set_seconds_of_update(absl::ToDoubleSeconds(now - newest->decided));
  }
  const std::optional<SeenStep> step = parts_->core.counters.steps.in_flight();
  if (!step.has_value() || step->step != out.step()) return out;
  const auto since = [now](absl::Time time, auto set) {
    if (time != absl::InfinitePast()) set(absl::ToDoubleSeconds(now - time));
  };
  since(step->first_push, [&](double s) { out.set_seconds_since_first_slice(s); });
  since(step->first_seal, [&](double s) { out.set_seconds_since_first_seal(s); });
  since(step->appended, [&](double s) { out.set_seconds_since_complete(s); });
  since(step->prepared, [&](double s) { out.set_seconds_since_prepared(s); });
  out.set_unsealed_count(parts_->core.machine->unsealed_count());
  for (const uint32_t rank : parts_->core.machine->UnsealedRanks(kRanksNamed)) out.add_unsealed_ranks(rank);
  return out;
}

std::vector<v1::TierStatus> DescribeTaken(const storage::PartBytes& taken) {
  std::vector<v1::TierStatus> tiers(storage::kTierKinds);
  for (int i = 0; i < storage::kTierKinds; ++i) {
    const auto kind = static_cast<storage::TierKind>(i);
    v1::TierStatus& tier = tiers[static_cast<size_t>(i)];
    tier.set_tier(storage::TierName(kind));
    for (size_t part = 0; part < storage::kTierParts; ++part) {
      const uint64_t bytes = taken[part][kind];
      if (bytes == 0) continue;
      tier.set_used_bytes(tier.used_bytes() + bytes);
      v1::TierPart* const out = tier.add_parts();
      out->set_part(storage::kTierPartNames[part]);
      out->set_bytes(bytes);
    }
  }
  return tiers;
}

v1::JobStatus Job::Status() const {
  std::shared_ptr<storage::ChunkStore> store;
  v1::JobStatus status;
  {
    JobMutexLock lock(&parts_->core.mu);
    // Nothing of a job's size is copied here: scrapes and fences with a quota ask all jobs.
    const StepMachine& machine = *parts_->core.machine;
    const v1::OpenRequest& open =
        machine.plan() != nullptr ? machine.plan()->open() : v1::OpenRequest::default_instance();
    status.set_name(parts_->core.name);
    status.set_committed(machine.committed());
    status.set_oldest_chunk_version(machine.committed());
    for (const auto& chunk : parts_->core.state.chunks()) {
      status.set_oldest_chunk_version(
          std::min(status.oldest_chunk_version(), chunk->version().value_or(machine.committed())));
    }
    *status.mutable_epoch() = machine.promised();
    status.set_world_size(open.tiling().world_size());
    if (parts_->core.state.plan() != nullptr) status.set_parameters(parts_->core.state.plan()->layout().parameters());
    status.set_chunks(parts_->core.state.chunks().size());
    for (const v1::Member& member : model::MembersOf(open)) status.add_member_ids(member.server_id());
    if (machine.plan() != nullptr) {
      *status.mutable_in_flight() = DescribeStepInFlight();
      status.set_replicas(open.table().replicas());
      status.set_life(open.table().life());
      status.set_short_chunks(machine.plan()->short_chunks(parts_->core.around.server_id));
    }
    parts_->peers.Tell(parts_->core.around.server_id, &status);
    for (const int64_t version : parts_->read_pins.Versions()) status.add_pinned_versions(version);
    for (const auto& [version, pin] : machine.pins()) {
      status.add_durable_versions(version);
      if (pin.automatic()) status.add_automatic_versions(version);
    }
    status.set_durability(open.spec().durability());
    status.set_pin_interval(open.spec().pin_interval());
    if (machine.state_lost()) {
      // The newest pin is what is left of the state.
      const int64_t newest = machine.pins().empty() ? -1 : machine.pins().rbegin()->first;
      status.set_state_lost(true);
      status.set_committed(newest);
      status.set_oldest_chunk_version(newest);
    }
    status.set_skipped_steps(machine.skipped_steps());
    if (!parts_->core.failure().ok()) status.set_failure(std::string(parts_->core.failure().message()));
    const JobJournal::Use log = parts_->journal.use();
    status.set_log_capacity_bytes(log.capacity_bytes);
    status.set_log_used_bytes(log.used_bytes);
    status.set_log_waited_seconds(absl::ToDoubleSeconds(log.waited));
    status.set_queued_steps(static_cast<uint32_t>(parts_->updates.queued()));
    if (const auto stages = parts_->core.counters.steps.last_stages(); stages.has_value()) {
      for (size_t i = 0; i < kStages; ++i) {
        v1::StageTime* const stage = status.add_last_stages();
        stage->set_stage(kStageNames[i]);
        stage->set_seconds(absl::ToDoubleSeconds((*stages)[i]));
      }
    }
    if (parts_->scrub.begun()) *status.mutable_scrub() = parts_->scrub.Describe();
    parts_->filling.Describe(&status);
    parts_->copies.Describe(&status);
    status.set_chunks_moving(parts_->moves.left());
    status.set_chunks_moved(parts_->moves.moved());
    if (parts_->prediction.newest().has_value())
      *status.mutable_prediction() = PredictionMessage(*parts_->prediction.newest());
    store = parts_->core.state.store();
  }
  const auto residency = store != nullptr ? store->residency() : storage::ChunkStore::Residency{};
  int kind = 0;
  for (v1::TierStatus& tier : DescribeTaken(parts_->core.around.tiers->taken(account()))) {
    tier.set_state_bytes(residency.state[static_cast<storage::TierKind>(kind)]);
    tier.set_working_bytes(residency.working[static_cast<storage::TierKind>(kind++)]);
    *status.add_tiers() = std::move(tier);
  }
  return status;
}

}  // namespace ballast::services
