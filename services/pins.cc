// Pins of class Job for reading: versions that stay readable while later steps are applied, until the server ends.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ballast/proto/model/status.h"
#include "ballast/services/job_parts.h"

namespace ballast::services {
namespace {

// Each pin may cost a copy of the whole job.
constexpr size_t kPinsMax = 16;

}  // namespace

void Job::Pin(const v1::PinRequest& request, absl::Time deadline, Reply<v1::PinResponse> reply) {
  if (request.durable()) return PinDurably(request, deadline, std::move(reply));
  Ask<v1::PinResponse>(
      request.ByteSizeLong(),
      [this, version = request.version(), pin = std::make_shared<uint64_t>(0)] {
        mu_.AssertHeld();
        return TryPin(version, pin.get());
      },
      deadline, absl::StrCat("version ", request.version(), " of all chunks"), std::move(reply));
}

Outcome<v1::PinResponse> Job::TryPin(int64_t version, uint64_t* waiting_for) {
  const auto pin = pins_.find(version);
  if (*waiting_for != 0 && (pin == pins_.end() || pin->second.id != *waiting_for)) {
    return model::Error(absl::StatusCode::kNotFound, model::kBadRequest,
                        absl::StrCat("version ", version, " was unpinned meanwhile; pin it again if it is needed"));
  }
  if (pin != pins_.end()) {
    *waiting_for = pin->second.id;
    if (!pin->second.ready) return std::nullopt;
    BALLAST_RETURN_IF_ERROR(pin->second.status);
    v1::PinResponse response;
    for (const uint64_t t : pin->second.tensor_steps) response.add_tensor_steps(t);
    return response;
  }
  BALLAST_RETURN_IF_ERROR(machine_->StateStatus());
  const int64_t committed = machine_->committed();
  if (version != committed || version < 0) {
    return model::Error(absl::StatusCode::kFailedPrecondition,
                        version > committed ? model::kBehind : model::kVersionGone,
                        absl::StrCat("only the last decided step can be pinned: server '", around_.server_id,
                                     "' is at ", committed, ", asked for ", version));
  }
  BALLAST_RETURN_IF_ERROR(CheckNoneAhead());
  if (pins_.size() >= kPinsMax) {
    return model::Error(
        absl::StatusCode::kResourceExhausted, model::kBudget,
        absl::StrCat("job '", name_, "' holds ", pins_.size(), " pins, which is all that it may; unpin version ",
                     pins_.begin()->first, " or another first"));
  }
  PinState& begun = pins_[version];
  begun.id = ++last_pin_;
  begun.tensor_steps.assign(machine_->tensor_steps().begin(), machine_->tensor_steps().end());
  *waiting_for = begun.id;
  stage_->Post([this, version, id = begun.id] { RunPin(version, id); });
  return std::nullopt;
}

absl::Status Job::CheckNoneAhead() const {
  const int64_t committed = machine_->committed();
  const bool ahead =
      std::any_of(chunks_.begin(), chunks_.end(), [&](const auto& chunk) { return *chunk->version > committed; });
  if (!ahead) return absl::OkStatus();
  return model::Error(absl::StatusCode::kUnavailable, model::kBusy,
                      absl::StrCat("server '", around_.server_id, "' lost the decision of step ", committed + 1,
                                   " and has chunks that it changed; pin once that is committed again"));
}

void Job::Unpin(const v1::UnpinRequest& request, Reply<v1::UnpinResponse> reply) {
  if (request.durable()) return UnpinDurably(request, std::move(reply));
  Ask<v1::UnpinResponse>(
      request.ByteSizeLong(),
      [this, version = request.version()]() -> Outcome<v1::UnpinResponse> {
        mu_.AssertHeld();
        if (pins_.erase(version) > 0) {
          stage_->Post([this, version] { RunUnpin(version); });
          moved_ = true;  // the pin's own request may still wait
        }
        return v1::UnpinResponse();
      },
      absl::InfiniteFuture(), "", std::move(reply));
}

void Job::RunPin(int64_t version, uint64_t id) {
  std::shared_ptr<storage::ChunkStore> store;
  {
    absl::MutexLock lock(&mu_);
    if (!Refusal().ok()) return;
    store = store_;
  }
  const absl::Status status = store == nullptr ? absl::OkStatus() : store->Pin(version);
  LockedOnStage([&](Replies* replies) {
    mu_.AssertHeld();
    const auto pin = pins_.find(version);
    if (pin == pins_.end() || pin->second.id != id) return;
    pin->second.status = status;
    pin->second.ready = true;
    moved_ = true;
    if (status.ok()) return;
    waiting_.Wake(&machine_queue_, replies);
    pins_.erase(version);
  });
}

void Job::RunUnpin(int64_t version) {
  std::shared_ptr<storage::ChunkStore> store;
  {
    absl::MutexLock lock(&mu_);
    store = store_;
  }
  if (store != nullptr) store->Unpin(version);
}

}  // namespace ballast::services
