#include "ballast/services/requests/pushes.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ballast/kernels/kernels.h"
#include "ballast/proto/model/status.h"

namespace ballast::services {
namespace {

// Copied, checksummed and added to the parity piece by piece: all but the first read come from the cache.
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

// `parity`: gets the bytes too; null: nobody wants it.
absl::Status CopyChecked(absl::Span<const std::byte> from, std::byte* to, uint32_t expected,
                         storage::BlockParity* parity) {
  uint32_t crc = 0;
  for (size_t at = 0; at < from.size(); at += kCopyBytes) {
    const auto piece = from.subspan(at, kCopyBytes);
    crc = kernels::CopyCrc32c(piece, to + at, crc);
    // From the copy: a client on this host may write to `from` meanwhile.
    if (parity != nullptr) parity->Add(absl::MakeConstSpan(to + at, piece.size()));
  }
  if (crc == expected) return absl::OkStatus();
  return model::Error(absl::StatusCode::kUnavailable, model::kChecksum,
                      absl::StrCat("the slice's CRC32C is ", crc, ", its header says ", expected,
                                   ": it was damaged on its way; send it again"));
}

void Answer(const Reply<v1::PushResponse>& reply, const absl::Status& status) {
  if (status.ok()) return reply(v1::PushResponse());
  reply(status);
}

}  // namespace

void Pushes::Push(const v1::PushRequest& header, absl::Span<const std::byte> payload, const CallLimit& limit,
                  Reply<v1::PushResponse> reply) {
  if (const absl::Status status = CheckSlice(header); !status.ok()) return reply(status);
  core_->counters.received_bytes.fetch_add(payload.size(), std::memory_order_relaxed);
  const auto request = std::make_shared<const Request>(Request{header, payload, std::move(reply)});
  core_->Enter([this, request, limit](Replies* replies) {
    core_->mu.AssertHeld();
    Admitted admitted;
    if (!Try(*request, &admitted, replies)) return Park(*request, admitted.chunk.get(), limit, replies);
    PostReceive(request, std::move(admitted.slice), replies);
  });
}

void Pushes::PostReceive(const RequestPtr& request, std::shared_ptr<PushedSlice> slice, Replies* replies) {
  if (slice == nullptr) return;  // it is answered
  replies->push_back([this, job = core_->owner.lock(), request, slice = std::move(slice)] { Receive(request, slice); });
}

void Pushes::Park(const Request& request, HeldChunk* chunk, const CallLimit& limit, Replies* replies) {
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
              [reply = request.reply, guard](absl::StatusOr<v1::PushResponse> r) { reply(std::move(r)); }});
  Waiter waiter;
  waiter.bytes = request.header.ByteSizeLong();
  waiter.limit = limit;
  waiter.attempt = [this, parked](Replies* later) {
    core_->mu.AssertHeld();
    Admitted admitted;
    if (!Try(*parked, &admitted, later)) return false;
    PostReceive(parked, std::move(admitted.slice), later);
    return true;
  };
  waiter.expire = [this, parked](Replies* later) {
    core_->mu.AssertHeld();
    const bool full = !journal_->HasRoomForSlice(parked->payload.size(), /*logged=*/true);
    later->push_back([reply = parked->reply, full] {
      reply(model::Error(absl::StatusCode::kDeadlineExceeded, model::kBusy,
                         absl::StrCat("the deadline passed while ",
                                      full ? "the gradient log was full: chunks are flushed so that it can be cut"
                                           : "the slice's chunk was being updated, or slices before it were on "
                                             "their way to the gradient log",
                                      "; send the same slice again")));
    });
  };
  waiter.refuse = [reply = parked->reply](const absl::Status& status, Replies* later) {
    later->push_back([reply, status] { reply(status); });
  };
  core_->waiting.Submit(std::move(waiter), &chunk->pushes[request.header.begin()], replies);
}

bool Pushes::HasRoom(const std::shared_ptr<HeldChunk>& chunk, uint32_t slice, const Request& request) {
  const v1::PushRequest& header = request.header;
  const uint64_t start = chunk->layout.range.begin;
  if (chunk->updates_pending > 0 || chunk->intake.Busy({header.begin() - start, header.end() - start})) return false;
  if (!journal_->HasRoomForSlice(request.payload.size(), chunk->intake.Logs(header.kind()))) {
    journal_->WaitForCut();
    return false;
  }
  if (room_->HasBuffer(*chunk, slice, header.kind())) return true;
  room_->WaitForBuffer(chunk);
  return false;
}

bool Pushes::Try(const Request& request, Admitted* admitted, Replies* replies) {
  const v1::PushRequest& header = request.header;
  const auto answer = [&](const absl::Status& status) {
    replies->push_back([reply = request.reply, status] { Answer(reply, status); });
    return true;
  };
  if (const absl::Status refusal = core_->Refusal(); !refusal.ok()) return answer(refusal);
  uint32_t slice = 0;
  bool superseded = false;
  const absl::StatusOr<StepMachine::Admission> admission = core_->machine->Admit(header, [&](uint32_t index) {
    core_->mu.AssertHeld();
    slice = index;
    admitted->chunk = core_->by_index.at(core_->plan->slices()[index].chunk);
    superseded = journal_->IsSuperseded(header);
    return !superseded && HasRoom(admitted->chunk, index, request);
  });
  if (!admission.ok()) return answer(admission.status());
  if (*admission == StepMachine::Admission::kHeld) ++core_->counters.duplicate_pushes;
  if (*admission == StepMachine::Admission::kHeld || superseded) return answer(absl::OkStatus());
  if (*admission == StepMachine::Admission::kWaits) return false;
  // After epoch and step, so that a client of an older job of this name hears of these first.
  const absl::Status fits = CheckPushed(request, *admitted->chunk);
  if (!fits.ok()) return answer(core_->machine->EndPush(header, fits));
  absl::StatusOr<Intake::Receipt> receipt = BeginReceive(admitted->chunk.get(), slice, header);
  if (!receipt.ok()) return answer(core_->machine->EndPush(header, receipt.status()));
  if (receipt->logged) room_->Expect(1);
  core_->counters.steps.Pushed(header.step(), header.attempt());
  admitted->slice = std::make_shared<PushedSlice>(PushedSlice{.chunk = admitted->chunk,
                                                              .receipt = *std::move(receipt),
                                                              .bytes = request.payload.size(),
                                                              .wants_parity = journal_->logs()});
  return true;
}

