#include "ballast/services/job/restore_checks.h"

#include <memory>

#include "absl/strings/str_cat.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/model/verdict.h"
#include "ballast/services/job/kept_copies.h"
#include "ballast/services/job_state/job_core.h"

namespace ballast::services {

absl::StatusOr<bool> RestoreChecks::Checked(const v1::SealRequest& request) {
  const int64_t version = request.header().restored_version();
  const model::EpochPlan* plan = core_->machine->plan();
  // Whatever the machine refuses, or has prepared, needs no reading.
  const bool of_epoch = plan != nullptr && model::Compare(plan->open().epoch(), request.epoch()) == 0;
  if (!of_epoch || core_->machine->FindPin(version) == nullptr || core_->machine->prepared_durably() ||
      request.step() != core_->machine->committed() + 1) {
    return true;
  }
  const auto [found, fresh] = checks_.try_emplace(version);
  Check& check = found->second;
  if (fresh || (check.done && model::Compare(check.epoch, request.epoch()) != 0)) {
    check = Check();
    core_->worker->Post([this, version] { Run(version); });
  }
  // A reading that outlasts its epoch serves the next epoch.
  if (!check.done) {
    check.epoch = request.epoch();
    if (check.mends && !copies_->Mends(version)) {
      check.mends = false;
      check.mended = true;
      core_->worker->Post([this, version] { Run(version); });
    }
    return false;
  }
  BALLAST_RETURN_IF_ERROR(check.status);
  return true;
}

bool RestoreChecks::FoundUnreadable(int64_t version) const {
  const auto check = checks_.find(version);
  if (check == checks_.end() || !check->second.done) return false;
  return absl::IsDataLoss(check->second.status) || model::ReasonOf(check->second.status) == model::kIo;
}

void RestoreChecks::Run(int64_t version) {
  const Working working(&core_->counters.steps.clock(), Stage::kPin);
  std::shared_ptr<storage::ChunkStore> store;
  bool lost = false, mended = false, mends = false;
  {
    JobMutexLock lock(&core_->mu);
    if (!core_->Refusal().ok()) return;
    store = core_->state.store();
    lost = core_->machine->state_lost();
    if (const auto check = checks_.find(version); check != checks_.end()) mended = check->second.mended;
  }
  const auto mend = [&](uint64_t chunk, const absl::Status& found) {
    if (mended) return false;
    JobMutexLock lock(&core_->mu);
    const bool begun = copies_->Mend(version, chunk, found);
    mends = mends || begun;
    return begun;
  };
  // Without chunks there is nothing to read.
  const absl::Status status = store == nullptr ? absl::OkStatus()
                                               : store->VerifyPin(
                                                     version, [this] { return core_->Interrupted(); }, mend);
  core_->LockedOnWorker([&](Replies*) {
    core_->mu.AssertHeld();
    const auto check = checks_.find(version);
    if (check == checks_.end()) return;
    if (status.ok() && mends) {
      check->second.mends = true;
      return core_->Moved();
    }
    check->second.done = true;
    check->second.status = model::Annotate(
        status, absl::StrCat(
                    "server '", core_->around.server_id, "' cannot restore version ", version, " of job '", core_->name,
                    lost ? "', and has lost what came since; look after the disk and try again, or give the version up "
                           "with `ballastctl unpin` and go back to an older one that all servers have"
                         : "', which goes on from where it is; restore another version, and give this one up "
                           "with `ballastctl unpin`"));
    core_->Moved();
  });
}

}  // namespace ballast::services
