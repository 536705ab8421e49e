// Durable pins of class Job: versions that stay on the disk for restores until they are unpinned.
//
// Order of a pin: take the disk's space; write the chunks that are not on the disk at this version; write one entry of
// the catalog with the places of all chunks. After a crash before the entry, there is no pin and the written extents
// are free; after the entry, there is the pin. Before a restore is prepared, its whole pin is read. Order of an unpin:
// the machine prepares no more restores of the version; the entry goes; the extents are free.
#include <spdlog/spdlog.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "ballast/proto/model/status.h"
#include "ballast/proto/model/verdict.h"
#include "ballast/services/job_parts.h"

namespace ballast::services {
namespace {

// Keeps a fence's answer, and the catalog's entries, small.
constexpr size_t kDurablePinsMax = 16;

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

void Job::PinDurably(const v1::PinRequest& request, absl::Time deadline, Reply<v1::PinResponse> reply) {
  if (!request.has_epoch()) return reply(WithoutEpoch());
  Ask<v1::PinResponse>(
      request.ByteSizeLong(),
      [this, request, pinning = std::make_shared<std::shared_ptr<Pinning>>()]() -> Outcome<v1::PinResponse> {
        mu_.AssertHeld();
        BALLAST_RETURN_IF_ERROR(machine_->CheckEpoch(request.epoch()));
        return TryPinDurably(request, pinning.get());
      },
      deadline, absl::StrCat("version ", request.version(), " to be on the disk"), std::move(reply));
}

Outcome<v1::PinResponse> Job::TryPinDurably(const v1::PinRequest& request, std::shared_ptr<Pinning>* waiting_for) {
  const int64_t version = request.version();
  if (*waiting_for != nullptr && !(*waiting_for)->done) return std::nullopt;
  if (*waiting_for != nullptr) BALLAST_RETURN_IF_ERROR((*waiting_for)->status);
  if (unpinning_.contains(version)) return std::nullopt;
  const v1::PinnedVersion* const pin = machine_->FindPin(version);
  if (pin != nullptr && (request.only_tell() || pin->requested() || !pin->automatic())) return ResponseOf(*pin);
  if (const auto begun = pinning_.find(version); begun != pinning_.end()) {
    *waiting_for = begun->second;
    return std::nullopt;
  }
  BALLAST_RETURN_IF_ERROR(machine_->StateStatus());
  const int64_t committed = machine_->committed();
  if (pin == nullptr && (version != committed || version < 0 || request.only_tell())) {
    const bool behind = version > committed && !request.only_tell();
    return model::Error(absl::StatusCode::kFailedPrecondition, behind ? model::kBehind : model::kVersionGone,
                        absl::StrCat("only the last decided step can be pinned: server '", around_.server_id,
                                     "' is at ", committed, ", asked for ", version));
  }
  if (pin == nullptr) BALLAST_RETURN_IF_ERROR(CheckNoneAhead());
  if (store_ == nullptr || !store_->durable()) {
    return model::Error(absl::StatusCode::kFailedPrecondition, model::kUnsupported,
                        absl::StrCat("job '", name_, "' keeps nothing on the disk (durability none); a durable pin ",
                                     "needs a job of another durability"));
  }
  const v1::GetJobResponse job = machine_->Describe();
  const auto asked_for = static_cast<int>(pinning_.size()) +
                         static_cast<int>(std::count_if(job.durable_versions().begin(), job.durable_versions().end(),
                                                        [this](int64_t pinned) {
                                                          mu_.AssertHeld();
                                                          const v1::PinnedVersion& there = *machine_->FindPin(pinned);
                                                          return there.requested() || !there.automatic();
                                                        }));
  if (asked_for >= int{kDurablePinsMax}) {
    return model::Error(
        absl::StatusCode::kResourceExhausted, model::kBudget,
        absl::StrCat(
            "job '", name_, "' holds ", kDurablePinsMax,
            " durable pins, which is all that it may; give one up first: UnpinDurably, or `ballastctl unpin`"));
  }
  *waiting_for = pin != nullptr ? BeginAdoption(version) : BeginPin(/*automatic=*/false);
  return std::nullopt;
}

std::shared_ptr<Job::Pinning> Job::BeginPin(bool automatic) {
  const auto begun = std::make_shared<Pinning>();
  v1::PinnedVersion pin = machine_->DescribeVersion();
  pin.set_automatic(automatic);
  if (automatic) pin.set_automatic_since(pin.version());
  pin.set_requested(!automatic);
  pinning_[pin.version()] = begun;
  // Behind the update to this version, and before the next.
  stage_->Post([this, pin = std::move(pin), begun] { RunPinDurably(pin, begun); });
  return begun;
}

void Job::RunPinDurably(const v1::PinnedVersion& described, const std::shared_ptr<Pinning>& pinning) {
  v1::PinnedVersion pin = described;
  std::shared_ptr<storage::ChunkStore> store;
  absl::Status status;
  {
    absl::MutexLock lock(&mu_);
    status = Refusal();
    store = store_;
  }
  bool harmless = true;  // the job can go on after an error
  std::string remedy = "Look after the disk, then restart the server, which recovers the job";
  if (status.ok()) {
    auto kept = store->PinDurably(pin.version(), pin.automatic());
    status = model::Annotate(kept.status(), absl::StrCat("version ", pin.version(), " of job '", name_,
                                                         "' cannot be pinned on server '", around_.server_id, "'"));
    // Without its own pin the server would never prepare another step.
    harmless = kept.ok() || (absl::IsResourceExhausted(status) && !pin.automatic());
    if (kept.ok()) {
      CutJournal(*store, applied_);
      for (const storage::DurableChunk& chunk : *kept) pin.add_chunks(chunk.Encode());
      // After an error nobody knows whether the entry is there: the extents stay.
      const auto [key, value] = PinPair(name_, pin);
      status = around_.catalog->Put(key, value);
      harmless = status.ok();
      remedy = kCatalogRemedy;
    }
  }
  LockedOnStage([&](Replies* replies) {
    mu_.AssertHeld();
    if (status.ok()) machine_->Pinned(pin);
    pinning->done = true;
    pinning->status = status;
    pinning_.erase(pin.version());
    moved_ = true;
    if (!harmless) Fail(status, remedy, replies);
  });
}

void Job::UnpinDurably(const v1::UnpinRequest& request, Reply<v1::UnpinResponse> reply) {
  if (!request.has_epoch()) return reply(WithoutEpoch());
  Ask<v1::UnpinResponse>(
      request.ByteSizeLong(),
      [this, request]() -> Outcome<v1::UnpinResponse> {
        mu_.AssertHeld();
        // The promised epoch, not the open one: an operator makes room for an Open.
        BALLAST_RETURN_IF_ERROR(machine_->CheckPromised(request.epoch()));
        return TryUnpinDurably(request.version());
      },
      absl::InfiniteFuture(), "", std::move(reply));
}

Outcome<v1::UnpinResponse> Job::TryUnpinDurably(int64_t version) {
  if (pinning_.contains(version) || unpinning_.contains(version)) return std::nullopt;
  if (machine_->FindPin(version) == nullptr) return v1::UnpinResponse();
  const auto check = pin_checks_.find(version);
  const bool unreadable =
      check != pin_checks_.end() && check->second.done &&
      (absl::IsDataLoss(check->second.status) || model::ReasonOf(check->second.status) == model::kIo);
  if (unreadable && !pinning_.empty()) return std::nullopt;  // a pin being made may take its place
  BALLAST_RETURN_IF_ERROR(machine_->Unpin(version, unreadable));
  if (const v1::PinnedVersion* const pin = machine_->FindPin(version)) {
    PinChanged(*pin);
    v1::UnpinResponse response;
    response.set_stays_automatic(true);
    return response;
  }
  unpinning_.insert(version);
  // Behind a decided restore of the version.
  stage_->Post([this, version] { RunUnpinDurably(version); });
  return std::nullopt;
}

void Job::RunUnpinDurably(int64_t version) {
  std::shared_ptr<storage::ChunkStore> store;
  {
    absl::MutexLock lock(&mu_);
    if (!Refusal().ok()) return;
    store = store_;
  }
  // A restore of the version may have stored chunks without recording them yet: until then a replay needs the pin.
  absl::Status erased = store->Harden();
  if (erased.ok()) erased = around_.catalog->ErasePrefix(CatalogPrefix(name_) + CatalogPin(version));
  if (erased.ok()) store->UnpinDurably(version);
  LockedOnStage([&](Replies* replies) {
    mu_.AssertHeld();
    unpinning_.erase(version);
    pin_checks_.erase(version);
    moved_ = true;
    if (!erased.ok()) Fail(erased, kCatalogRemedy, replies);
  });
}

// Refuses an unreadable version while the job still has its state, before the restore would overwrite it.
absl::StatusOr<bool> Job::CheckedPin(const v1::SealRequest& request) {
  const int64_t version = request.header().restored_version();
  const model::EpochPlan* plan = machine_->plan();
  // Whatever the machine refuses, or has prepared, needs no reading.
  const bool of_epoch = plan != nullptr && model::Compare(plan->open().epoch(), request.epoch()) == 0;
  if (!of_epoch || machine_->FindPin(version) == nullptr || machine_->Describe().has_prepared() ||
      request.step() != machine_->committed() + 1) {
    return true;
  }
  const auto [found, fresh] = pin_checks_.try_emplace(version);
  PinCheck& check = found->second;
  if (fresh || (check.done && model::Compare(check.epoch, request.epoch()) != 0)) {
    check = PinCheck();
    stage_->Post([this, version] { RunPinCheck(version); });
  }
  // A reading that outlasts its epoch serves the next epoch.
  if (!check.done) {
    check.epoch = request.epoch();
    return false;
  }
  BALLAST_RETURN_IF_ERROR(check.status);
  return true;
}

void Job::RunPinCheck(int64_t version) {
  std::shared_ptr<storage::ChunkStore> store;
  bool lost = false;
  {
    absl::MutexLock lock(&mu_);
    if (!Refusal().ok()) return;
    store = store_;
    lost = machine_->state_lost();
  }
  // Stopping the job does not wait for the whole reading.
  const absl::Status status = store->VerifyPin(version, [this] {
    absl::MutexLock lock(&mu_);
    return Refusal();
  });
  LockedOnStage([&](Replies*) {
    mu_.AssertHeld();
    const auto check = pin_checks_.find(version);
    if (check == pin_checks_.end()) return;
    check->second.done = true;
    check->second.status = model::Annotate(
        status, absl::StrCat(
                    "server '", around_.server_id, "' cannot restore version ", version, " of job '", name_,
                    lost ? "', and has lost what came since; look after the disk and try again, or give the version up "
                           "with `ballastctl unpin` and go back to an older one that all servers have"
                         : "', which goes on from where it is; restore another version, and give this one up "
                           "with `ballastctl unpin`"));
    moved_ = true;
  });
}

}  // namespace ballast::services
