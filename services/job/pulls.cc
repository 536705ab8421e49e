#include "ballast/services/job/pulls.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "ballast/kernels/kernels.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/model/optimizer.h"
#include "ballast/services/job/damaged_chunks.h"
#include "ballast/services/job/read_pins.h"
#include "ballast/services/job/waiter.h"
#include "ballast/services/job_state/job_core.h"

namespace ballast::services {
namespace {

absl::Status BadPull(absl::string_view reason, absl::string_view message) {
  return model::Error(absl::StatusCode::kInvalidArgument, reason, message);
}

}  // namespace

Pulls::Pulls(JobCore* core, ReadPins* pins, DamagedChunks* damaged)
    : core_(core),
      pins_(pins),
      damaged_(damaged),
      room_(core->around.answer_room, core->around.answers),
      reads_(core->around.foundation->MakeExecutor(core->around.read_threads)) {}

absl::Status Pulls::Plan::Read(bool pinned, absl::Span<std::byte> to, uint32_t* crc32c) const {
  if (working() && !pinned) return store->ReadWorking(chunk->store_index, range.begin, to, crc32c);
  BALLAST_RETURN_IF_ERROR(ReadOther(pinned, to));
  if (crc32c != nullptr) *crc32c = kernels::Crc32c(to);
  return absl::OkStatus();
}

absl::Status Pulls::Plan::ReadOther(bool pinned, absl::Span<std::byte> to) const {
  const uint64_t at = chunk->store_index;
  if (working()) return store->ReadPinnedWorking(version, at, range.begin, to);
  const auto array = static_cast<storage::StateArray>(content - v1::CONTENT_MASTER);
  const absl::Span<float> out(reinterpret_cast<float*>(to.data()), range.size());
  return pinned ? store->ReadPinnedState(version, at, array, range.begin, out)
                : store->ReadState(at, array, range.begin, out);
}

absl::StatusOr<Pulls::Plan> Pulls::PlanOf(const v1::PullRequest& request) const {
  BALLAST_RETURN_IF_ERROR(core_->Refusal());
  if (core_->state.plan() == nullptr) {
    return model::Error(
        absl::StatusCode::kFailedPrecondition, model::kNotOpen,
        absl::StrCat("job '", core_->name, "' was not opened on server '", core_->around.server_id, "' yet"));
  }
  if (request.version() < 0) {
    return BadPull(model::kBadRequest, absl::StrCat("versions count from 0, asked for ", request.version()));
  }
  const int arrays = core_->state.store()->layout().array_count();
  if (request.content() < v1::CONTENT_WORKING || request.content() >= v1::CONTENT_MASTER + arrays) {
    return BadPull(
        model::kBadRequest,
        absl::StrCat("content ", static_cast<int>(request.content()), " is neither WORKING nor MASTER nor one of ",
                     arrays - 1, " moment(s) of ", model::Show(core_->state.store()->layout().optimizer())));
  }
  BALLAST_ASSIGN_OR_RETURN(const auto pieces,
                           core_->state.plan()->layout().Cut(request.unit(), {request.begin(), request.end()}));
  if (pieces.size() != 1 || pieces[0].range != model::Range{request.begin(), request.end()}) {
    return BadPull(model::kBadRange,
                   absl::StrCat("[", request.begin(), ", ", request.end(), ") of unit ", request.unit(),
                                " must lie in one chunk, it touches ", pieces.size(), "; cut it at chunks"));
  }
  const std::shared_ptr<HeldChunk> chunk = core_->state.Find(pieces[0].chunk);
  if (chunk == nullptr) {
    return BadPull(model::kBadRequest, absl::StrCat("chunk ", pieces[0].chunk, " lives on server ",
                                                    core_->state.plan()->ShowServersOf(pieces[0].chunk), ", not on '",
                                                    core_->around.server_id, "'"));
  }
  if (request.content() > v1::CONTENT_MASTER && chunk->form != storage::StateForm::kFull) {
    return BadPull(model::kBadRequest,
                   absl::StrCat("[", request.begin(), ", ", request.end(), ") of unit ", request.unit(), " is of ",
                                chunk->is_frozen() ? "frozen" : "assisted",
                                " tensors, which have no moments; pull WORKING or MASTER"));
  }
  const uint64_t start = chunk->layout().range.begin;
  const kernels::Dtype dtype = core_->state.store()->layout().optimizer().working;
  const uint64_t grain = request.content() == v1::CONTENT_WORKING ? kernels::GrainOf(dtype) : 1;
  if ((request.begin() - start) % grain != 0) {
    return BadPull(model::kBadRange,
                   absl::StrCat("[", request.begin(), ", ", request.end(), ") of unit ", request.unit(),
                                " begins amid a block: ", model::NameOf(dtype), " working parameters have a scale for ",
                                "each ", grain, " elements; begin at a multiple of that, the answer has whole blocks"));
  }
  return Plan{chunk,
              core_->state.store(),
              request.content(),
              request.version(),
              {request.begin() - start, request.end() - start}};
}

absl::StatusOr<Pulls::Copy> Pulls::Locate(const HeldChunk& chunk, int64_t version) const {
  if (!chunk.filled() && core_->machine->IsHolder(chunk.layout().index)) {
    return model::Error(
        absl::StatusCode::kFailedPrecondition, model::kNotFilled,
        absl::StrCat("what server '", core_->around.server_id, "' had of chunk ", chunk.layout().index, " of unit ",
                     chunk.layout().unit, " is damaged, and it copies the chunk; pull from ",
                     core_->state.plan()->ShowServersOf(chunk.layout().index)));
  }
  if (!chunk.filled()) {
    return BadPull(model::kBadRequest,
                   absl::StrCat("server '", core_->around.server_id, "' does not have chunk ", chunk.layout().index,
                                " of unit ", chunk.layout().unit, ": it copies the chunk, or has given it up; pull ",
                                "from server ", core_->state.plan()->ShowServersOf(chunk.layout().index)));
  }
  const int64_t current = *chunk.version();
  if (version > current) return Copy::kNotYet;
  if (version < chunk.first_version()) {
    BALLAST_RETURN_IF_ERROR(core_->machine->StateStatus());
    return model::Error(absl::StatusCode::kFailedPrecondition, model::kVersionGone,
                        absl::StrCat("chunk ", chunk.layout().index, " of unit ", chunk.layout().unit,
                                     " was registered at version ", chunk.first_version(), " and has no version ",
                                     version, "; pull only tensors that the job had then"));
  }
  if (version == current && !chunk.update_runs()) return Copy::kCurrent;
  BALLAST_ASSIGN_OR_RETURN(const bool pinned, pins_->Readable(version));
  if (pinned) return Copy::kPinned;
  return model::Error(absl::StatusCode::kFailedPrecondition, model::kVersionGone,
                      absl::StrCat("chunk ", chunk.layout().index, " of unit ", chunk.layout().unit,
                                   " is past version ", version, " (at ", current + (chunk.update_runs() ? 1 : 0),
                                   "), which is not pinned; pull the current version, or pin before the next step"));
}

void Pulls::Pull(const v1::PullRequest& request, const CallLimit& limit, Allocate allocate, Reply<uint32_t> reply,
                 Checksum checksum) {
  Begin(request, {.limit = limit, .allocate = std::move(allocate), .reply = std::move(reply), .checksum = checksum});
}

void Pulls::Lease(const v1::PullRequest& request, const CallLimit& limit, Reply<model::LeasedBytes> reply) {
  Reply<uint32_t> failed = [reply](const absl::StatusOr<uint32_t>& answer) { reply(answer.status()); };
  Begin(request, {.limit = limit, .reply = std::move(failed), .lease = std::move(reply)});
}

void Pulls::Begin(const v1::PullRequest& request, Request asked) {
  const Reply<uint32_t> reply = asked.reply;
  asked.bytes = request.ByteSizeLong();
  auto look = [this, request, pull = std::make_shared<Request>(std::move(asked))](Replies* replies) {
    core_->mu.AssertHeld();
    absl::StatusOr<Plan> plan = PlanOf(request);
    if (!plan.ok()) {
      return replies->push_back([reply = pull->reply, status = plan.status()] { reply(status); });
    }
    pull->plan = *plan;
    Park(
        pull,
        [this, pull](Replies* out) {
          core_->mu.AssertHeld();
          return Try(pull, out);
        },
        [this, chunk = plan->chunk, version = request.version()] {
          core_->mu.AssertHeld();
          return absl::StrCat("chunk ", chunk->layout().index, " of unit ", chunk->layout().unit, " was at version ",
                              *chunk->version(), ", asked for ", version, core_->LeaseWait(), "; is step ", version,
                              " decided?");
        },
        &plan->chunk->pulls, replies);
  };
  core_->EnterAnew(request.ByteSizeLong(), std::move(look), reply);
}

void Pulls::Park(const RequestPtr& pull, std::function<bool(Replies*)> ready, std::function<std::string()> waits_for,
                 Waiting::Queue* queue, Replies* replies) {
  core_->waiting.Submit(MakeWaiter(pull->bytes, pull->limit, pull->reply, std::move(ready), std::move(waits_for)),
                        queue, replies);
}

bool Pulls::Try(const RequestPtr& pull, Replies* replies) {
  const absl::Status refusal = core_->Refusal();
  const Plan& plan = pull->plan;
  const absl::StatusOr<Copy> copy = refusal.ok() ? Locate(*plan.chunk, plan.version) : refusal;
  if (!copy.ok()) {
    replies->push_back([reply = pull->reply, status = copy.status()] { reply(status); });
    return true;
  }
  if (*copy == Copy::kNotYet) return false;
  if (pull->lease) {
    // The reader may give it back before this closure is gone.
    replies->push_back([reply = pull->lease, leased = LeaseOf(plan, *copy)]() mutable { reply(std::move(leased)); });
    return true;
  }
  if (pull->room == nullptr) pull->room = room_.Take(plan.bytes());
  if (pull->room == nullptr) {
    replies->push_back([this, job = core_->owner().lock(), pull] { AwaitRoom(pull); });
    return true;
  }
  // Working copies lie in memory; anything else may have to wait for a disk.
  if (plan.working() && *copy == Copy::kCurrent && plan.store->has_working_copy(plan.chunk->store_index)) {
    replies->push_back([this, job = core_->owner().lock(), pull, copy = *copy] { Read(pull, copy); });
    return true;
  }
  if (const absl::Status posted = PostRead(pull, *copy); !posted.ok()) {
    replies->push_back([reply = pull->reply, posted] { reply(posted); });
  }
  return true;
}

model::LeasedBytes Pulls::LeaseOf(const Plan& plan, Copy copy) {
  if (!plan.working() || copy != Copy::kCurrent) return {};
  // First the lease: nobody drops the copy afterwards.
  std::shared_ptr<const void> held = core_->leases->Take(plan.chunk, plan.store);
  const absl::Span<const std::byte> whole = plan.store->working_copy(plan.chunk->store_index);
  if (held == nullptr || whole.empty()) return {};
  return {whole.subspan(plan.BytesOf(plan.range.begin), plan.bytes()), std::move(held)};
}

absl::Status Pulls::PostRead(const RequestPtr& pull, Copy copy) {
  BALLAST_RETURN_IF_ERROR(core_->Refusal());  // the threads may have ended
  // A read that is queued counts as a request that waits, so the queue is bounded.
  BALLAST_ASSIGN_OR_RETURN(std::shared_ptr<void> place, core_->waiting.places()->Hold(sizeof(Plan)));
  reads_->Post([this, pull, copy, place = std::move(place)]() mutable {
    place = nullptr;
    // The end of the job does not wait for every read that is queued.
    if (const absl::Status status = core_->Interrupted(); !status.ok()) return pull->reply(status);
    Read(pull, copy);
  });
  return absl::OkStatus();
}

void Pulls::AwaitRoom(const RequestPtr& pull) {
  core_->Enter([this, pull](Replies* replies) {
    core_->mu.AssertHeld();
    // Whoever grants the room keeps neither the job nor the pull: if both are gone, the room goes to the next.
    pull->ticket = room_.Await(
        pull->plan.bytes(), [this, job = core_->owner(), waits = std::weak_ptr<Request>(pull)](AnswerRoom::Lease room) {
          const std::shared_ptr<const void> alive = job.lock();
          const RequestPtr granted = waits.lock();
          if (alive == nullptr || granted == nullptr) return;
          core_->Enter([this, granted, room = std::move(room)](Replies* out) mutable {
            core_->mu.AssertHeld();
            granted->room = std::move(room);
            core_->waiting.Wake(&awaiting_room_, out);  // grants may come in another order than the pulls
          });
        });
    Park(
        pull,
        [this, pull](Replies* out) {
          core_->mu.AssertHeld();
          return (pull->room != nullptr || !core_->Refusal().ok()) && Try(pull, out);
        },
        [bytes = pull->plan.bytes()] {
          return absl::StrCat("the answer of ", bytes,
                              " bytes waited for room: other answers are being sent to this job's trainers, or to "
                              "others'; are they reading?");
        },
        &awaiting_room_, replies);
  });
}

void Pulls::Read(const RequestPtr& pull, Copy copy) {
  const Plan& plan = pull->plan;
  if (pull->to.empty()) {
    pull->to = pull->allocate(plan.bytes(), pull->room);
    pull->room.reset();  // the answer has it
  }
  absl::Status status =
      plan.Read(copy == Copy::kPinned, pull->to, pull->checksum == Checksum::kNone ? nullptr : &pull->crc32c);
  if (copy == Copy::kCurrent) status = damaged_->Found(plan.chunk, status);
  if (copy != Copy::kCurrent || !status.ok()) return Answer(pull, status);
  // The next update may have begun during the read: the bytes count only if it had not.
  core_->Enter([this, pull](Replies* replies) {
    core_->mu.AssertHeld();
    const absl::StatusOr<Copy> now = Locate(*pull->plan.chunk, pull->plan.version);
    const bool pinned = now.ok() && *now == Copy::kPinned;
    const absl::Status status = pinned ? PostRead(pull, Copy::kPinned) : now.status();
    if (pinned && status.ok()) return;
    replies->push_back([this, job = core_->owner().lock(), pull, status] { Answer(pull, status); });
  });
}

void Pulls::Answer(const RequestPtr& pull, const absl::Status& status) {
  if (!status.ok()) return pull->reply(status);
  core_->counters.sent_bytes.fetch_add(pull->to.size(), std::memory_order_relaxed);
  pull->reply(pull->crc32c);
}

}  // namespace ballast::services
