// Recovery: replaying the durable records in order restores the machine's state (rules 8 and 13).
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "ballast/proto/model/step_header.h"
#include "ballast/services/step/step_state.h"

namespace ballast::services {

absl::Status StepMachine::Impl::ReplayOpen(const v1::OpenRequest& open) {
  BALLAST_ASSIGN_OR_RETURN(model::EpochPlan next, model::EpochPlan::Make(open));
  BALLAST_ASSIGN_OR_RETURN(const uint32_t index, next.FindMember(id));
  const bool forgets = open.has_table() && !Fits(open) && Begins(open);
  // Open at base - 1 logged the decision before it.
  if (!forgets && open.base() != committed) {
    return Diverged(absl::StrCat("the log of server '", id, "' opens an epoch from step ", open.base(), " after step ",
                                 committed, "; records are missing"));
  }
  BALLAST_ASSIGN_OR_RETURN(Change change, ChangeTo(next, index, forgets, /*replays=*/true));
  if (forgets) {
    Forget(open);
    // The host takes their entries off the disk after the last record. Others were made, or copied, since.
    std::erase_if(pins, [&](const auto& pin) {
      return pin.second.has_since() ? model::Compare(pin.second.since(), open.epoch()) < 0 : pin.first < open.base();
    });
  }
  Adopt(std::make_shared<const model::EpochPlan>(std::move(next)), index, std::move(change));
  tells_table = false;  // the host compares its disk with the plan after the last record
  return absl::OkStatus();
}

absl::Status StepMachine::Impl::ReplaySlice(const v1::PushRequest& header) {
  if (plan == nullptr || header.step() != committed + 1) {
    return Diverged(absl::StrCat("the log of server '", id, "' holds a slice of step ", header.step(), " after step ",
                                 committed, "; records are missing"));
  }
  BALLAST_ASSIGN_OR_RETURN(const uint32_t place, slices.FindPlace(header));
  RaiseAttempt(header.rank(), header.attempt());
  slices.Hold(header.kind(), place, header.attempt(), header.crc32c());
  return absl::OkStatus();
}

absl::Status StepMachine::Impl::ReplayPrepared(const v1::PreparedRecord& record) {
  if (record.step() != committed + 1) {
    return Diverged(absl::StrCat("the log of server '", id, "' prepares ", ShowKey(record), " after step ", committed,
                                 "; records are missing"));
  }
  // Applying the step indexes the plan by this header.
  const std::vector<std::string> blobs(record.blobs().begin(), record.blobs().end());
  const absl::Status fits = model::CheckHeader(*plan, record.step(), record.header(), blobs);
  if (!fits.ok() ||
      record.plan_hash() != model::PlanHash(*plan, record.step(), record.attempt(), record.header(), blobs)) {
    return Diverged(absl::StrCat(
        "the log of server '", id, "' prepares ", ShowKey(record),
        ", which does not fit the epoch that it opens: ", fits.ok() ? "its plan hash is another" : fits.message()));
  }
  prepared = record;
  prepared_lsn = 0;
  PassOver(Lacking(record.header(), record.attempt()), record.step());
  return absl::OkStatus();
}

absl::Status StepMachine::Impl::ReplayDecision(const v1::Decision& replayed) {
  if (!prepared.has_value() || !SameKey(*prepared, replayed)) {
    return Diverged(absl::StrCat("the log of server '", id, "' decides ", ShowKey(replayed),
                                 " without having prepared it; records are missing"));
  }
  Decide(replayed, /*log=*/false);
  return absl::OkStatus();
}

// A snapshot at the start of a log is taken as it is; a later snapshot repeats known state.
absl::Status StepMachine::Impl::ReplaySnapshot(const v1::LogSnapshot& snapshot) {
  std::map<uint64_t, int64_t> lacks;
  for (const v1::UnfilledChunk& chunk : snapshot.unfilled()) lacks[chunk.chunk()] = chunk.least();
  if (plan != nullptr || committed >= 0) {
    if (snapshot.committed() == committed) {
      SetUnfilled(std::move(lacks));  // some may have been filled since the records before it
      return absl::OkStatus();
    }
    return Diverged(absl::StrCat("a snapshot in the log of server '", id, "' is of step ", snapshot.committed(),
                                 ", the records before it lead to step ", committed, "; records are missing"));
  }
  if (snapshot.committed() >= 0 && (!snapshot.has_open() || !snapshot.has_decision())) {
    return Diverged(absl::StrCat("a snapshot in the log of server '", id, "' is of step ", snapshot.committed(),
                                 " without its ", snapshot.has_open() ? "decision" : "Open"));
  }
  promised = snapshot.promised();
  if (snapshot.has_open()) {
    BALLAST_ASSIGN_OR_RETURN(model::EpochPlan opened, model::EpochPlan::Make(snapshot.open()));
    BALLAST_ASSIGN_OR_RETURN(const uint32_t index, opened.FindMember(id));
    Adopt(std::make_shared<const model::EpochPlan>(std::move(opened)), index, Change());
  }
  committed = snapshot.committed();
  if (snapshot.has_decision()) decision = snapshot.decision();
  if (snapshot.has_prepared()) {
    if (plan == nullptr)
      return Diverged(absl::StrCat("a snapshot in the log of server '", id, "' prepares without an Open"));
    BALLAST_RETURN_IF_ERROR(ReplayPrepared(snapshot.prepared()));
  }
  SetUnfilled(std::move(lacks));
  tensor_steps.assign(snapshot.tensor_steps().begin(), snapshot.tensor_steps().end());
  if (plan != nullptr) tensor_steps.resize(plan->layout().tensors().size(), 0);
  skipped = snapshot.skipped_steps();
  return absl::OkStatus();
}

void StepMachine::Lose(const v1::PushRequest& header) {
  const absl::StatusOr<uint32_t> place = impl_->slices.FindPlace(header);
  if (place.ok()) impl_->slices.Lose(header.kind(), *place, header.attempt());
}

bool StepMachine::Holds(const v1::PushRequest& header) const {
  const Impl& m = *impl_;
  return m.plan != nullptr && header.step() == m.committed + 1 && m.slices.Holds(header);
}

v1::LogSnapshot StepMachine::Snapshot() const {
  const Impl& m = *impl_;
  v1::LogSnapshot snapshot;
  *snapshot.mutable_promised() = m.promised;
  if (m.plan != nullptr) *snapshot.mutable_open() = m.plan->open();
  snapshot.set_committed(m.committed);
  if (m.decision.has_value()) *snapshot.mutable_decision() = *m.decision;
  if (m.prepared.has_value()) *snapshot.mutable_prepared() = *m.prepared;
  snapshot.mutable_tensor_steps()->Add(m.tensor_steps.begin(), m.tensor_steps.end());
  snapshot.set_skipped_steps(m.skipped);
  for (const auto& [chunk, least] : m.unfilled) {
    v1::UnfilledChunk* const lacks = snapshot.add_unfilled();
    lacks->set_chunk(chunk);
    lacks->set_least(least);
  }
  return snapshot;
}

absl::Status StepMachine::Replay(const StepRecord& record) {
  Impl& m = *impl_;
  if (const auto* snapshot = std::get_if<SnapshotRecord>(&record)) return m.ReplaySnapshot(snapshot->snapshot);
  if (const auto* promise = std::get_if<PromiseRecord>(&record)) {
    m.promised = promise->epoch;
    return absl::OkStatus();
  }
  if (const auto* open = std::get_if<OpenRecord>(&record)) return m.ReplayOpen(*open->open);
  if (m.plan == nullptr) return Diverged(absl::StrCat("the log of server '", m.id, "' holds a step before any Open"));
  if (const auto* slice = std::get_if<SliceRecord>(&record)) return m.ReplaySlice(slice->header);
  if (const auto* prepared = std::get_if<PreparedStepRecord>(&record)) return m.ReplayPrepared(prepared->prepared);
  return m.ReplayDecision(std::get<DecisionRecord>(record).decision);
}

}  // namespace ballast::services
