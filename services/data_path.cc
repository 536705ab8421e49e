// Pushes and pulls of class Job: where the bytes are.
#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ballast/kernels/kernels.h"
#include "ballast/proto/model/optimizer.h"
#include "ballast/proto/model/status.h"
#include "ballast/services/job_parts.h"

namespace ballast::services {
namespace {

// Payloads of pushes that wait for a chunk's update are memory beyond every budget.
constexpr uint64_t kWaitingPushBytesMax = uint64_t{64} << 20;
// Checksummed and copied piece by piece: the second read of a piece comes from the cache.
constexpr size_t kCopyBytes = size_t{64} << 10;

absl::Status Invalid(absl::string_view reason, absl::string_view message) {
  return model::Error(absl::StatusCode::kInvalidArgument, reason, message);
}

absl::Status CheckSlice(const v1::PushRequest& header) {
  if (header.kind() != v1::SLICE_KIND_GRADIENT && header.kind() != v1::SLICE_KIND_VALUE) {
    return Invalid(model::kBadRequest, "a push needs kind GRADIENT or VALUE");
  }
  if (header.begin() < header.end()) return absl::OkStatus();
  return Invalid(model::kBadRange, absl::StrCat("the slice [", header.begin(), ", ", header.end(), ") of unit ",
                                                header.unit(), " is empty"));
}

absl::Status CheckLength(const v1::PushRequest& header, const v1::JobSpec& spec, uint64_t gradient_bytes,
                         size_t payload_bytes) {
  const bool value = header.kind() == v1::SLICE_KIND_VALUE;
  const uint64_t elements = header.end() - header.begin(), element_bytes = value ? sizeof(float) : gradient_bytes;
  if (payload_bytes % element_bytes == 0 && payload_bytes / element_bytes == elements) return absl::OkStatus();
  return Invalid(model::kBadLength, absl::StrCat("expected ", elements, " elements of ",
                                                 v1::Dtype_Name(value ? v1::DTYPE_F32 : spec.gradient_dtype()), " (",
                                                 element_bytes, " bytes each), came ", payload_bytes,
                                                 " bytes; is the dtype right? Gradients of this job are ",
                                                 v1::Dtype_Name(spec.gradient_dtype()), ", values DTYPE_F32"));
}

absl::Status CopyChecked(absl::Span<const std::byte> from, std::byte* to, uint32_t expected) {
  uint32_t crc = 0;
  for (size_t at = 0; at < from.size(); at += kCopyBytes) {
    const auto piece = from.subspan(at, kCopyBytes);
    crc = kernels::Crc32c(piece, crc);
    std::memcpy(to + at, piece.data(), piece.size());
  }
  if (crc == expected) return absl::OkStatus();
  return model::Error(absl::StatusCode::kUnavailable, model::kChecksum,
                      absl::StrCat("the slice's CRC32C is ", crc, ", its header says ", expected,
                                   ": it was damaged on its way; send it again"));
}

}  // namespace

void Job::Push(const v1::PushRequest& header, absl::Span<const std::byte> payload, absl::Time deadline,
               Reply<v1::PushResponse> reply) {
  if (const absl::Status status = CheckSlice(header); !status.ok()) return reply(status);
  around_.counters->received_bytes.fetch_add(payload.size(), std::memory_order_relaxed);
  Waiter waiter;
  waiter.bytes = header.ByteSizeLong();
  waiter.deadline = deadline;
  waiter.attempt = [this, header, payload, reply](Replies* replies) {
    mu_.AssertHeld();
    return TryPush(header, payload, reply, replies);
  };
  Locked([&](Replies* replies) {
    mu_.AssertHeld();
    if (waiter.attempt(replies)) return;
    std::atomic<uint64_t>& parked_bytes = around_.counters->waiting_push_bytes;
    if (parked_bytes.fetch_add(payload.size()) + payload.size() > kWaitingPushBytesMax) {
      parked_bytes.fetch_sub(payload.size());
      replies->push_back([reply] {
        reply(
            model::Error(absl::StatusCode::kUnavailable, model::kBusy,
                         absl::StrCat(kWaitingPushBytesMax,
                                      " bytes of slices wait for updates or room in logs at this server, which is all "
                                      "that may; send the same slice again")));
      });
      return;
    }
    // The bytes are given back when the reply that holds this guard is gone.
    std::shared_ptr<void> bytes(nullptr, [&parked_bytes, n = payload.size()](void*) { parked_bytes.fetch_sub(n); });
    const Reply<v1::PushResponse> guarded = [reply, bytes](absl::StatusOr<v1::PushResponse> r) { reply(std::move(r)); };
    waiter.attempt = [this, header, payload, guarded](Replies* later) {
      mu_.AssertHeld();
      return TryPush(header, payload, guarded, later);
    };
    waiter.expire = [this, guarded, bytes = payload.size()](Replies* later) {
      mu_.AssertHeld();
      const auto [records, record_bytes] = NeedsOfSlice();
      const bool full = journal_ != nullptr && !journal_->HasRoomForSlice(records, record_bytes, bytes);
      later->push_back([guarded, full] {
        guarded(model::Error(absl::StatusCode::kDeadlineExceeded, model::kBusy,
                             absl::StrCat("the deadline passed while ",
                                          full ? "the gradient log was full: chunks are flushed so that it can be cut"
                                               : "the slice's chunk was being updated, or slices before it were on "
                                                 "their way to the gradient log",
                                          "; send the same slice again")));
      });
    };
    waiter.refuse = [guarded](const absl::Status& status, Replies* later) {
      later->push_back([guarded, status] { guarded(status); });
    };
    uint32_t slice = 0;
    waiting_.Submit(std::move(waiter), &FindSliceChunk(header, &slice)->pushes[header.begin()], replies);
  });
}

std::shared_ptr<HeldChunk> Job::FindSliceChunk(const v1::PushRequest& header, uint32_t* slice) const {
  if (plan_ == nullptr) return nullptr;
  const auto found = plan_->FindSlice(header.rank(), header.unit(), {header.begin(), header.end()});
  if (!found.has_value()) return nullptr;
  *slice = *found;
  const auto chunk = by_index_.find(plan_->slices()[*found].chunk);
  return chunk == by_index_.end() ? nullptr : chunk->second;
}

bool Job::TryPush(const v1::PushRequest& header, absl::Span<const std::byte> payload,
                  const Reply<v1::PushResponse>& reply, Replies* replies) {
  const auto answer = [&](absl::Status status) {
    replies->push_back([reply, status] {
      if (status.ok()) {
        reply(v1::PushResponse());
      } else {
        reply(status);
      }
    });
    return true;
  };
  if (const absl::Status refusal = Refusal(); !refusal.ok()) return answer(refusal);
  uint32_t slice = 0;
  const std::shared_ptr<HeldChunk> chunk = FindSliceChunk(header, &slice);
  if (chunk != nullptr && header.step() == machine_->committed() + 1) {
    // A push that is refused, or held here already, does not wait first.
    const absl::StatusOr<StepMachine::Admission> checked = machine_->CheckPush(header);
    if (!checked.ok() || *checked == StepMachine::Admission::kHeld) return answer(checked.status());
    if (IsSuperseded(header)) return answer(absl::OkStatus());
    const uint64_t start = chunk->layout.range.begin;
    if (chunk->updates_pending > 0 || chunk->intake.Busy({header.begin() - start, header.end() - start})) return false;
    if (!TakesSlice(payload.size(), chunk->intake.Logs(header.kind())) || !TakesBuffer(chunk, slice, header.kind()))
      return false;
  }
  const absl::StatusOr<StepMachine::Admission> admission = machine_->BeginPush(header);
  if (!admission.ok()) return answer(admission.status());
  if (*admission == StepMachine::Admission::kHeld) return answer(absl::OkStatus());
  // After epoch and step, so that a client of an older job of this name hears of these first.
  const absl::Status length =
      CheckLength(header, plan_->open().spec(), store_->layout().gradient_element_bytes(), payload.size());
  if (!length.ok()) return answer(machine_->EndPush(header, length));
  absl::StatusOr<Intake::Receipt> receipt = chunk->intake.BeginReceive(slice, header.kind(), header.attempt());
  if (absl::IsResourceExhausted(receipt.status())) {
    // Gradient buffers are kept between steps; a transaction of values needs their room.
    for (const auto& other : chunks_) {
      if (other->updates_pending == 0) other->intake.ReleaseIdle();
    }
    receipt = chunk->intake.BeginReceive(slice, header.kind(), header.attempt());
  }
  if (!receipt.ok()) return answer(machine_->EndPush(header, receipt.status()));
  if (receipt->logged) ++buffers_returning_;
  replies->push_back([self = shared_from_this(), header, payload, chunk, receipt = *std::move(receipt),
                      reply]() mutable { self->Receive(header, payload, chunk, std::move(receipt), reply); });
  return true;
}

void Job::Receive(const v1::PushRequest& header, absl::Span<const std::byte> payload,
                  const std::shared_ptr<HeldChunk>& chunk, Intake::Receipt receipt,
                  const Reply<v1::PushResponse>& reply) {
  absl::Status received = CopyChecked(payload, receipt.to, header.crc32c());
  if (received.ok()) received = Intake::CheckFinite(receipt, header.unit(), header.begin());
  std::vector<Intake::Completed> completed;
  {
    absl::MutexLock lock(&mu_);
    completed = chunk->intake.EndReceive(receipt, received.ok());
  }
  if (!completed.empty()) chunk->intake.ComputeNorms(receipt, &completed);
  Locked([&](Replies* replies) {
    mu_.AssertHeld();
    if (!completed.empty()) chunk->intake.StoreNorms(receipt, completed);
    // Others may have taken the room since this push began.
    if (received.ok() && !TakesSlice(payload.size(), receipt.logged)) {
      received = model::Error(absl::StatusCode::kUnavailable, model::kBusy,
                              "the gradient log is full until chunks are flushed; send the same slice again");
    }
    if (received.ok() && (durable_ || receipt.logged)) {
      const auto [records, record_bytes] = NeedsOfSlice();
      received = MakeJournalRoom(records, record_bytes, payload.size());
    }
    arrived_ = {chunk.get(), &receipt, payload.size()};
    const absl::Status status = machine_->EndPush(header, received);
    const bool logged = std::exchange(arrived_, {}).logged;
    if (receipt.logged && !logged) {
      chunk->intake.Void(receipt);
      receipt.buffer.reset();
      BufferReturned(replies);
    }
    receipt.buffer.reset();  // a logged slice's buffer belongs to its record now
    replies->push_back([reply, status] {
      if (status.ok()) {
        reply(v1::PushResponse());
      } else {
        reply(status);
      }
    });
    WakePushes(chunk.get(), replies);
  });
}

void Job::WakePushes(HeldChunk* chunk, Replies* replies) {
  for (auto place = chunk->pushes.begin(); place != chunk->pushes.end();) {
    waiting_.WakeInTurn(&place->second, replies);
    place = place->second.empty() ? chunk->pushes.erase(place) : std::next(place);
  }
}

// A pull whose chunk was found.
struct Job::PullPlan {
  std::shared_ptr<HeldChunk> chunk;
  std::shared_ptr<storage::ChunkStore> store;
  v1::Content content = v1::CONTENT_WORKING;
  int64_t version = 0;
  model::Range range;  // in the chunk

