#include "ballast/services/gateway/state_service.h"

#include <google/protobuf/io/coded_stream.h>

#include <array>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ballast/proto/base/status.h"
#include "ballast/services/gateway/call_reactor.h"
#include "ballast/services/gateway/export_message.h"
#include "ballast/services/gateway/known_fields.h"
#include "ballast/services/gateway/push_message.h"

namespace ballast::services {
namespace {

// A presence bit of each tensor.
constexpr size_t kNormBytesMax = size_t{1} << 20;
// Peers, which a group's servers are: 300 bytes of each.
constexpr size_t kFenceBytesMax = size_t{4} << 20;

// Memory for an answer, out of the slabs if they have room.
grpc::Slice AnswerSlice(const std::shared_ptr<storage::Slabs>& answers, uint64_t bytes) {
  struct Cut {
    std::shared_ptr<storage::Slabs> slabs;
    absl::Span<std::byte> memory;
  };
  const absl::Span<std::byte> memory = answers->Take(bytes);
  if (memory.empty()) return grpc::Slice(bytes);
  return grpc::Slice(
      memory.data(), bytes,
      [](void* user_data) {
        const std::unique_ptr<Cut> cut(static_cast<Cut*>(user_data));
        cut->slabs->Return(cut->memory);
      },
      new Cut{answers, memory});
}

// The wire form of PullResponse around a payload: crc32c (field 1, fixed32), payload (field 15, length-delimited).
grpc::ByteBuffer EncodePullResponse(uint32_t crc, const grpc::Slice& payload) {
  using google::protobuf::io::CodedOutputStream;
  std::array<uint8_t, 16> head;
  uint8_t* at = head.data();
  *at++ = v1::PullResponse::kCrc32CFieldNumber << 3 | 5;
  at = CodedOutputStream::WriteLittleEndian32ToArray(crc, at);
  *at++ = v1::PullResponse::kPayloadFieldNumber << 3 | 2;
  at = CodedOutputStream::WriteVarint64ToArray(payload.size(), at);
  const std::array<grpc::Slice, 2> slices = {grpc::Slice(head.data(), at - head.data()), payload};
  return grpc::ByteBuffer(slices.data(), slices.size());
}

}  // namespace

template <typename Request, typename Response>
Method StateServiceImpl::OfJob(Call call, size_t bytes_max,
                               std::function<void(const Visit&, Request*, const CallLimit&, Reply<Response>)> run,
                               Needed needed) {
  return MakeMethod<Request, Response>(
      call, bytes_max, gate_, room_,
      [call](const Request& request) -> AskedCall {
        return {call, request.job()};
      },
      std::move(run), needed);
}

void StateServiceImpl::AddTo(Methods* methods) {
  const auto add = [methods](Method method) {
    const std::string path = absl::StrCat("/ballast.v1.StateService/", kCallNames[static_cast<size_t>(method.call)]);
    methods->emplace(path, std::move(method));
  };
  add(MakeMethod<v1::IdentifyRequest, v1::IdentifyResponse>(
      Call::kIdentify, kFewBytesMax, gate_, room_,
      [](const v1::IdentifyRequest&) -> AskedCall {
        return {Call::kIdentify, ""};
      },
      [this](const Visit&, v1::IdentifyRequest* request, const CallLimit&, Reply<v1::IdentifyResponse> reply) {
        Identify(request, std::move(reply));
      }));
  add(OfJob<v1::GetJobRequest, v1::GetJobResponse>(
      Call::kGetJob, kFewBytesMax,
      [this](const Visit&, v1::GetJobRequest* request, const CallLimit&, Reply<v1::GetJobResponse> reply) {
        state_->GetJob(KnownFields(request), std::move(reply));
      }));
  add(OfJob<v1::FenceRequest, v1::FenceResponse>(
      Call::kFence, kFenceBytesMax,
      [this](const Visit& visit, v1::FenceRequest* request, const CallLimit& limit, Reply<v1::FenceResponse> reply) {
        gate_->Fence(visit, KnownFields(request), limit, std::move(reply));
      }));
  add(MakeMethod<v1::OpenRequest, v1::OpenResponse>(
      Call::kOpen, kWholeBytesMax, gate_, room_,
      [](const v1::OpenRequest& request) -> AskedCall {
        return {Call::kOpen, request.spec().name()};
      },
      [this](const Visit& visit, v1::OpenRequest* request, const CallLimit& limit, Reply<v1::OpenResponse> reply) {
        gate_->Open(visit, request, limit, std::move(reply));
      }));
  add(OfJob<v1::NormRequest, v1::NormResponse>(
      Call::kNorm, kNormBytesMax,
      [this](const Visit&, v1::NormRequest* request, const CallLimit&, Reply<v1::NormResponse> reply) {
        state_->Norm(KnownFields(request), std::move(reply));
      }));
  add(OfJob<v1::SealRequest, model::SealAnswer>(
      Call::kSeal, kWholeBytesMax,
      [this](const Visit&, v1::SealRequest* request, const CallLimit& limit, Reply<model::SealAnswer> reply) {
        state_->Seal(*request, limit, std::move(reply));
      },
      Needed::kWhileItRuns));  // thousands of seals may wait
  add(OfJob<v1::CommitRequest, v1::CommitResponse>(
      Call::kCommit, kWholeBytesMax,
      [this](const Visit&, v1::CommitRequest* request, const CallLimit&, Reply<v1::CommitResponse> reply) {
        state_->Commit(*request, std::move(reply));
      }));
  AddPins(add);
  AddExport(add);
  add({Call::kPush, kWholeBytesMax, nullptr,
       [this](const Arrival& arrival, grpc::ByteBuffer* message) { Push(arrival, message); }});
  // Thousands of pulls wait at a time.
  add({Call::kPull, kFewBytesMax, nullptr,
       [this](const Arrival& arrival, grpc::ByteBuffer* message) { Pull(arrival, *message); }});
}

void StateServiceImpl::AddPins(const std::function<void(Method)>& add) {
  add(MakeMethod<v1::PinRequest, v1::PinResponse>(
      Call::kPin, kFewBytesMax, gate_, room_,
      [](const v1::PinRequest& request) -> AskedCall {
        return {Call::kPin, request.job(), request.durable(), request.holder() == 0};
      },
      [this](const Visit&, v1::PinRequest* request, const CallLimit& limit, Reply<v1::PinResponse> reply) {
        state_->Pin(KnownFields(request), limit, std::move(reply));
      }));
  add(MakeMethod<v1::UnpinRequest, v1::UnpinResponse>(
      Call::kUnpin, kFewBytesMax, gate_, room_,
      [](const v1::UnpinRequest& request) -> AskedCall {
        return {Call::kUnpin, request.job(), request.durable(), request.holder() == 0};
      },
      [this](const Visit&, v1::UnpinRequest* request, const CallLimit& limit, Reply<v1::UnpinResponse> reply) {
        state_->Unpin(KnownFields(request), std::move(reply), limit.caller);
      }));
}

void StateServiceImpl::AddExport(const std::function<void(Method)>& add) {
  add({Call::kExport, kFewBytesMax, v1::ExportRequest::descriptor(),
       [this](const Arrival& arrival, grpc::ByteBuffer* message) {
         CallReactor* const reactor = arrival.reactor;
         v1::ExportRequest request;
         if (!ParseMessage(reactor, *message, &request)) return;
         if (const auto visit = gate_->Admit(arrival.visitor, {Call::kExport, request.job()}); !visit.ok()) {
           return reactor->Fail(visit.status());
         }
         state_->Export(KnownFields(&request), arrival.limit(), [reactor](absl::StatusOr<ExportedChunk> chunk) {
           if (!chunk.ok()) return reactor->Fail(chunk.status());
           reactor->Hold(std::move(chunk->room));
           reactor->Answer(EncodeExport(*std::move(chunk)));
         });
       }});
}

void StateServiceImpl::Identify(v1::IdentifyRequest* request, Reply<v1::IdentifyResponse> reply) {
  if (request->shares_memory() && shared_ != nullptr) {
    reply = [shared = shared_, reply = std::move(reply)](absl::StatusOr<v1::IdentifyResponse> answer) {
      if (answer.ok()) {
        // Without an offer the client's bytes go over the wire.
        if (auto offer = shared->Offer(); offer.ok()) *answer->mutable_memory() = *std::move(offer);
      }
      reply(std::move(answer));
    };
  }
  state_->Identify(KnownFields(request), std::move(reply));
}

absl::StatusOr<SharedMemory::Part> StateServiceImpl::SharedPart(const v1::SharedPlace& place) const {
  if (shared_ != nullptr) return shared_->Find(place);
  return model::Error(absl::StatusCode::kUnavailable, model::kMemoryGone,
                      "this server does not share memory with clients; send the same request over the network");
}

void StateServiceImpl::Push(const Arrival& arrival, grpc::ByteBuffer* message) {
  CallReactor* const reactor = arrival.reactor;
  absl::StatusOr<std::shared_ptr<PushMessage>> push = ReadPush(message);
  if (!push.ok()) return reactor->Fail(push.status());
  const std::shared_ptr<PushMessage> kept = *push;  // with the header, whenever the answer comes
  v1::PushRequest* const header = &kept->header;
  if (const auto visit = gate_->Admit(arrival.visitor, {Call::kPush, header->job()}); !visit.ok()) {
    return reactor->Fail(visit.status());
  }
  PushedBytes bytes(std::move(kept->payload));
  auto shared = std::make_shared<SharedMemory::Part>();
  if (header->has_shared()) {
    absl::StatusOr<SharedMemory::Part> part = SharedPart(header->shared());
    if (part.ok() && bytes.size() > 0) {
      part = model::Error(absl::StatusCode::kInvalidArgument, model::kBadRequest,
                          "expected the bytes of a push in `payload` or in shared memory; this push has both");
    }
    if (!part.ok()) return reactor->Fail(part.status());
    *shared = *std::move(part);
    bytes = PushedBytes(absl::MakeConstSpan(shared->bytes));
    header->clear_shared();
  }
  state_->Push(*header, std::move(bytes), arrival.limit(),
               [this, reactor, push = *std::move(push), shared](absl::StatusOr<v1::PushResponse> answer) mutable {
                 if (answer.ok() && shared->region != nullptr) {
                   shared_->counters()->in_bytes.fetch_add(shared->bytes.size(), std::memory_order_relaxed);
                 }
                 push.reset();
                 shared.reset();
                 if (!answer.ok()) return reactor->Fail(answer.status());
                 // An empty PushResponse is no bytes at all.
                 const grpc::Slice nothing;
                 reactor->Answer(grpc::ByteBuffer(&nothing, 1));
               });
}

void StateServiceImpl::Pull(const Arrival& arrival, const grpc::ByteBuffer& bytes) {
  CallReactor* const reactor = arrival.reactor;
  v1::PullRequest message;
  if (!ParseMessage(reactor, bytes, &message)) return;
  if (const auto visit = gate_->Admit(arrival.visitor, {Call::kPull, message.job()}); !visit.ok()) {
    return reactor->Fail(visit.status());
  }
  if (message.has_shared()) return PullIntoShared(&message, arrival);
  auto payload = std::make_shared<grpc::Slice>();
  const auto allocate = [this, reactor, payload](uint64_t bytes, AnswerRoom::Lease room) -> absl::Span<std::byte> {
    reactor->Hold(std::move(room));
    *payload = AnswerSlice(answers_, bytes);
    // Nobody else has the slice yet.
    return {reinterpret_cast<std::byte*>(const_cast<uint8_t*>(payload->begin())), bytes};
  };
  state_->Pull(KnownFields(&message), arrival.limit(), allocate, [reactor, payload](absl::StatusOr<uint32_t> crc) {
    if (!crc.ok()) return reactor->Fail(crc.status());
    reactor->Answer(EncodePullResponse(*crc, *payload));
  });
}

void StateServiceImpl::PullIntoShared(v1::PullRequest* request, const Arrival& arrival) {
  CallReactor* const reactor = arrival.reactor;
  absl::StatusOr<SharedMemory::Part> part = SharedPart(request->shared());
  if (!part.ok()) return reactor->Fail(part.status());
  request->clear_shared();
  struct Target {
    SharedMemory::Part part;
    std::vector<std::byte> misfit;  // takes an answer that has another size
    bool fits = false;
  };
  auto target = std::make_shared<Target>();
  target->part = *std::move(part);
  const auto allocate = [reactor, target](uint64_t bytes, AnswerRoom::Lease room) {
    reactor->Hold(std::move(room));
    target->fits = bytes == target->part.bytes.size();
    if (target->fits) return target->part.bytes;
    target->misfit.resize(bytes);
    return absl::MakeSpan(target->misfit);
  };
  state_->Pull(KnownFields(request), arrival.limit(), allocate,
               [shared = shared_, reactor, target](absl::StatusOr<uint32_t> crc) {
                 if (crc.ok() && !target->fits) {
                   crc = model::Error(absl::StatusCode::kInvalidArgument, model::kBadLength,
                                      absl::StrCat("the answer has ", target->misfit.size(), " bytes, the shared ",
                                                   "memory has room for ", target->part.bytes.size()));
                 }
                 if (!crc.ok()) return reactor->Fail(crc.status());
                 shared->counters()->out_bytes.fetch_add(target->part.bytes.size(), std::memory_order_relaxed);
                 reactor->Answer(EncodePullResponse(*crc, grpc::Slice()));
               });
}

}  // namespace ballast::services
