// Rule 3: which slices of a step come in.
#include "ballast/services/step/step_machine.h"
#include "ballast/services/step/step_state.h"

namespace ballast::services {

absl::Status StepMachine::Impl::CheckPush(const v1::PushRequest& header) const {
  BALLAST_RETURN_IF_ERROR(CheckEpoch(header.epoch()));
  BALLAST_RETURN_IF_ERROR(CheckStep(header.step()));
  BALLAST_RETURN_IF_ERROR(CheckRank(header.rank()));
  return CheckAttempt(header.rank(), header.attempt());
}

absl::StatusOr<StepMachine::Admission> StepMachine::Admit(const v1::PushRequest& header,
                                                          absl::FunctionRef<bool(uint32_t slice)> has_room) {
  Impl& m = *impl_;
  BALLAST_RETURN_IF_ERROR(m.CheckPush(header));
  BALLAST_ASSIGN_OR_RETURN(const uint32_t place, m.slices.FindPlace(header));
  const std::optional<uint32_t> held = m.slices.Held(header.kind(), place);
  const bool replaces = header.attempt() > m.slices.attempt(header.rank());
  if (held == header.crc32c() && !replaces) return Admission::kHeld;
  // A chunk that is being filled needs no slices, and need not have come before the step was prepared.
  if (m.prepared.has_value() && m.slices.Passes(place)) return Admission::kHeld;
  if (m.prepared.has_value()) {
    return Precondition(model::kAlreadySealed,
                        absl::StrCat("step ", header.step(), " is prepared on server '", m.id,
                                     "': what all ranks sealed is complete, and no slice can be added or changed"));
  }
  if (held.has_value() && !replaces) {
    return model::Error(absl::StatusCode::kAlreadyExists, model::kDigestConflict,
                        absl::StrCat("rank ", header.rank(), " pushed [", header.begin(), ", ", header.end(),
                                     ") of unit ", header.unit(), " twice in attempt ", header.attempt(), " of step ",
                                     header.step(), " with different bytes (crc32c ", *held, ", then ", header.crc32c(),
                                     "); sum contributions in the client and push once, or Drop()"));
  }
  if (!has_room(m.slices.slice_index(place))) return Admission::kWaits;
  if (!m.slices.TakePlace(header)) {
    return model::Error(absl::StatusCode::kUnavailable, model::kBusy,
                        absl::StrCat("another push of [", header.begin(), ", ", header.end(), ") of unit ",
                                     header.unit(), " is still coming in; send this one again"));
  }
  m.RaiseAttempt(header.rank(), header.attempt());
  return Admission::kReceive;
}

absl::Status StepMachine::EndPush(const v1::PushRequest& header, const absl::Status& received, PushedSlice* bytes) {
  Impl& m = *impl_;
  m.slices.FreePlace(header);
  BALLAST_RETURN_IF_ERROR(received);
  BALLAST_RETURN_IF_ERROR(m.CheckPush(header));
  BALLAST_ASSIGN_OR_RETURN(const uint32_t place, m.slices.FindPlace(header));
  if (m.prepared.has_value() && m.slices.Passes(place)) return absl::OkStatus();
  if (m.prepared.has_value()) {
    return Precondition(model::kAlreadySealed, absl::StrCat("step ", header.step(), " was prepared on server '", m.id,
                                                            "' while this slice, which it does not need, came in"));
  }
  m.journal->Append(SliceRecord{header, bytes});
  m.slices.Hold(header.kind(), place, header.attempt(), header.crc32c());
  m.TryPrepare();
  return absl::OkStatus();
}

}  // namespace ballast::services