absl::Status Pushes::CheckPushed(const Request& request, const HeldChunk& chunk) const {
  const v1::PushRequest& header = request.header;
  if (core_->store->layout().lends_master() && !chunk.is_frozen()) {
    return model::Error(absl::StatusCode::kUnimplemented, model::kUnsupported,
                        "a parameter is its own master in this job: gradients are lent together with their parameters, "
                        "and values are written to the parameters themselves");
  }
  const v1::JobSpec& spec = core_->plan->open().spec();
  const bool value = header.kind() == v1::SLICE_KIND_VALUE;
  const uint64_t elements = header.end() - header.begin(), bytes = request.payload.size();
  const uint64_t element_bytes = value ? sizeof(float) : core_->store->layout().gradient_element_bytes();
  if (bytes % element_bytes == 0 && bytes / element_bytes == elements) return absl::OkStatus();
  return BadPush(model::kBadLength,
                 absl::StrCat("expected ", elements, " elements of ",
                              v1::Dtype_Name(value ? v1::DTYPE_F32 : spec.gradient_dtype()), " (", element_bytes,
                              " bytes each), came ", bytes, " bytes; is the dtype right? Gradients of this job are ",
                              v1::Dtype_Name(spec.gradient_dtype()), ", values DTYPE_F32"));
}

absl::StatusOr<Intake::Receipt> Pushes::BeginReceive(HeldChunk* chunk, uint32_t slice, const v1::PushRequest& header) {
  absl::StatusOr<Intake::Receipt> receipt = chunk->intake.BeginReceive(slice, header.kind(), header.attempt());
  if (!absl::IsResourceExhausted(receipt.status())) return receipt;
  // Gradient buffers are kept between steps; a transaction of values needs their room.
  for (const auto& other : core_->chunks) {
    if (other->updates_pending == 0) other->intake.ReleaseIdle();
  }
  return chunk->intake.BeginReceive(slice, header.kind(), header.attempt());
}

absl::Status Pushes::NotFinite(const HeldChunk& chunk, const Intake::Receipt& receipt, uint64_t index) const {
  const float value = reinterpret_cast<const float*>(receipt.to)[index];
  const uint64_t at = receipt.range.begin + index;
  std::string where;
  for (const model::Segment& segment : chunk.layout.segments) {
    if (at < segment.in_chunk.begin || at >= segment.in_chunk.end) continue;
    const model::Tensor& tensor = core_->plan->layout().tensors()[segment.tensor];
    where =
        absl::StrCat("element ", chunk.layout.range.begin + at - tensor.range.begin, " of tensor '", tensor.name, "'");
  }
  return BadPush(model::kBadRequest,
                 absl::StrCat(where, " is ", value, "; initial values and edits must be finite",
                              chunk.is_frozen() ? ", in the dtype in which the servers keep a frozen tensor too" : ""));
}

void Pushes::Receive(const RequestPtr& request, const std::shared_ptr<PushedSlice>& slice) {
  const absl::Status copied = CopyChecked(request->payload, slice->receipt.to, request->header.crc32c(),
                                          slice->wants_parity ? &slice->parity : nullptr);
  const std::optional<uint64_t> infinite =
      copied.ok() ? slice->chunk->intake.FindNotFinite(slice->receipt) : std::nullopt;
  core_->Enter([this, request, slice, copied, infinite](Replies* replies) {
    core_->mu.AssertHeld();
    HeldChunk& chunk = *slice->chunk;
    const absl::Status received = infinite.has_value() ? NotFinite(chunk, slice->receipt, *infinite) : copied;
    std::vector<Intake::Completed> completed = chunk.intake.EndReceive(slice->receipt, received.ok());
    if (completed.empty()) return End(*request, received, slice.get(), replies);
    replies->push_back(
        [this, job = core_->owner.lock(), request, slice, received, completed = std::move(completed)]() mutable {
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
  // Others may have taken the room since this push began.
  if (received.ok() && !journal_->HasRoomForSlice(slice->bytes, receipt.logged)) {
    journal_->WaitForCut();
    received = model::Error(absl::StatusCode::kUnavailable, model::kBusy,
                            "the gradient log is full until chunks are flushed; send the same slice again");
  }
  if (received.ok()) received = journal_->MakeRoomForSlice(slice->bytes, receipt.logged);
  const absl::Status status = core_->machine->EndPush(request.header, received, slice);
  if (receipt.logged && !slice->appended) {
    slice->chunk->intake.Void(receipt);
    receipt.buffer.reset();
    room_->Returned(replies);
  }
  receipt.buffer.reset();  // a logged slice's buffer belongs to its record now
  return status;
}

}  // namespace ballast::services
