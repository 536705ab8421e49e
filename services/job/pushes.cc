#include "ballast/services/job/pushes.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ballast/kernels/kernels.h"
#include "ballast/proto/base/status.h"
#include "ballast/services/job_state/job_core.h"
#include "ballast/services/job_state/slice_room.h"
#include "ballast/services/journal/job_journal.h"
#include "ballast/storage/tier/dram_tier.h"

namespace ballast::services {
namespace {

// Copied, and where somebody wants that checksummed and added to the parity, piece by piece: all but the first read
// come from the cache.
constexpr size_t kCopyBytes = size_t{64} << 10;

absl::Status BadPush(absl::string_view reason, absl::string_view message) {
  return model::Error(absl::StatusCode::kInvalidArgument, reason, message);
}

absl::Status CheckSlice(const v1::PushRequest& header) {
  if (header.kind() != v1::SLICE_KIND_GRADIENT && header.kind() != v1::SLICE_KIND_VALUE) {
    return BadPush(model::kBadRequest, "a push needs kind GRADIENT or VALUE");
  }
  if (header.begin() < header.end()) return absl::OkStatus();
  return BadPush(model::kBadRange, absl::StrCat("the slice [", header.begin(), ", ", header.end(), ") of unit ",
                                                header.unit(), " is empty"));
}

// `expected`: none where nothing could damage the bytes.
absl::Status CopyChecked(const PushedBytes& from, std::optional<uint32_t> expected, PushedSlice* slice) {
  const bool checksums = expected.has_value() || slice->wants_parity || slice->receipt.logged;
  std::byte* to = slice->receipt.to;
  std::byte* summed = to;  // the parity has what is before
  const auto sum_to = [&](size_t bytes) {
    // From the copy: a client on this host may write to `from` meanwhile.
    if (slice->wants_parity && bytes > 0) slice->parity.Add(absl::MakeConstSpan(summed, bytes));
    summed += bytes;
  };
  for (const absl::Span<const std::byte> whole : from.pieces()) {
    for (size_t at = 0; at < whole.size(); at += kCopyBytes) {
      const auto piece = whole.subspan(at, kCopyBytes);
      if (checksums) {
        slice->crc32c = kernels::CopyCrc32c(piece, to, slice->crc32c);
      } else {
        std::memcpy(to, piece.data(), piece.size());
      }
      to += piece.size();
      sum_to((to - summed) / sizeof(uint64_t) * sizeof(uint64_t));  // pieces end anywhere
    }
  }
  sum_to(to - summed);
  if (slice->crc32c == expected.value_or(slice->crc32c)) return absl::OkStatus();
  return model::Error(absl::StatusCode::kUnavailable, model::kChecksum,
                      absl::StrCat("the slice's CRC32C is ", slice->crc32c, ", its header says ", *expected,
                                   ": it was damaged on its way; send it again"));
}

void Answer(const Reply<v1::PushResponse>& reply, const absl::Status& status) {
  if (status.ok()) return reply(v1::PushResponse());
  reply(status);
}

}  // namespace

Pushes::Pushes(JobCore* core, JobJournal* journal, SliceRoom* room)
    : core_(core),
      journal_(journal),
      room_(room),
      parked_bytes_(std::make_shared<SharedBound::Share>(core->around.push_bytes)) {}

void Pushes::Push(const v1::PushRequest& header, PushedBytes payload, const CallLimit& limit,
                  Reply<v1::PushResponse> reply, Checksum checksum, std::shared_ptr<model::LentGradients> lent) {
  if (const absl::Status status = CheckSlice(header); !status.ok()) return reply(status);
  core_->counters.received_bytes.fetch_add(payload.size(), std::memory_order_relaxed);
  const auto request =
      std::make_shared<const Request>(Request{header, std::move(payload), std::move(reply), checksum, std::move(lent)});
  auto admit = [this, request, limit](Replies* replies) {
    core_->mu.AssertHeld();
    Admitted admitted;
    if (!Try(*request, &admitted, replies)) return Park(*request, admitted, limit, replies);
    PostReceive(request, std::move(admitted.slice), replies);
  };
  const uint64_t payload_bytes = request->lent == nullptr ? request->payload.size() : 0;
  core_->EnterAnew(header.ByteSizeLong() + payload_bytes, std::move(admit), request->reply);
}

void Pushes::PostReceive(const RequestPtr& request, std::shared_ptr<PushedSlice> slice, Replies* replies) {
  if (slice == nullptr) return;  // it is answered
  replies->push_back(
      [this, job = core_->owner().lock(), request, slice = std::move(slice)] { Receive(request, slice); });
}

void Pushes::Park(const Request& request, const Admitted& admitted, const CallLimit& limit, Replies* replies) {
  const uint64_t bytes = request.payload.size();
  if (!parked_bytes_->Take(bytes)) {
    const SharedBound& bound = *core_->around.push_bytes;
    replies->push_back([reply = request.reply,
                        message = absl::StrCat(
                            parked_bytes_->held(),
                            " bytes of this job's slices wait for updates or room in logs at this server; a job may "
                            "hold as much as is free, which is ",
                            bound.free(), " of ", bound.max(), " bytes; send the same slice again")] {
      reply(model::Error(absl::StatusCode::kUnavailable, model::kBusy, message));
    });
    return;
  }
  // The bytes are given back when the reply that holds this guard is gone.
  std::shared_ptr<void> guard(nullptr, [parked = parked_bytes_, bytes](void*) { parked->Return(bytes); });
  const auto parked = std::make_shared<const Request>(
      Request{request.header, request.payload,
              [reply = request.reply, guard](absl::StatusOr<v1::PushResponse> r) { reply(std::move(r)); },
              request.checksum, request.lent});
  Waiter waiter;
  waiter.bytes = request.header.ByteSizeLong();
  waiter.limit = limit;
  const auto wait = std::make_shared<Wait>(admitted.wait);
  waiter.attempt = [this, parked, wait](Replies* later) {
    core_->mu.AssertHeld();
    Admitted now;
    if (!Try(*parked, &now, later)) {
      *wait = now.wait;
      return false;
    }
    PostReceive(parked, std::move(now.slice), later);
    return true;
  };
  waiter.expire = [this, parked, wait](Replies* later) {
    core_->mu.AssertHeld();
    later->push_back([reply = parked->reply, full = *wait == Wait::kJournal, leases = core_->LeaseWait()] {
      reply(model::Error(absl::StatusCode::kDeadlineExceeded, model::kBusy,
                         absl::StrCat("the deadline passed while ",
                                      full ? "the gradient log was full: chunks are flushed so that it can be cut"
                                           : "the slice's chunk was being updated, or slices before it were on "
                                             "their way to the gradient log",
                                      leases, "; send the same slice again")));
    });
  };
  waiter.refuse = [reply = parked->reply](const absl::Status& status, Replies* later) {
    later->push_back([reply, status] { reply(status); });
  };
  core_->waiting.Submit(std::move(waiter), &admitted.chunk->pushes[request.header.begin()], replies);
}

absl::Status Pushes::Prepare(const Request& request, Admitted* admitted) {
  BALLAST_ASSIGN_OR_RETURN(admitted->chunk, core_->state.Held(core_->state.plan()->slices()[admitted->index].chunk));
  BALLAST_RETURN_IF_ERROR(CheckPushed(request, *admitted->chunk));
  admitted->superseded = journal_->IsSuperseded(request.header);
  if (!admitted->superseded) admitted->wait = Reserve(request, admitted);
  return absl::OkStatus();
}

Pushes::Wait Pushes::Reserve(const Request& request, Admitted* admitted) {
  const HeldChunk& chunk = *admitted->chunk;
  const Intake::Outlook outlook = chunk.intake.LookFor(admitted->index, request.header.kind());
  if (chunk.awaits_update() || outlook.busy) return Wait::kPlace;
  std::optional<ReservedRoom::Lease> room = journal_->Reserve(request.payload.size(), outlook.logged);
  if (!room.has_value()) return Wait::kJournal;
  if (!StaysLent(request, chunk.intake) && !room_->HasBuffer(outlook.buffer_bytes)) return Wait::kBuffer;
  admitted->room = *std::move(room);
  return Wait::kNone;
}

bool Pushes::Try(const Request& request, Admitted* admitted, Replies* replies) {
  const v1::PushRequest& header = request.header;
  const auto answer = [&](const absl::Status& status) {
    replies->push_back([reply = request.reply, status] { Answer(reply, status); });
    return true;
  };
  if (const absl::Status refusal = core_->Refusal(); !refusal.ok()) return answer(refusal);
  absl::Status prepared;
  const absl::StatusOr<StepMachine::Admission> admission = core_->machine->Admit(header, [&](uint32_t index) {
    core_->mu.AssertHeld();
    admitted->index = index;
    prepared = Prepare(request, admitted);
    return prepared.ok() && !admitted->superseded && admitted->wait == Wait::kNone;
  });
  if (!admission.ok() || !prepared.ok()) return answer(admission.ok() ? prepared : admission.status());
  if (*admission == StepMachine::Admission::kHeld) ++core_->counters.duplicate_pushes;
  if (*admission == StepMachine::Admission::kHeld || admitted->superseded) return answer(absl::OkStatus());
  if (*admission == StepMachine::Admission::kWaits) {
    if (admitted->wait == Wait::kJournal) journal_->WaitForCut();
    if (admitted->wait == Wait::kBuffer) room_->WaitForBuffer(admitted->chunk);
    return false;
  }
  absl::StatusOr<Intake::Receipt> receipt = BeginReceive(admitted->chunk.get(), admitted->index, request);
  if (!receipt.ok()) return answer(core_->machine->EndPush(header, receipt.status()));
  if (receipt->logged) room_->Expect(1);
  core_->counters.steps.Pushed(header.step(), header.attempt());
  admitted->slice = std::make_shared<PushedSlice>(PushedSlice{.chunk = admitted->chunk,
                                                              .receipt = *std::move(receipt),
                                                              .bytes = request.payload.size(),
                                                              .room = std::move(admitted->room),
                                                              .wants_parity = journal_->durable()});
  return true;
}

absl::Status Pushes::CheckPushed(const Request& request, const HeldChunk& chunk) const {
  const v1::PushRequest& header = request.header;
  if (core_->state.store()->layout().lends_master() && !chunk.is_frozen()) {
    return model::Error(absl::StatusCode::kUnimplemented, model::kUnsupported,
                        "a parameter is its own master in this job: gradients are lent together with their parameters, "
                        "and values are written to the parameters themselves");
  }
  const v1::JobSpec& spec = core_->state.plan()->open().spec();
  const bool value = header.kind() == v1::SLICE_KIND_VALUE;
  const uint64_t elements = header.end() - header.begin(), bytes = request.payload.size();
  const uint64_t element_bytes = value ? sizeof(float) : core_->state.store()->layout().gradient_element_bytes();
  if (bytes % element_bytes == 0 && bytes / element_bytes == elements) return absl::OkStatus();
  return BadPush(model::kBadLength,
                 absl::StrCat("expected ", elements, " elements of ",
                              v1::Dtype_Name(value ? v1::DTYPE_F32 : spec.gradient_dtype()), " (", element_bytes,
                              " bytes each), got ", bytes, " bytes; is the dtype right? Gradients of this job are ",
                              v1::Dtype_Name(spec.gradient_dtype()), ", values DTYPE_F32"));
}

bool Pushes::StaysLent(const Request& request, const Intake& intake) const {
  return request.lent != nullptr && intake.TakesLent(request.header.kind()) && !journal_->durable() &&
         !core_->around.tiers->dram()->beside_gpu();
}

absl::StatusOr<Intake::Receipt> Pushes::BeginReceive(HeldChunk* chunk, uint32_t slice, const Request& request) {
  const v1::PushRequest& header = request.header;
  if (StaysLent(request, chunk->intake)) {
    return chunk->intake.BeginReceive(
        slice, header.kind(), header.attempt(),
        std::make_shared<SliceMemory::Buffer>(request.payload.pieces().front(), request.lent));
  }
  absl::StatusOr<Intake::Receipt> receipt = chunk->intake.BeginReceive(slice, header.kind(), header.attempt());
  if (!absl::IsResourceExhausted(receipt.status())) return receipt;
  // Gradient buffers are kept between steps; a transaction of values needs their room.
  for (const auto& other : core_->state.chunks()) {
    if (!other->awaits_update()) other->intake.ReleaseIdle();
  }
  return chunk->intake.BeginReceive(slice, header.kind(), header.attempt());
}

absl::Status Pushes::NotFinite(const HeldChunk& chunk, const Intake::Receipt& receipt, uint64_t index) const {
  const float value = reinterpret_cast<const float*>(receipt.to)[index];
  const uint64_t at = receipt.range.begin + index;
  std::string where;
  for (const model::Segment& segment : chunk.layout().segments) {
    if (at < segment.in_chunk.begin || at >= segment.in_chunk.end) continue;
    const model::Tensor& tensor = core_->state.plan()->layout().tensors()[segment.tensor];
    where = absl::StrCat("element ", chunk.layout().range.begin + at - tensor.range.begin, " of tensor '", tensor.name,
                         "'");
  }
  return BadPush(model::kBadRequest,
                 absl::StrCat(where, " is ", value, "; initial values and edits must be finite",
                              chunk.is_frozen() ? ", in the dtype in which the servers keep a frozen tensor too" : ""));
}

void Pushes::Receive(const RequestPtr& request, const std::shared_ptr<PushedSlice>& slice) {
  std::optional<uint32_t> expected;
  if (request->checksum == Checksum::kCrc32c) expected = request->header.crc32c();
  SliceMemory::Buffer* const buffer = slice->receipt.buffer.get();
  absl::Status copied;
  if (buffer->lent() != nullptr) {
    buffer->SetCrc32c(kernels::Crc32c(request->payload.pieces().front()));  // before the norms
    core_->counters.received_in_place_bytes.fetch_add(request->payload.size(), std::memory_order_relaxed);
  } else {
    copied = CopyChecked(request->payload, expected, slice.get());
  }
  const std::optional<uint64_t> infinite =
      copied.ok() ? slice->chunk->intake.FindNotFinite(slice->receipt) : std::nullopt;
  core_->Enter([this, request, slice, copied, infinite](Replies* replies) {
    core_->mu.AssertHeld();
    HeldChunk& chunk = *slice->chunk;
    const absl::Status received = infinite.has_value() ? NotFinite(chunk, slice->receipt, *infinite) : copied;
    std::vector<Intake::Completed> completed = chunk.intake.EndReceive(slice->receipt, received.ok());
    if (completed.empty()) return End(*request, received, slice.get(), replies);
    replies->push_back(
        [this, job = core_->owner().lock(), request, slice, received, completed = std::move(completed)]() mutable {
          slice->chunk->intake.ComputeNorms(slice->receipt, &completed);
          core_->Enter([this, request, slice, received, completed = std::move(completed)](Replies* later) {
            core_->mu.AssertHeld();
            slice->chunk->intake.StoreNorms(slice->receipt, completed);
            End(*request, received, slice.get(), later);
          });
        });
  });
}

void Pushes::End(const Request& request, const absl::Status& received, PushedSlice* slice, Replies* replies) {
  const absl::Status status = Record(request, received, slice, replies);
  replies->push_back([reply = request.reply, status] { Answer(reply, status); });
  core_->WakePushes(slice->chunk.get(), replies);
}

absl::Status Pushes::Record(const Request& request, absl::Status received, PushedSlice* slice, Replies* replies) {
  Intake::Receipt& receipt = slice->receipt;
  if (received.ok()) received = journal_->BeginRecord(*slice);
  const absl::Status status = core_->machine->EndPush(request.header, received, slice);
  if (!slice->appended) slice->chunk->intake.Unlogged(receipt, status.ok());
  receipt.buffer.reset();  // a logged slice's buffer belongs to its record now, or is free
  if (receipt.logged && !slice->appended) room_->Returned(replies);
  journal_->GiveBack(std::move(slice->room), replies);
  return status;
}

}  // namespace ballast::services
