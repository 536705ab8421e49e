// Durability every-K of class Job: automatic pins, and the start from pins after a restart (rule 14).
//
// A job with this durability has no log: promise, Open and pins are in the catalog; slices and chunks' states end with
// the process. Order at a step that is due: its update; the end of pins made needless; its pin. No later step is
// prepared before this pin is in the catalog.
#include <spdlog/spdlog.h>

#include <algorithm>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ballast/proto/model/status.h"
#include "ballast/services/job_parts.h"
#include "ballast/storage/faults/failpoint.h"

namespace ballast::services {
namespace {

// The version that all servers have, and the next.
constexpr uint64_t kAutomaticPins = 2;

}  // namespace

uint64_t Job::AsideBytes(uint64_t id, uint64_t state_bytes) const {
  uint64_t kept = 0;
  std::set<uint64_t> seen, asked_for;
  if (const auto pinned = pinned_chunks_.find(id); pinned != pinned_chunks_.end()) {
    for (const PinnedChunk& chunk : pinned->second) {
      if (!chunk.automatic) asked_for.insert(chunk.kept.offset);
    }
    for (const PinnedChunk& chunk : pinned->second) {
      if (!asked_for.contains(chunk.kept.offset) && seen.insert(chunk.kept.offset).second) kept += chunk.kept.bytes;
    }
  }
  return kAutomaticPins * state_bytes - std::min(kAutomaticPins * state_bytes, kept);
}

void Job::RememberPins(absl::Span<const v1::PinnedVersion> pins) {
  for (const v1::PinnedVersion& pin : pins) {
    for (const storage::DurableChunk& chunk : PinnedChunks(pin)) {
      pinned_chunks_[chunk.id].push_back({pin.version(), chunk, pin.automatic() && !pin.requested()});
    }
  }
}

absl::Status Job::TakeBackPins(absl::Span<const std::shared_ptr<HeldChunk>> chunks) {
  std::shared_ptr<storage::ChunkStore> store;
  {
    absl::MutexLock lock(&mu_);
    store = store_;
    if (store == nullptr) return absl::OkStatus();  // none of the chunks is this server's
    const v1::GetJobResponse job = machine_->Describe();
    for (const int64_t version : job.durable_versions()) store->ExpectPin(version);
  }
  for (const auto& chunk : chunks) {
    const auto pinned = pinned_chunks_.find(chunk->id);
    if (pinned == pinned_chunks_.end()) continue;
    for (const PinnedChunk& pin : pinned->second) {
      BALLAST_RETURN_IF_ERROR(store->TakeBackPin(pin.version, chunk->store_index, pin.kept, pin.automatic));
    }
    pinned_chunks_.erase(pinned);
  }
  return absl::OkStatus();
}

absl::Status Job::ComeBack(const JobEntry& entry) {
  RememberPins(entry.pins);
  for (const v1::PinnedVersion& pin : entry.pins) {
    if (pin.chunks_size() == 0) continue;
    const std::string whose = absl::StrCat("the catalog's pin of version ", pin.version());
    BALLAST_RETURN_IF_ERROR(CheckLife(entry, PinnedChunks(pin).front().life, whose));
    break;
  }
  std::set<uint64_t> pinned;
  for (const auto& [id, chunks] : pinned_chunks_) pinned.insert(id);
  std::vector<std::shared_ptr<HeldChunk>> chunks;
  {
    absl::MutexLock lock(&mu_);
    for (const v1::PinnedVersion& pin : entry.pins) machine_->Pinned(pin);
    if (entry.promised.has_value()) BALLAST_RETURN_IF_ERROR(machine_->Replay(PromiseRecord{*entry.promised}));
  }
  BALLAST_RETURN_IF_ERROR(TakeChunks(*entry.open, &chunks));
  BALLAST_RETURN_IF_ERROR(TakeBackPins(chunks));
  if (!pinned_chunks_.empty()) {
    return model::Error(absl::StatusCode::kDataLoss, model::kDiverged,
                        absl::StrCat("the catalog pins chunk ", pinned_chunks_.begin()->first, " of job '", name_,
                                     "', which is none of this server's; run `ballastctl verify`"));
  }
  absl::MutexLock lock(&mu_);
  opening_ = std::make_unique<Opening>();
  opening_->chunks = std::move(chunks);
  const absl::Status status = machine_->LoseState(*entry.open);
  opening_.reset();
  BALLAST_RETURN_IF_ERROR(status);
  // A restore brings back the chunks that had a state.
  for (const auto& chunk : chunks_) {
    if (pinned.contains(chunk->id)) chunk->changed = entry.pins.back().version();
  }
  spdlog::warn(
      "job '{}': what came after its newest pin ({}) is lost with the server's last life (durability every-{}); "
      "the next group restores what all servers have",
      name_, entry.pins.empty() ? "none" : absl::StrCat("version ", entry.pins.back().version()),
      entry.open->spec().pin_interval());
  storage::Pass("recovery/opened");
  return absl::OkStatus();
}

std::shared_ptr<Job::Pinning> Job::BeginAdoption(int64_t version) {
  const auto begun = std::make_shared<Pinning>();
  pinning_[version] = begun;
  stage_->Post([this, version, begun] { RunAdoption(version, begun); });
  return begun;
}

void Job::RunAdoption(int64_t version, const std::shared_ptr<Pinning>& pinning) {
  std::shared_ptr<storage::ChunkStore> store;
  std::optional<v1::PinnedVersion> pin;
  absl::Status status;
  {
    absl::MutexLock lock(&mu_);
    status = Refusal();
    store = store_;
    if (const v1::PinnedVersion* const found = machine_->FindPin(version)) pin = *found;
  }
  bool harmless = true;
  if (status.ok() && !pin.has_value()) {
    status = model::Error(absl::StatusCode::kFailedPrecondition, model::kVersionGone,
                          absl::StrCat("version ", version, " was given up by the server that had pinned it"));
  }
  if (status.ok()) status = store->AdoptPin(version);
  if (status.ok()) {
    pin->set_requested(true);
    status = RewritePin(*pin);
    harmless = status.ok();
  }
  LockedOnStage([&](Replies* replies) {
    mu_.AssertHeld();
    const v1::PinnedVersion* const found = machine_->FindPin(version);
    if (status.ok() && found != nullptr) {
      v1::PinnedVersion wanted = *found;
      wanted.set_requested(true);
      machine_->Pinned(wanted);
    } else if (status.ok()) {
      status = model::Error(absl::StatusCode::kFailedPrecondition, model::kVersionGone,
                            absl::StrCat("version ", version, " was given up by the server that had pinned it"));
    }
    pinning->done = true;
    pinning->status = status;
    pinning_.erase(version);
    moved_ = true;
    if (!harmless) Fail(status, kCatalogRemedy, replies);
  });
}

absl::Status Job::RewritePin(const v1::PinnedVersion& wanted) {
  const std::string key = CatalogPrefix(name_) + CatalogPin(wanted.version());
  BALLAST_ASSIGN_OR_RETURN(const std::optional<std::string> stored, around_.catalog->Get(key));
  v1::PinnedVersion pin;
  if (!stored.has_value() || !pin.ParseFromString(*stored)) {
    return model::Error(absl::StatusCode::kDataLoss, model::kIo,
                        absl::StrCat("the catalog's '", key, "' cannot be read any more"));
  }
  pin.set_automatic(wanted.automatic());
  pin.set_automatic_since(wanted.automatic_since());
  pin.set_requested(wanted.requested());
  return around_.catalog->Put(key, pin.SerializeAsString());
}

void Job::PinDue(int64_t) {
  mu_.AssertHeld();
  (void)BeginPin(/*automatic=*/true);
}

void Job::PinChanged(const v1::PinnedVersion& pin) {
  mu_.AssertHeld();
  const int64_t version = pin.version();
  if (!pin.automatic() && !pin.requested()) {
    unpinning_.insert(version);
    stage_->Post([this, version] { RunUnpinDurably(version); });
    return;
  }
  stage_->Post([this, pin] {
    {
      absl::MutexLock lock(&mu_);
      if (!Refusal().ok()) return;
    }
    const absl::Status status = RewritePin(pin);
    if (status.ok()) return;
    LockedOnStage([&](Replies* replies) {
      mu_.AssertHeld();
      Fail(status, kCatalogRemedy, replies);
    });
  });
}

}  // namespace ballast::services
