#include "ballast/services/rpc/state_service.h"

#include <google/protobuf/io/coded_stream.h>
#include <grpcpp/impl/codegen/proto_utils.h>

#include <array>
#include <utility>

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
    state_->Identify(KnownFields(request), std::move(reply));
  });
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
  auto payload = std::make_shared<std::string>();
  payload->swap(*header->mutable_payload());
  header->clear_payload();
  const absl::Span<const std::byte> bytes(reinterpret_cast<const std::byte*>(payload->data()), payload->size());
  state_->Push(*header, bytes, {DeadlineOf(*context), reactor->caller()},
               [reactor, response, payload](absl::StatusOr<v1::PushResponse> answer) mutable {
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

}  // namespace ballast::services