  bool working() const { return content == v1::CONTENT_WORKING; }
  uint64_t element_bytes() const { return working() ? store->layout().working_element_bytes() : sizeof(float); }
  absl::Status Read(bool pinned, absl::Span<std::byte> to) const;
};

absl::Status Job::PullPlan::Read(bool pinned, absl::Span<std::byte> to) const {
  const uint64_t at = chunk->store_index;
  if (working()) {
    return pinned ? store->ReadPinnedWorking(version, at, range.begin, to) : store->ReadWorking(at, range.begin, to);
  }
  const auto array = static_cast<storage::StateArray>(content - v1::CONTENT_MASTER);
  const absl::Span<float> out(reinterpret_cast<float*>(to.data()), range.size());
  return pinned ? store->ReadPinnedState(version, at, array, range.begin, out)
                : store->ReadState(at, array, range.begin, out);
}

absl::StatusOr<Job::PullPlan> Job::PlanPull(const v1::PullRequest& request) const {
  BALLAST_RETURN_IF_ERROR(Refusal());
  if (plan_ == nullptr) {
    return model::Error(absl::StatusCode::kFailedPrecondition, model::kNotOpen,
                        absl::StrCat("job '", name_, "' was not opened on server '", around_.server_id, "' yet"));
  }
  if (request.version() < 0) {
    return Invalid(model::kBadRequest, absl::StrCat("versions count from 0, asked for ", request.version()));
  }
  const int arrays = store_->layout().array_count();
  if (request.content() < v1::CONTENT_WORKING || request.content() >= v1::CONTENT_MASTER + arrays) {
    return Invalid(model::kBadRequest, absl::StrCat("content ", static_cast<int>(request.content()),
                                                    " is neither WORKING nor MASTER nor one of ", arrays - 1,
                                                    " moment(s) of ", model::Show(store_->layout().optimizer())));
  }
  BALLAST_ASSIGN_OR_RETURN(const auto pieces, plan_->layout().Cut(request.unit(), {request.begin(), request.end()}));
  if (pieces.size() != 1 || pieces[0].range != model::Range{request.begin(), request.end()}) {
    return Invalid(model::kBadRange,
                   absl::StrCat("[", request.begin(), ", ", request.end(), ") of unit ", request.unit(),
                                " must lie in one chunk, it touches ", pieces.size(), "; cut it at chunks"));
  }
  const auto chunk = by_index_.find(pieces[0].chunk);
  if (chunk == by_index_.end()) {
    const uint32_t owner = plan_->server_of(pieces[0].chunk);
    return Invalid(model::kBadRequest,
                   absl::StrCat("chunk ", pieces[0].chunk, " lives on server '",
                                plan_->open().members(owner).server_id(), "', not on '", around_.server_id, "'"));
  }
  const uint64_t start = chunk->second->layout.range.begin;
  return PullPlan{
      chunk->second, store_, request.content(), request.version(), {request.begin() - start, request.end() - start}};
}

absl::StatusOr<Job::Copy> Job::Locate(const HeldChunk& chunk, int64_t version) const {
  const int64_t current = *chunk.version;
  if (version > current) return Copy::kNotYet;
  if (version < chunk.first_version) {
    BALLAST_RETURN_IF_ERROR(machine_->StateStatus());
    return model::Error(absl::StatusCode::kFailedPrecondition, model::kVersionGone,
                        absl::StrCat("chunk ", chunk.layout.index, " of unit ", chunk.layout.unit,
                                     " was registered at version ", chunk.first_version, " and has no version ",
                                     version, "; pull only tensors that the job had then"));
  }
  if (version == current && !chunk.next_started) return Copy::kCurrent;
  if (const auto pin = pins_.find(version); pin != pins_.end() && pin->second.ready) {
    BALLAST_RETURN_IF_ERROR(pin->second.status);
    return Copy::kPinned;
  }
  return model::Error(absl::StatusCode::kFailedPrecondition, model::kVersionGone,
                      absl::StrCat("chunk ", chunk.layout.index, " of unit ", chunk.layout.unit, " is past version ",
                                   version, " (at ", current + (chunk.next_started ? 1 : 0),
                                   "), which is not pinned; pull the current version, or pin before the next step"));
}

void Job::Pull(const v1::PullRequest& request, absl::Time deadline, Allocate allocate, Reply<uint32_t> reply) {
  Replies replies;
  {
    absl::MutexLock lock(&mu_);
    absl::StatusOr<PullPlan> plan = PlanPull(request);
    if (!plan.ok()) {
      replies.push_back([reply, status = plan.status()] { reply(status); });
    } else {
      Waiter waiter;
      waiter.bytes = request.ByteSizeLong();
      waiter.deadline = deadline;
      waiter.attempt = [this, plan = *plan, allocate = std::move(allocate), reply](Replies* out) {
        mu_.AssertHeld();
        const absl::StatusOr<Copy> copy = Refusal().ok() ? Locate(*plan.chunk, plan.version) : Refusal();
        if (!copy.ok()) {
          out->push_back([reply, status = copy.status()] { reply(status); });
          return true;
        }
        if (*copy == Copy::kNotYet) return false;
        auto read = [self = shared_from_this(), plan, copy = *copy, allocate, reply] {
          self->Read(plan, copy, allocate, reply);
        };
        // Working copies lie in memory; anything else may have to wait for a disk.
        if (plan.working() && plan.store->layout().working_copies() && *copy == Copy::kCurrent) {
          out->push_back(std::move(read));
        } else {
          out->push_back(
              [executor = around_.executor, read = std::move(read)]() mutable { executor->Post(std::move(read)); });
        }
        return true;
      };
      waiter.expire = [this, chunk = plan->chunk, version = request.version(), reply](Replies* out) {
        mu_.AssertHeld();
        const std::string message = absl::StrCat("the deadline passed while chunk ", chunk->layout.index, " of unit ",
                                                 chunk->layout.unit, " was at version ", *chunk->version,
                                                 ", asked for ", version, "; is step ", version, " decided?");
        out->push_back(
            [reply, message] { reply(model::Error(absl::StatusCode::kDeadlineExceeded, model::kBusy, message)); });
      };
      waiter.refuse = [reply](const absl::Status& status, Replies* out) {
        out->push_back([reply, status] { reply(status); });
      };
      waiting_.Submit(std::move(waiter), &plan->chunk->pulls, &replies);
    }
  }
  Run(std::move(replies));
}

void Job::Read(PullPlan plan, Copy copy, const Allocate& allocate, const Reply<uint32_t>& reply) {
  const uint64_t bytes = plan.range.size() * plan.element_bytes();
  const absl::Span<std::byte> to = allocate(bytes);
  if (to.size() != bytes) {
    return reply(model::Error(absl::StatusCode::kUnavailable, model::kBusy,
                              absl::StrCat("no memory for an answer of ", bytes,
                                           " bytes while others are being sent; send the same request again")));
  }
  absl::Status status = plan.Read(copy == Copy::kPinned, to);
  if (copy == Copy::kCurrent && status.ok()) {
    // The next update may have begun during the read: the bytes count only if it had not.
    absl::StatusOr<Copy> now = Copy::kCurrent;
    {
      absl::MutexLock lock(&mu_);
      now = Locate(*plan.chunk, plan.version);
    }
    status = now.status();
    if (now.ok() && *now == Copy::kPinned) status = plan.Read(true, to);
  }
  if (!status.ok()) return reply(status);
  around_.counters->sent_bytes.fetch_add(bytes, std::memory_order_relaxed);
  reply(kernels::Crc32c(to));
}

}  // namespace ballast::services
