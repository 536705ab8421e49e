#include "ballast/services/rpc/state_service.h"

#include <google/protobuf/io/coded_stream.h>
#include <grpcpp/impl/codegen/proto_utils.h>

#include <array>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ballast/proto/model/status.h"
#include "ballast/services/rpc/call_reactor.h"
#include "ballast/services/rpc/known_fields.h"
#include "ballast/services/rpc/status_codec.h"

namespace ballast::services {
namespace {

// A job's name and a few numbers. Thousands of pulls wait at a time, and gRPC keeps the bytes of each meanwhile.
constexpr size_t kPullBytesMax = 4096;

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

template <typename Message>
bool Parse(const grpc::ByteBuffer& from, Message* to) {
  grpc::ByteBuffer buffer(from);  // shares the slices; deserialising consumes its buffer
  return grpc::SerializationTraits<Message>::Deserialize(&buffer, to).ok();
}

grpc::Status Unparsable(const char* message) {
  return ToGrpc(model::Error(absl::StatusCode::kInvalidArgument, model::kBadRequest,
                             absl::StrCat("the bytes that came are no ballast.v1.", message)));
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

grpc::ServerUnaryReactor* StateServiceImpl::Identify(grpc::CallbackServerContext* context,
                                                     const v1::IdentifyRequest* request,
                                                     v1::IdentifyResponse* response) {
  return gate_->Quick(context, {Call::kIdentify, ""}, response, [&](const Visit&, Reply<v1::IdentifyResponse> reply) {
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
  });
}

absl::StatusOr<SharedMemory::Part> StateServiceImpl::SharedPart(const v1::SharedPlace& place) const {
  if (shared_ != nullptr) return shared_->Find(place);
  return model::Error(absl::StatusCode::kUnavailable, model::kMemoryGone,
                      "this server shares no memory with clients; send the same request over the wire");
}

grpc::ServerUnaryReactor* StateServiceImpl::GetJob(grpc::CallbackServerContext* context,
                                                   const v1::GetJobRequest* request, v1::GetJobResponse* response) {
  return gate_->Quick(
      context, {Call::kGetJob, request->job()}, response,
      [&](const Visit&, Reply<v1::GetJobResponse> reply) { state_->GetJob(KnownFields(request), std::move(reply)); });
}

grpc::ServerUnaryReactor* StateServiceImpl::Fence(grpc::CallbackServerContext* context, const v1::FenceRequest* request,
                                                  v1::FenceResponse* response) {
  return gate_->Waiting(context, {Call::kFence, request->job()}, response,
                        [&](const Visit& visit, const CallLimit& limit, Reply<v1::FenceResponse> reply) {
                          gate_->Fence(visit, KnownFields(request), limit, std::move(reply));
                        });
}

grpc::ServerUnaryReactor* StateServiceImpl::Open(grpc::CallbackServerContext* context, const v1::OpenRequest* request,
                                                 v1::OpenResponse* response) {
  return gate_->Waiting(context, {Call::kOpen, request->spec().name()}, response,
                        [&](const Visit& visit, const CallLimit& limit, Reply<v1::OpenResponse> reply) {
                          gate_->Open(visit, *request, limit, std::move(reply));
                        });
}

grpc::ServerUnaryReactor* StateServiceImpl::Norm(grpc::CallbackServerContext* context, const v1::NormRequest* request,
                                                 v1::NormResponse* response) {
  return gate_->Quick(
      context, {Call::kNorm, request->job()}, response,
      [&](const Visit&, Reply<v1::NormResponse> reply) { state_->Norm(KnownFields(request), std::move(reply)); });
}

grpc::ServerUnaryReactor* StateServiceImpl::Seal(grpc::CallbackServerContext* context, const v1::SealRequest* request,
                                                 v1::SealResponse* response) {
  return gate_->Waiting(context, {Call::kSeal, request->job()}, response,
                        [&](const Visit&, const CallLimit& limit, Reply<v1::SealResponse> reply) {
                          state_->Seal(*request, limit, std::move(reply));
                        });
}

grpc::ServerUnaryReactor* StateServiceImpl::Commit(grpc::CallbackServerContext* context,
                                                   const v1::CommitRequest* request, v1::CommitResponse* response) {
  return gate_->Quick(
      context, {Call::kCommit, request->job()}, response,
      [&](const Visit&, Reply<v1::CommitResponse> reply) { state_->Commit(*request, std::move(reply)); });
}

grpc::ServerUnaryReactor* StateServiceImpl::Pin(grpc::CallbackServerContext* context, const v1::PinRequest* request,
                                                v1::PinResponse* response) {
  return gate_->Waiting(context, {Call::kPin, request->job(), request->durable()}, response,
                        [&](const Visit&, const CallLimit& limit, Reply<v1::PinResponse> reply) {
                          state_->Pin(KnownFields(request), limit, std::move(reply));
                        });
}

grpc::ServerUnaryReactor* StateServiceImpl::Unpin(grpc::CallbackServerContext* context, const v1::UnpinRequest* request,
                                                  v1::UnpinResponse* response) {
  return gate_->Waiting(context, {Call::kUnpin, request->job(), request->durable()}, response,
                        [&](const Visit&, const CallLimit& limit, Reply<v1::UnpinResponse> reply) {
                          state_->Unpin(KnownFields(request), std::move(reply), limit.caller);
                        });
}

grpc::ServerUnaryReactor* StateServiceImpl::Push(grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
                                                 grpc::ByteBuffer* response) {
  auto* reactor = new CallReactor;
  auto header = std::make_shared<v1::PushRequest>();
  if (!Parse(*request, header.get())) {
    reactor->Finish(Unparsable("PushRequest"));
    return reactor;
  }
  if (!gate_->Admit(*context, {Call::kPush, header->job()}, reactor)) return reactor;
  // The job copies the header to keep it, so the payload goes elsewhere; it lives until the reply.
  struct Payload {
    std::string sent;
    SharedMemory::Part shared;
  };
  auto payload = std::make_shared<Payload>();
  payload->sent.swap(*header->mutable_payload());
  header->clear_payload();
  absl::Span<const std::byte> bytes(reinterpret_cast<const std::byte*>(payload->sent.data()), payload->sent.size());
  if (header->has_shared()) {
    absl::StatusOr<SharedMemory::Part> part = SharedPart(header->shared());
    if (part.ok() && !bytes.empty()) {
      part = model::Error(absl::StatusCode::kInvalidArgument, model::kBadRequest,
                          "a push has its bytes in `payload` or in shared memory, and not in both");
    }
    if (!part.ok()) {
      reactor->Finish(ToGrpc(part.status()));
      return reactor;
    }
    payload->shared = *std::move(part);
    bytes = payload->shared.bytes;
    header->clear_shared();
  }
  state_->Push(*header, bytes, {DeadlineOf(*context), reactor->caller()},
               [this, reactor, response, payload](absl::StatusOr<v1::PushResponse> answer) mutable {
                 if (answer.ok() && payload->shared.region != nullptr) {
                   shared_->counters()->in_bytes.fetch_add(payload->shared.bytes.size(), std::memory_order_relaxed);
                 }
                 payload.reset();
                 // An empty PushResponse is no bytes at all.
                 const grpc::Slice nothing;
                 if (answer.ok()) *response = grpc::ByteBuffer(&nothing, 1);
                 reactor->Finish(ToGrpc(answer.status()));
               });
  return reactor;
}

grpc::ServerUnaryReactor* StateServiceImpl::Pull(grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
                                                 grpc::ByteBuffer* response) {
  auto* reactor = new CallReactor;
  if (request->Length() > kPullBytesMax) {
    reactor->Finish(ToGrpc(
        model::Error(absl::StatusCode::kInvalidArgument, model::kBadRequest,
                     absl::StrCat("a PullRequest has at most ", kPullBytesMax, " bytes, came ", request->Length()))));
    return reactor;
  }
  v1::PullRequest message;
  if (!Parse(*request, &message)) {
    reactor->Finish(Unparsable("PullRequest"));
    return reactor;
  }
  if (!gate_->Admit(*context, {Call::kPull, message.job()}, reactor)) return reactor;
  if (message.has_shared()) {
    PullIntoShared(&message, *context, reactor, response);
    return reactor;
  }
  auto payload = std::make_shared<grpc::Slice>();
  const auto allocate = [this, reactor, payload](uint64_t bytes, AnswerRoom::Lease room) -> absl::Span<std::byte> {
    reactor->Hold(std::move(room));
    *payload = AnswerSlice(answers_, bytes);
    // Nobody else has the slice yet.
    return {reinterpret_cast<std::byte*>(const_cast<uint8_t*>(payload->begin())), bytes};
  };
  state_->Pull(KnownFields(&message), {DeadlineOf(*context), reactor->caller()}, allocate,
               [reactor, response, payload](absl::StatusOr<uint32_t> crc) {
                 if (crc.ok()) *response = EncodePullResponse(*crc, *payload);
                 reactor->Finish(ToGrpc(crc.status()));
               });
  return reactor;
}

void StateServiceImpl::PullIntoShared(v1::PullRequest* request, const grpc::CallbackServerContext& context,
                                      CallReactor* reactor, grpc::ByteBuffer* response) {
  absl::StatusOr<SharedMemory::Part> part = SharedPart(request->shared());
  if (!part.ok()) return reactor->Finish(ToGrpc(part.status()));
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
  state_->Pull(KnownFields(request), {DeadlineOf(context), reactor->caller()}, allocate,
               [shared = shared_, reactor, response, target](absl::StatusOr<uint32_t> crc) {
                 if (crc.ok() && !target->fits) {
                   crc = model::Error(absl::StatusCode::kInvalidArgument, model::kBadLength,
                                      absl::StrCat("the answer has ", target->misfit.size(), " bytes, room in shared ",
                                                   "memory was for ", target->part.bytes.size()));
                 }
                 if (crc.ok()) {
                   shared->counters()->out_bytes.fetch_add(target->part.bytes.size(), std::memory_order_relaxed);
                   *response = EncodePullResponse(*crc, grpc::Slice());
                 }
                 reactor->Finish(ToGrpc(crc.status()));
               });
}

}  // namespace ballast::services
