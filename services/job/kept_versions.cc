#include "ballast/services/job/kept_versions.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ballast/proto/base/status.h"
#include "ballast/services/job/kept_copies.h"
#include "ballast/services/job_state/job_core.h"
#include "ballast/services/job_state/job_entry.h"
#include "ballast/services/journal/flushes.h"
#include "ballast/services/journal/job_journal.h"

namespace ballast::services {
namespace {

// Keeps a fence's answer, and the catalog's entries, small.
constexpr size_t kKeptMax = 16;

absl::Status WithoutEpoch() {
  return model::Error(absl::StatusCode::kInvalidArgument, model::kBadRequest,
                      "a durable pin is made and given up by the group that has the job: name its epoch");
}

v1::PinResponse ResponseOf(const v1::PinnedVersion& pin) {
  v1::PinResponse response;
  *response.mutable_tensor_steps() = pin.tensor_steps();
  *response.mutable_blobs() = pin.decision().blobs();
  response.set_registration_count(pin.registration_count());
  return response;
}

}  // namespace

void KeptVersions::Pin(const v1::PinRequest& request, const CallLimit& limit, Reply<v1::PinResponse> reply) {
  if (!request.has_epoch()) return reply(WithoutEpoch());
  core_->Ask<v1::PinResponse>(
      request.ByteSizeLong(),
      [this, request, pinning = std::make_shared<std::shared_ptr<Pinning>>()]() -> Outcome<v1::PinResponse> {
        core_->mu.AssertHeld();
        BALLAST_RETURN_IF_ERROR(core_->machine->CheckEpoch(request.epoch()));
        return TryPin(request, pinning.get());
      },
      limit, absl::StrCat("version ", request.version(), " to be on the disk"), std::move(reply));
}

Outcome<v1::PinResponse> KeptVersions::TryPin(const v1::PinRequest& request, std::shared_ptr<Pinning>* waiting_for) {
  const int64_t version = request.version();
  if (*waiting_for != nullptr && !(*waiting_for)->done) return std::nullopt;
  if (*waiting_for != nullptr) BALLAST_RETURN_IF_ERROR((*waiting_for)->status);
  if (unpinning_.contains(version)) return std::nullopt;
  const v1::PinnedVersion* const pin = core_->machine->FindPin(version);
  if (pin != nullptr && (request.only_tell() || pin->requested() || !pin->automatic())) return ResponseOf(*pin);
  if (const auto begun = pinning_.find(version); begun != pinning_.end()) {
    *waiting_for = begun->second;
    return std::nullopt;
  }
  BALLAST_RETURN_IF_ERROR(core_->machine->StateStatus());
  if (pin == nullptr && request.only_tell() && copies_->waits()) return std::nullopt;
  if (pin == nullptr) BALLAST_RETURN_IF_ERROR(CheckNewest(request));
  BALLAST_RETURN_IF_ERROR(CheckMayKeepOne());
  *waiting_for = pin != nullptr ? BeginAdoption(version, request.epoch()) : Begin(request.epoch());
  return std::nullopt;
}

absl::Status KeptVersions::CheckNewest(const v1::PinRequest& request) const {
  const int64_t version = request.version(), committed = core_->machine->committed();
  if (request.only_tell()) {
    return model::Error(absl::StatusCode::kFailedPrecondition, model::kVersionGone,
                        absl::StrCat("server '", core_->around.server_id, "' does not keep version ", version));
  }
  if (version == committed && version >= 0) return core_->CheckNoneAhead();
  const bool behind = version > committed;
  return model::Error(absl::StatusCode::kFailedPrecondition, behind ? model::kBehind : model::kVersionGone,
                      absl::StrCat("only the last decided step can be pinned: server '", core_->around.server_id,
                                   "' is at ", committed, ", asked for ", version));
}

absl::Status KeptVersions::CheckMayKeepOne() const {
  if (!core_->machine->unfilled().empty()) {
    return model::Error(
        absl::StatusCode::kUnavailable, model::kBusy,
        absl::StrCat("server '", core_->around.server_id, "' still copies ", core_->machine->unfilled().size(),
                     " chunk(s) of job '", core_->name, "': a version can be kept once it has them all"));
  }
  if (core_->state.plan()->open().spec().durability() == v1::DURABILITY_NONE) {
    return model::Error(
        absl::StatusCode::kFailedPrecondition, model::kUnsupported,
        absl::StrCat("job '", core_->name, "' keeps nothing on the disk (durability none); a durable pin ",
                     "needs a job of another durability"));
  }
  if (AskedFor() < kKeptMax) return absl::OkStatus();
  return model::Error(
      absl::StatusCode::kResourceExhausted, model::kBudget,
      absl::StrCat("job '", core_->name, "' holds ", kKeptMax,
                   " durable pins, the most that it may hold; give one up first: UnpinDurably, or `ballastctl unpin`"));
}

size_t KeptVersions::AskedFor() const {
  size_t asked_for = pinning_.size();
  for (const auto& [version, there] : core_->machine->pins()) {
    if (there.requested() || !there.automatic()) ++asked_for;
  }
  return asked_for;
}

bool KeptVersions::Overtaken(const Pinning& pinning) const {
  return pinning.epoch.has_value() && !core_->machine->CheckPromised(*pinning.epoch).ok();
}

std::shared_ptr<KeptVersions::Pinning> KeptVersions::Begin(const std::optional<v1::Epoch>& epoch) {
  const bool automatic = !epoch.has_value();
  const auto begun = std::make_shared<Pinning>();
  begun->epoch = epoch;
  v1::PinnedVersion pin = core_->machine->DescribeVersion();
  pin.set_automatic(automatic);
  if (automatic) pin.set_automatic_since(pin.version());
  pin.set_requested(!automatic);
  pinning_[pin.version()] = begun;
  // Behind the update to this version, and before the next.
  core_->worker->Post([this, pin = std::move(pin), begun] { RunPin(pin, begun); });
  return begun;
}

void KeptVersions::RunPin(const v1::PinnedVersion& described, const std::shared_ptr<Pinning>& pinning) {
  const Working working(&core_->counters.steps.clock(), Stage::kPin);
  v1::PinnedVersion pin = described;
  pin.set_life(journal_->life());
  std::shared_ptr<storage::ChunkStore> store;
  bool overtaken = false;
  const auto interrupt = [&]() -> absl::Status {
    BALLAST_RETURN_IF_ERROR(core_->Interrupted());
    JobMutexLock lock(&core_->mu);
    overtaken = Overtaken(*pinning);
    return overtaken ? GivenUp(pin.version()) : absl::OkStatus();
  };
  absl::Status status = interrupt();
  {
    JobMutexLock lock(&core_->mu);
    store = core_->state.store();
  }
  std::vector<uint64_t> kept_bytes;
  bool harmless = true;  // the job can go on after an error
  std::string remedy = "Look after the disk, then restart the server, which recovers the job";
  if (status.ok()) {
    std::shared_ptr<void> lease;
    const auto admit = [&](uint64_t bytes) { return core_->MayGrow(storage::TierKind::kNvme, bytes, &lease); };
    // Without chunks there is nothing to keep.
    absl::StatusOr<std::vector<storage::DurableChunk>> kept = std::vector<storage::DurableChunk>();
    if (store != nullptr) kept = store->PinDurably(pin.version(), pin.automatic(), interrupt, admit);
    status =
        model::Annotate(kept.status(), absl::StrCat("version ", pin.version(), " of job '", core_->name,
                                                    "' cannot be pinned on server '", core_->around.server_id, "'"));
    // Without its own pin the server would never prepare another step. A disk may fail after the interruption.
    overtaken = overtaken && model::ReasonOf(status) == model::kVersionGone;
    // A chunk may have turned out to be damaged since the request came: the group asks again, once a copy is there.
    const bool busy = model::ReasonOf(status) == model::kBusy;
    harmless = kept.ok() || overtaken || ((absl::IsResourceExhausted(status) || busy) && !pin.automatic());
    if (kept.ok()) {
      if (store != nullptr) flushes_->Cut(*store);
      if (store != nullptr) kept_bytes = store->KeptBytes();
      // After an error nobody knows whether the entry is there: the extents stay.
      status = WritePin(core_->around.catalog, core_->name, pin, *kept);
      harmless = status.ok();
      remedy = kCatalogRemedy;
    }
  }
  core_->LockedOnWorker([&](Replies* replies) {
    core_->mu.AssertHeld();
    if (status.ok()) {
      core_->machine->Pinned(pin);
      core_->state.SetKept(kept_bytes);
    }
    End(pin.version(), pinning, overtaken ? absl::OkStatus() : status);
    if (!harmless) core_->Fail(status, remedy, replies);
  });
}

void KeptVersions::End(int64_t version, const std::shared_ptr<Pinning>& pinning, const absl::Status& status) {
  pinning->done = true;
  pinning->status = status;
  pinning_.erase(version);
  core_->Moved();
  if (!status.ok() || !Overtaken(*pinning) || core_->machine->FindPin(version) == nullptr) return;
  // A prepared restore keeps the version all the same: all servers have it then.
  (void)GiveUp(version, /*unreadable=*/false);
}

void KeptVersions::Unpin(const v1::UnpinRequest& request, std::shared_ptr<Caller> caller,
                         Reply<v1::UnpinResponse> reply) {
  if (!request.has_epoch()) return reply(WithoutEpoch());
  core_->Ask<v1::UnpinResponse>(
      request.ByteSizeLong(),
      [this, request]() -> Outcome<v1::UnpinResponse> {
        core_->mu.AssertHeld();
        // The promised epoch, not the open one: an operator makes room for an Open.
        BALLAST_RETURN_IF_ERROR(core_->machine->CheckPromised(request.epoch()));
        return TryUnpin(request.version());
      },
      {absl::InfiniteFuture(), std::move(caller)}, "", std::move(reply));
}

Outcome<v1::UnpinResponse> KeptVersions::TryUnpin(int64_t version) {
  if (unpinning_.contains(version)) return std::nullopt;
  if (const auto begun = pinning_.find(version); begun != pinning_.end()) {
    if (!Overtaken(*begun->second)) return std::nullopt;
    // The version is given up without this request, once the disk lets the worker go on.
    v1::UnpinResponse response;
    response.set_stays_automatic(core_->machine->FindPin(version) != nullptr);
    return response;
  }
  if (core_->machine->FindPin(version) == nullptr) {
    if (!copies_->Forget(version)) return v1::UnpinResponse();
    PostUnpin(version);
    return std::nullopt;
  }
  const bool unreadable = checks_.FoundUnreadable(version);
  if (unreadable && !pinning_.empty()) return std::nullopt;  // a pin being made may take its place
  BALLAST_ASSIGN_OR_RETURN(const bool stays, GiveUp(version, unreadable));
  if (!stays) return std::nullopt;
  v1::UnpinResponse response;
  response.set_stays_automatic(true);
  return response;
}

absl::StatusOr<bool> KeptVersions::GiveUp(int64_t version, bool unreadable) {
  BALLAST_RETURN_IF_ERROR(core_->machine->Unpin(version, unreadable));
  if (const v1::PinnedVersion* const pin = core_->machine->FindPin(version)) {
    PinChanged(*pin);
    return true;
  }
  PostUnpin(version);
  return false;
}

void KeptVersions::PostUnpin(int64_t version) {
  (void)copies_->Forget(version);
  unpinning_.insert(version);
  core_->worker->Post([this, version] { RunUnpin(version); });
}

void KeptVersions::GiveUpIncomplete(int64_t version, uint64_t chunk) {
  const bool pinned = core_->machine->FindPin(version) != nullptr;
  if (pinned ? !GiveUp(version, /*unreadable=*/false).ok() : !copies_->Forget(version)) return;
  if (!pinned) PostUnpin(version);
  spdlog::warn("job '{}': version {} can be restored no more: no server that has chunk {} keeps it", core_->name,
               version, chunk);
}

void KeptVersions::RunUnpin(int64_t version) {
  const Working working(&core_->counters.steps.clock(), Stage::kPin);
  std::shared_ptr<storage::ChunkStore> store;
  {
    JobMutexLock lock(&core_->mu);
    if (!core_->Refusal().ok()) return;
    store = core_->state.store();
  }
  // A restore of the version may have stored chunks without recording them yet: until then a replay needs the pin.
  absl::Status erased = store == nullptr ? absl::OkStatus() : store->Harden();
  if (erased.ok()) erased = core_->around.catalog->Replace(PinPrefixes(core_->name, version), {});
  std::vector<uint64_t> kept_bytes;
  if (erased.ok() && store != nullptr) {
    store->UnpinDurably(version);
    kept_bytes = store->KeptBytes();
  }
  core_->LockedOnWorker([&](Replies* replies) {
    core_->mu.AssertHeld();
    if (erased.ok()) core_->state.SetKept(kept_bytes);
    unpinning_.erase(version);
    checks_.Forget(version);
    core_->Moved();
    if (!erased.ok()) core_->Fail(erased, kCatalogRemedy, replies);
  });
}

std::shared_ptr<KeptVersions::Pinning> KeptVersions::BeginAdoption(int64_t version, const v1::Epoch& epoch) {
  const auto begun = std::make_shared<Pinning>();
  begun->epoch = epoch;
  pinning_[version] = begun;
  core_->worker->Post([this, version, begun] { RunAdoption(version, begun); });
  return begun;
}

absl::Status KeptVersions::GivenUp(int64_t version) const {
  return model::Error(absl::StatusCode::kFailedPrecondition, model::kVersionGone,
                      absl::StrCat("version ", version, " was given up by the server that had pinned it"));
}

void KeptVersions::RunAdoption(int64_t version, const std::shared_ptr<Pinning>& pinning) {
  const Working working(&core_->counters.steps.clock(), Stage::kPin);
  std::shared_ptr<storage::ChunkStore> store;
  std::optional<v1::PinnedVersion> pin;
  absl::Status status;
  {
    JobMutexLock lock(&core_->mu);
    status = core_->Refusal();
    store = core_->state.store();
    if (const v1::PinnedVersion* const found = core_->machine->FindPin(version)) pin = *found;
  }
  bool harmless = true;
  if (status.ok() && !pin.has_value()) status = GivenUp(version);
  if (status.ok()) {
    std::shared_ptr<void> lease;
    status = store->AdoptPin(version,
                             [&](uint64_t bytes) { return core_->MayGrow(storage::TierKind::kNvme, bytes, &lease); });
  }
  if (status.ok()) {
    pin->set_requested(true);
    status = WriteWants(*pin);
    harmless = status.ok();
  }
  core_->LockedOnWorker([&](Replies* replies) {
    core_->mu.AssertHeld();
    const v1::PinnedVersion* const found = core_->machine->FindPin(version);
    if (status.ok() && found != nullptr) {
      v1::PinnedVersion wanted = *found;
      wanted.set_requested(true);
      core_->machine->Pinned(wanted);
    } else if (status.ok()) {
      status = GivenUp(version);
    }
    End(version, pinning, status);
    if (!harmless) core_->Fail(status, kCatalogRemedy, replies);
  });
}

absl::Status KeptVersions::WriteWants(const v1::PinnedVersion& pin) {
  const auto [key, value] = WantedPair(core_->name, pin);
  return core_->around.catalog->Put(key, value);
}

void KeptVersions::PinChanged(const v1::PinnedVersion& pin) {
  const int64_t version = pin.version();
  if (!pin.automatic() && !pin.requested()) return PostUnpin(version);
  core_->worker->Post([this, version] {
    v1::PinnedVersion pin;
    {
      JobMutexLock lock(&core_->mu);
      const v1::PinnedVersion* const found = core_->machine->FindPin(version);
      if (!core_->Refusal().ok() || found == nullptr) return;
      // As it is now: a request may have asked for the pin since this task was posted.
      pin.set_version(version);
      pin.set_automatic(found->automatic());
      pin.set_automatic_since(found->automatic_since());
      pin.set_requested(found->requested());
    }
    const absl::Status status = WriteWants(pin);
    if (status.ok()) return;
    core_->LockedOnWorker([&](Replies* replies) {
      core_->mu.AssertHeld();
      core_->Fail(status, kCatalogRemedy, replies);
    });
  });
}

}  // namespace ballast::services
