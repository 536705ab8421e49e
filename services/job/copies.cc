#include "ballast/services/job/copies.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <string>

#include "ballast/proto/model/copies.h"
#include "ballast/services/job_state/job_core.h"

namespace ballast::services {
namespace {

static_assert(kQueuedStepsMax <= model::kDigestLag);

constexpr uint64_t kLinesMax = 8;  // of the log for one step, and of the status: a person reads no more

// Are they copies of one chunk on several servers of the plan?
bool AllHave(const model::EpochPlan& plan, const v1::DifferingCopies& differing) {
  const auto has = [&](const v1::DifferingCopies::Copy& copy) {
    const auto member = plan.FindMember(copy.server_id());
    return member.ok() && plan.Has(*member, differing.chunk());
  };
  return differing.chunk() < plan.layout().chunks().size() && differing.copies_size() > 1 &&
         std::all_of(differing.copies().begin(), differing.copies().end(), has);
}

}  // namespace

void Copies::AddDigests(int64_t step, v1::SealResponse* answer) const {
  if (!HasCopies(*core_->state.plan())) return;
  const int64_t version = step - model::kDigestLag;
  for (const auto& chunk : core_->state.chunks()) {
    if (!chunk->digested().has_value() || chunk->digested()->version != version) continue;
    v1::ChunkDigest* const digest = answer->add_digests();
    digest->set_chunk(chunk->id);
    digest->set_version(version);
    const int arrays = core_->state.store()->layout().Of(chunk->form).array_count();
    const storage::ArrayDigests& digests = chunk->digested()->arrays;
    digest->mutable_crc32c()->Add(digests.begin(), digests.begin() + arrays);
  }
}

void Copies::Note(const google::protobuf::RepeatedPtrField<v1::DifferingCopies>& differing) {
  const auto plan = core_->state.plan();
  if (differing.empty() || plan == nullptr) return;
  std::erase_if(differing_, [this](const auto& entry) {
    core_->mu.AssertHeld();
    return !Lasts(entry.second);
  });
  uint64_t fresh = 0;
  for (const v1::DifferingCopies& found : differing) {
    const bool here = std::any_of(found.copies().begin(), found.copies().end(),
                                  [&](const auto& copy) { return copy.server_id() == core_->around.server_id; });
    if (!here || !AllHave(*plan, found) || found.version() > core_->machine->committed()) continue;
    const auto [known, inserted] = differing_.try_emplace(found.chunk());
    if (!inserted && known->second.version() >= found.version()) continue;  // the Commit came before
    known->second = found;
    ++core_->counters.differing_copies;
    if (!inserted || ++fresh > kLinesMax) continue;
    spdlog::error(
        "job '{}': copies differ: {}. Training goes on, and one of these servers has damaged state: see "
        "BallastReplicasDiffer in the runbook",
        core_->name, model::ShowDiffering(found));
  }
  if (fresh > kLinesMax) {
    spdlog::error("job '{}': copies of {} further chunks differ", core_->name, fresh - kLinesMax);
  }
}

void Copies::Opened(const model::EpochPlan& plan, bool forgets) {
  std::erase_if(differing_, [&](const auto& entry) { return forgets || !AllHave(plan, entry.second); });
}

bool Copies::Lasts(const v1::DifferingCopies& differing) const {
  return differing.version() >= core_->machine->committed() - model::kDifferenceLasts;
}

void Copies::Describe(v1::JobStatus* status) const {
  for (const auto& [chunk, differing] : differing_) {
    if (!Lasts(differing)) continue;
    status->set_differing_chunks(status->differing_chunks() + 1);
    if (status->differing_chunks() <= kLinesMax) status->add_differing(model::ShowDiffering(differing));
  }
}

}  // namespace ballast::services
