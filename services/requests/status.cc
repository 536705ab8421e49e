// A job's status, for operators.
#include <algorithm>
#include <memory>
#include <optional>
#include <vector>

#include "absl/time/clock.h"
#include "ballast/services/requests/job.h"

namespace ballast::services {
namespace {

constexpr size_t kRanksNamed = 8;  // a person reads no more, and a job may have 4096

}  // namespace

v1::StepInFlight Job::DescribeStepInFlight() const {
  const absl::Time now = absl::Now();
  v1::StepInFlight out;
  out.set_step(core_.machine->committed() + 1);
  if (const std::optional<SeenStep> newest = core_.counters.steps.newest();
      newest.has_value() && newest->updated == absl::InfinitePast() && updates_.queued() > 0) {
    out.set_seconds_of_update(absl::ToDoubleSeconds(now - newest->decided));
  }
  const std::optional<SeenStep> step = core_.counters.steps.in_flight();
  if (!step.has_value() || step->step != out.step()) return out;
  const auto since = [now](absl::Time time, auto set) {
    if (time != absl::InfinitePast()) set(absl::ToDoubleSeconds(now - time));
  };
  since(step->first_push, [&](double s) { out.set_seconds_since_first_slice(s); });
  since(step->first_seal, [&](double s) { out.set_seconds_since_first_seal(s); });
  since(step->appended, [&](double s) { out.set_seconds_since_complete(s); });
  since(step->prepared, [&](double s) { out.set_seconds_since_prepared(s); });
  out.set_unsealed_count(core_.machine->unsealed_count());
  for (const uint32_t rank : core_.machine->UnsealedRanks(kRanksNamed)) out.add_unsealed_ranks(rank);
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
    JobMutexLock lock(&core_.mu);
    // Nothing of a job's size is copied here: scrapes and fences with a quota ask all jobs.
    const StepMachine& machine = *core_.machine;
    const v1::OpenRequest& open =
        machine.plan() != nullptr ? machine.plan()->open() : v1::OpenRequest::default_instance();
    status.set_name(core_.name);
    status.set_committed(machine.committed());
    status.set_oldest_chunk_version(machine.committed());
    for (const auto& chunk : core_.chunks) {
      status.set_oldest_chunk_version(
          std::min(status.oldest_chunk_version(), chunk->version.value_or(machine.committed())));
    }
    *status.mutable_epoch() = machine.promised();
    status.set_world_size(open.tiling().world_size());
    if (core_.plan != nullptr) status.set_parameters(core_.plan->layout().parameters());
    status.set_chunks(core_.chunks.size());
    for (const v1::Member& member : open.members()) status.add_member_ids(member.server_id());
    if (machine.plan() != nullptr) *status.mutable_in_flight() = DescribeStepInFlight();
    peers_.Tell(core_.around.server_id, &status);
    for (const int64_t version : read_pins_.Versions()) status.add_pinned_versions(version);
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
    if (!core_.failure.ok()) status.set_failure(std::string(core_.failure.message()));
    const JobJournal::Use log = journal_.use();
    status.set_log_capacity_bytes(log.capacity_bytes);
    status.set_log_used_bytes(log.used_bytes);
    status.set_log_waited_seconds(absl::ToDoubleSeconds(log.waited));
    status.set_queued_steps(static_cast<uint32_t>(updates_.queued()));
    if (const auto stages = core_.counters.steps.last_stages(); stages.has_value()) {
      for (size_t i = 0; i < kStages; ++i) {
        v1::StageTime* const stage = status.add_last_stages();
        stage->set_stage(kStageNames[i]);
        stage->set_seconds(absl::ToDoubleSeconds((*stages)[i]));
      }
    }
    if (scrub_.begun()) *status.mutable_scrub() = scrub_.Describe();
    status.set_chunks_moving(moves_.left());
    status.set_chunks_moved(moves_.moved());
    if (prediction_.newest().has_value()) *status.mutable_prediction() = PredictionMessage(*prediction_.newest());
    store = core_.store;
  }
  const auto residency = store != nullptr ? store->residency() : storage::ChunkStore::Residency{};
  int kind = 0;
  for (v1::TierStatus& tier : DescribeTaken(core_.around.tiers->taken(account()))) {
    tier.set_state_bytes(residency.state[static_cast<storage::TierKind>(kind)]);
    tier.set_working_bytes(residency.working[static_cast<storage::TierKind>(kind++)]);
    *status.add_tiers() = std::move(tier);
  }
  return status;
}

}  // namespace ballast::services
