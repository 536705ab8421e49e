// Recovery: the records that were durable, in order, bring the machine back to where it was (rules 8 and 13).
#include "ballast/services/step/step_state.h"

namespace ballast::services {

absl::Status StepMachine::Impl::ReplayOpen(const v1::OpenRequest& open) {
  // Open at base - 1 logged the decision before it.
  if (open.base() != committed) {
    return Diverged(absl::StrCat("the log of server '", id, "' opens an epoch from step ", open.base(), " after step ",
                                 committed, "; records are missing"));
  }
  BALLAST_ASSIGN_OR_RETURN(model::EpochPlan next, model::EpochPlan::Make(open));
  BALLAST_ASSIGN_OR_RETURN(const uint32_t member, next.FindMember(id));
  Adopt(std::move(next), member);
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

absl::Status StepMachine::Impl::ReplayDecision(const v1::Decision& replayed) {
  if (!prepared.has_value() || !SameKey(*prepared, replayed)) {
    return Diverged(absl::StrCat("the log of server '", id, "' decides ", ShowKey(replayed),
                                 " without having prepared it; records are missing"));
  }
  Decide(replayed, /*log=*/false);
  return absl::OkStatus();
}

absl::Status StepMachine::Replay(const StepRecord& record) {
  Impl& m = *impl_;
  m.replaying = true;
  if (const auto* promise = std::get_if<PromiseRecord>(&record)) {
    m.promised = promise->epoch;
    return absl::OkStatus();
  }
  if (const auto* open = std::get_if<OpenRecord>(&record)) return m.ReplayOpen(open->open);
  if (const auto* slice = std::get_if<SliceRecord>(&record)) return m.ReplaySlice(slice->header);
  if (const auto* prepared = std::get_if<PreparedStepRecord>(&record)) {
    if (prepared->prepared.step() != m.committed + 1) {
      return Diverged(absl::StrCat("the log of server '", m.id, "' prepares ", ShowKey(prepared->prepared),
                                   " after step ", m.committed, "; records are missing"));
    }
    m.prepared = prepared->prepared;
    m.prepared_lsn = 0;
    return absl::OkStatus();
  }
  return m.ReplayDecision(std::get<DecisionRecord>(record).decision);
}

}  // namespace ballast::services
