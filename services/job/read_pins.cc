#include "ballast/services/job/read_pins.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "ballast/proto/base/status.h"
#include "ballast/services/job_state/job_core.h"

namespace ballast::services {
namespace {

// Each pin may cost a copy of the whole job. Readers leave the group half of them.
constexpr size_t kPinsMax = 16;
constexpr size_t kLeasedPinsMax = 8;
constexpr size_t kHoldersMax = 256;  // of a version
// A reader that ends without a word holds its version no longer than this.
constexpr absl::Duration kLeaseMax = absl::Minutes(10);

// Until the next look at a hold whose pin is in the making.
constexpr absl::Duration kPatience = absl::Seconds(1);

constexpr uint64_t kGroup = 0;  // the holder

absl::Status CheckLease(const v1::PinRequest& request) {
  const absl::Duration lease = absl::Milliseconds(request.lease_ms());
  const bool group = request.holder() == kGroup;
  if (group ? request.lease_ms() == 0 : request.lease_ms() > 0 && lease <= kLeaseMax) return absl::OkStatus();
  return model::Error(
      absl::StatusCode::kInvalidArgument, model::kBadRequest,
      absl::StrCat("a pin of a reader needs a lease of at most ", absl::FormatDuration(kLeaseMax),
                   ", and a group's none; holder ", request.holder(), " asked for ", absl::FormatDuration(lease)));
}

}  // namespace

Outcome<v1::PinResponse> ReadPins::Pin(const v1::PinRequest& request, uint64_t* waiting_for) {
  const int64_t version = request.version();
  BALLAST_RETURN_IF_ERROR(CheckLease(request));
  const auto pin = pins_.find(version);
  if (*waiting_for != 0 &&
      (pin == pins_.end() || pin->second.id != *waiting_for || !pin->second.holders.contains(request.holder()))) {
    return model::Error(absl::StatusCode::kNotFound, model::kBadRequest,
                        absl::StrCat("version ", version, " was unpinned meanwhile; pin it again if it is needed"));
  }
  if (pin != pins_.end()) {
    BALLAST_RETURN_IF_ERROR(pin->second.status);  // a pin that was given up
    BALLAST_RETURN_IF_ERROR(TakePart(request, &pin->second));
    *waiting_for = pin->second.id;
    if (!pin->second.ready) return std::nullopt;
    v1::PinResponse response;
    for (const uint64_t t : pin->second.tensor_steps) response.add_tensor_steps(t);
    return response;
  }
  BALLAST_RETURN_IF_ERROR(CheckBegins(version));
  if (request.holder() != kGroup) BALLAST_RETURN_IF_ERROR(CheckReaders());
  State& begun = pins_[version];
  begun.id = ++last_id_;
  begun.tensor_steps.assign(core_->machine->tensor_steps().begin(), core_->machine->tensor_steps().end());
  BALLAST_RETURN_IF_ERROR(TakePart(request, &begun));
  *waiting_for = begun.id;
  core_->worker->Post([this, version, id = begun.id] { RunPin(version, id); });
  return std::nullopt;
}

absl::Status ReadPins::CheckBegins(int64_t version) const {
  BALLAST_RETURN_IF_ERROR(core_->machine->StateStatus());
  const int64_t committed = core_->machine->committed();
  if (version != committed || version < 0) {
    return model::Error(absl::StatusCode::kFailedPrecondition,
                        version > committed ? model::kBehind : model::kVersionGone,
                        absl::StrCat("only the last decided step can be pinned: server '", core_->around.server_id,
                                     "' is at ", committed, ", asked for ", version));
  }
  BALLAST_RETURN_IF_ERROR(core_->CheckNoneAhead());
  if (pins_.size() < kPinsMax) return absl::OkStatus();
  return model::Error(
      absl::StatusCode::kResourceExhausted, model::kBudget,
      absl::StrCat("job '", core_->name, "' holds ", pins_.size(), " pins, the most that it may hold; unpin version ",
                   pins_.begin()->first, " or another first"));
}

absl::Status ReadPins::CheckReaders() const {
  if (ReadersPins() < kLeasedPinsMax) return absl::OkStatus();
  return model::Error(absl::StatusCode::kResourceExhausted, model::kBudget,
                      absl::StrCat("readers of job '", core_->name, "' hold ", kLeasedPinsMax,
                                   " versions, the most that they may hold; try again when one has ended"));
}

absl::Status ReadPins::TakePart(const v1::PinRequest& request, State* pin) {
  const uint64_t holder = request.holder();
  if (holder == kGroup) {
    pin->holders.try_emplace(kGroup);
    return absl::OkStatus();
  }
  if (!pin->holders.contains(holder)) {
    // The group may leave the version to the readers that joined it.
    if (!pin->has_readers()) BALLAST_RETURN_IF_ERROR(CheckReaders());
    if (pin->holders.size() >= kHoldersMax) {
      return model::Error(absl::StatusCode::kResourceExhausted, model::kBudget,
                          absl::StrCat("version ", request.version(), " has ", kHoldersMax,
                                       " holders, the most that it may have; try again when one has ended"));
    }
  }
  Hold& hold = pin->holders[holder];
  hold.until = absl::Now() + absl::Milliseconds(request.lease_ms());
  if (hold.timer == 0) StartTimer(request.version(), holder, &hold);
  return absl::OkStatus();
}

void ReadPins::StartTimer(int64_t version, uint64_t holder, Hold* hold) {
  hold->timer = core_->around.deadlines->Add(hold->until, [this, job = core_->owner(), version, holder] {
    const std::shared_ptr<const void> alive = job.lock();
    if (alive == nullptr) return;
    // Not Enter: the deadlines' thread must not run replies.
    core_->LockedOnWorker([this, version, holder](Replies*) {
      core_->mu.AssertHeld();
      Lapse(version, holder);
    });
  });
}

void ReadPins::Lapse(int64_t version, uint64_t holder) {
  const auto pin = pins_.find(version);
  if (pin == pins_.end()) return;
  const auto hold = pin->second.holders.find(holder);
  if (hold == pin->second.holders.end()) return;
  // A pin in the making waits for updates. Once it is made, its request is evaluated again, and that begins the lease.
  if (!pin->second.ready && core_->Refusal().ok()) hold->second.until = absl::Now() + kPatience;
  if (hold->second.until > absl::Now()) return StartTimer(version, holder, &hold->second);
  Unpin(version, holder);
}

size_t ReadPins::ReadersPins() const {
  return static_cast<size_t>(
      std::count_if(pins_.begin(), pins_.end(), [](const auto& pinned) { return pinned.second.has_readers(); }));
}

void ReadPins::Unpin(int64_t version, uint64_t holder) {
  const auto pin = pins_.find(version);
  if (pin == pins_.end()) return;
  const auto hold = pin->second.holders.find(holder);
  if (hold == pin->second.holders.end()) return;
  if (hold->second.timer != 0) core_->around.deadlines->Cancel(hold->second.timer);
  pin->second.holders.erase(hold);
  if (!pin->second.ready) core_->Moved();  // the holder's request may still wait
  if (!pin->second.holders.empty()) return;
  pins_.erase(pin);
  core_->worker->Post([this, version] { RunUnpin(version); });
}

absl::StatusOr<bool> ReadPins::Readable(int64_t version) const {
  const auto pin = pins_.find(version);
  if (pin == pins_.end() || !pin->second.ready) return false;
  BALLAST_RETURN_IF_ERROR(pin->second.status);
  return true;
}

std::vector<int64_t> ReadPins::Versions() const {
  std::vector<int64_t> versions;
  for (const auto& [version, pin] : pins_) {
    if (pin.ready && pin.status.ok()) versions.push_back(version);
  }
  return versions;
}

void ReadPins::RunPin(int64_t version, uint64_t id) {
  const Working working(&core_->counters.steps.clock(), Stage::kPin);
  std::shared_ptr<storage::ChunkStore> store;
  {
    JobMutexLock lock(&core_->mu);
    if (!core_->Refusal().ok()) return;
    store = core_->state.store();
  }
  const absl::Status status = store == nullptr ? absl::OkStatus() : store->Pin(version);
  core_->LockedOnWorker([&](Replies* replies) {
    core_->mu.AssertHeld();
    const auto pin = pins_.find(version);
    if (pin == pins_.end() || pin->second.id != id) return;
    pin->second.status = status;
    pin->second.ready = true;
    core_->Moved();
    if (status.ok()) return;
    core_->WakeMachine(replies);
    pins_.erase(version);
  });
}

void ReadPins::RunUnpin(int64_t version) {
  const Working working(&core_->counters.steps.clock(), Stage::kPin);
  std::shared_ptr<storage::ChunkStore> store;
  {
    JobMutexLock lock(&core_->mu);
    store = core_->state.store();
  }
  if (store != nullptr) store->Unpin(version);
}

bool ReadPins::GiveUpOldest(storage::ChunkStore* store, const absl::Status& cause) {
  int64_t version = -1;
  {
    JobMutexLock lock(&core_->mu);
    State* yields = nullptr;
    for (auto& [pinned, pin] : pins_) {
      const bool leased = !pin.holders.contains(kGroup);
      if (!pin.ready || !pin.status.ok() || (yields != nullptr && !leased)) continue;
      version = pinned;
      yields = &pin;
      if (leased) break;
    }
    if (yields != nullptr) {
      yields->status = model::Error(absl::StatusCode::kFailedPrecondition, model::kVersionGone,
                                    absl::StrCat("the pin of version ", version,
                                                 " was given up so that training could go on: ", cause.message()));
    }
  }
  if (version < 0) return false;
  store->Unpin(version);
  return true;
}

}  // namespace ballast::services
