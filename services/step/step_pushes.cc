// Rule 3: which slices of a step come in.
#include <utility>

#include "ballast/services/step/step_machine.h"
#include "ballast/services/step/step_state.h"

namespace ballast::services {

bool StepMachine::Impl::TakesNext(const v1::PushRequest& header) const {
  return Seeded(SeededBug::kPushNextOncePrepared) && prepared.has_value() && header.step() == committed + 2;
}

bool StepMachine::Impl::Settled(const v1::PushRequest& header) const {
  return prepared.has_value() && !Seeded(SeededBug::kPushAfterPrepared) && !TakesNext(header);
}

absl::Status StepMachine::Impl::CheckPush(const v1::PushRequest& header) const {
  const bool any_epoch = Seeded(SeededBug::kPushIgnoresEpoch) && plan != nullptr;
  if (!any_epoch) BALLAST_RETURN_IF_ERROR(CheckEpoch(header.epoch()));
  if (!TakesNext(header)) BALLAST_RETURN_IF_ERROR(CheckStep(header.step()));
  BALLAST_RETURN_IF_ERROR(CheckRank(header.rank()));
  if (prepared.has_value() && Seeded(SeededBug::kPushAfterPrepared)) return absl::OkStatus();
  return CheckAttempt(header.rank(), header.attempt());
}

absl::StatusOr<StepMachine::Admission> StepMachine::Admit(const v1::PushRequest& header,
                                                          absl::FunctionRef<bool(uint32_t slice)> has_room) {
  Impl& m = *impl_;
  BALLAST_RETURN_IF_ERROR(m.CheckPush(header));
  BALLAST_ASSIGN_OR_RETURN(const uint32_t place, m.slices.FindPlace(header));
  const std::optional<uint32_t> held = m.slices.Held(header.kind(), place);
  const bool replaces = header.attempt() > m.slices.attempt(header.rank());
  if (held == header.crc32c() && !replaces && !m.TakesNext(header)) return Admission::kHeld;
  if (m.Settled(header)) {
    return Precondition(model::kAlreadySealed,
                        absl::StrCat("step ", header.step(), " is prepared on server '", m.id,
                                     "': what all ranks sealed is complete, and no slice can be added or changed"));
  }
  const bool tolerant = Seeded(SeededBug::kPushAfterPrepared) || Seeded(SeededBug::kLowerAttemptAccepted);
  if (held.has_value() && !replaces && !tolerant && !m.TakesNext(header)) {
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
  if (!Seeded(SeededBug::kPushEndUnchecked)) {
    BALLAST_RETURN_IF_ERROR(m.CheckPush(header));
    if (m.Settled(header)) {
      return Precondition(model::kAlreadySealed, absl::StrCat("step ", header.step(), " was prepared on server '", m.id,
                                                              "' while this slice, which it does not need, came in"));
    }
  }
  BALLAST_ASSIGN_OR_RETURN(const uint32_t place, m.slices.FindPlace(header));
  m.Append(SliceRecord{header, bytes});
  const bool file_as_newest = Seeded(SeededBug::kLowerAttemptAccepted);
  m.slices.Hold(header.kind(), place, file_as_newest ? m.slices.attempt(header.rank()) : header.attempt(),
                header.crc32c());
  m.TryPrepare();
  return absl::OkStatus();
}

}  // namespace ballast::services
