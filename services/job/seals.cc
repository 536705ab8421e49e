#include "ballast/services/job/seals.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "ballast/proto/base/status.h"
#include "ballast/services/job/filling.h"
#include "ballast/services/job/kept_versions.h"
#include "ballast/services/job/updates.h"
#include "ballast/services/job_state/job_core.h"
#include "ballast/services/journal/job_journal.h"

namespace ballast::services {
namespace {

// What the step waits for, as the rank hears it; made when the answer is sent.
model::SealAnswer TellPending(uint32_t rank, const JobCore& core) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) {
  ++core.around.counters->told_pending;
  return std::make_shared<model::SealAnswer::element_type>(core.machine->Pending(rank));
}

// A trainer's clock may say anything: a day is more than a step takes.
TrainerTimes TimesOf(const v1::SealRequest& request) {
  const auto time = [](uint64_t us) {
    return std::min(absl::Microseconds(static_cast<int64_t>(std::min<uint64_t>(us, 1'000'000'000'000))),
                    absl::Hours(24));
  };
  const v1::TrainerTimes& times = request.trainer_times();
  return {time(times.compute_us()), time(times.pull_wait_us()), time(times.gather_us()), time(times.push_wait_us())};
}

}  // namespace

std::optional<absl::Status> Seals::Ready(const v1::SealRequest& request) {
  const bool waits = request.wait_ms() > 0;
  BALLAST_RETURN_IF_ERROR(core_->Refusal());
  // The machine refuses it, or answers with the decision: it waits for nothing.
  if (!core_->machine->CheckPromised(request.epoch()).ok()) return absl::OkStatus();
  if (updates_->full()) {
    if (waits) return std::nullopt;
    return model::Error(absl::StatusCode::kUnavailable, model::kBusy,
                        absl::StrCat("the job's update queue is full (", updates_->queued(), " steps)",
                                     core_->LeaseWait(), "; send the same seal again"));
  }
  if (filling_->HoldsSteps()) {
    if (waits) return std::nullopt;
    return model::Error(absl::StatusCode::kUnavailable, model::kBusy,
                        "chunks are being copied to this server, and steps outrun them; send the same seal again");
  }
  BALLAST_RETURN_IF_ERROR(journal_->MakeRoomForSeal(request));
  if (request.header().kind() != v1::STEP_KIND_RESTORE) return absl::OkStatus();
  const absl::StatusOr<bool> checked = kept_->checks().Checked(request);
  BALLAST_RETURN_IF_ERROR(checked.status());
  if (*checked) return absl::OkStatus();
  if (waits) return std::nullopt;
  return model::Error(absl::StatusCode::kUnavailable, model::kBusy,
                      "the pinned version is being read; send the same seal again");
}

void Seals::NoteTimes(const v1::SealRequest& request) {
  if (request.step() <= core_->machine->committed()) return;  // it is decided: the answer says so
  const uint32_t world_size = core_->state.plan()->open().tiling().world_size();
  if (request.rank() >= world_size) return;
  core_->counters.steps.Sealed(request.step(), request.attempt(), request.rank(), world_size, TimesOf(request));
}

bool Seals::Try(Sealing* sealing, Replies* replies) {
  v1::SealRequest& request = sealing->request;
  const std::optional<absl::Status> ready = Ready(request);
  if (!ready.has_value()) return false;
  ++core_->around.counters->evaluated_seals;
  const bool agreed = core_->machine->seals_agree();
  absl::StatusOr<model::SealAnswer> answer =
      ready->ok() ? core_->machine->Seal(request) : absl::StatusOr<model::SealAnswer>(*ready);
  if (!answer.ok()) {
    // Different plans end the seals of all ranks. No other refusal changes what the others wait for.
    if (agreed != core_->machine->seals_agree()) core_->Moved();
    replies->push_back([reply = sealing->reply, status = answer.status()] { reply(status); });
    return true;
  }
  journal_->NoteSealed(request);
  NoteTimes(request);
  if (*answer == nullptr && request.wait_ms() > 0) {
    if (core_->machine->Filed(request)) {
      request.clear_header();
      request.clear_blobs();
    }
    return false;
  }
  if (*answer == nullptr) answer = TellPending(request.rank(), *core_);
  if ((**answer)->has_prepared()) core_->counters.steps.Prepared();
  replies->push_back([reply = sealing->reply, answer = *std::move(answer)] { reply(answer); });
  return true;
}

void Seals::Seal(const v1::SealRequest& request, const CallLimit& limit, Reply<model::SealAnswer> reply) {
  const auto sealing = std::make_shared<Sealing>(Sealing{request, std::move(reply)});
  const absl::Time patience = absl::Now() + absl::Milliseconds(request.wait_ms());
  Waiter waiter;
  waiter.limit = {std::min(limit.deadline, patience), limit.caller};
  waiter.attempt = [this, sealing](Replies* replies) {
    core_->mu.AssertHeld();
    return Try(sealing.get(), replies);
  };
  waiter.expire = [this, sealing, late = limit.deadline < patience](Replies* replies) {
    core_->mu.AssertHeld();
    if (late) {
      replies->push_back([sealing, status = DeadlinePassed("the step to be prepared" + core_->LeaseWait())] {
        sealing->reply(status);
      });
    } else {
      replies->push_back([sealing, answer = TellPending(sealing->request.rank(), *core_)] { sealing->reply(answer); });
    }
  };
  waiter.refuse = [sealing](const absl::Status& status, Replies* replies) {
    replies->push_back([sealing, status] { sealing->reply(status); });
  };
  auto seal = [this, sealing, waiter = std::move(waiter)](Replies* replies) mutable {
    core_->mu.AssertHeld();
    if (Try(sealing.get(), replies)) return;
    waiter.bytes = sealing->request.ByteSizeLong();  // what is left of it
    core_->SubmitToMachine(std::move(waiter), replies);
  };
  core_->EnterAnew(request.ByteSizeLong(), std::move(seal), sealing->reply);
}

}  // namespace ballast::services
