// The methods of the services, with their largest messages and their answers.
#pragma once

#include <google/protobuf/message.h>
#include <grpcpp/impl/codegen/proto_utils.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "ballast/proto/base/shared_message.h"
#include "ballast/proto/model/protocol.h"
#include "ballast/services/gateway/call_reactor.h"
#include "ballast/services/gateway/gate.h"
#include "ballast/services/gateway/message_memory.h"
#include "ballast/services/gateway/message_size.h"
#include "ballast/services/gateway/parse_room.h"

namespace ballast::services {

// A call whose caller is known, and may make such calls.
struct Arrival {
  CallReactor* reactor;
  Visitor visitor;
  absl::Time deadline;
  CallLimit limit() const { return {deadline, reactor->caller()}; }
};

struct Method {
  Call call;
  size_t bytes_max;                          // of a message
  const google::protobuf::Descriptor* type;  // null: `run` parses for itself, without a look at its many fields
  // Goes on with a call, whose message has no more bytes than that.
  std::function<void(const Arrival& arrival, grpc::ByteBuffer* message)> run;
};
using Methods = absl::flat_hash_map<std::string, Method>;  // by path: "/ballast.v1.StateService/Open"

inline constexpr const char* kServices[] = {"ballast.v1.StateService", "ballast.v1.AdminService"};

// Messages of a few names and numbers, and of a whole job or step.
inline constexpr size_t kFewBytesMax = 4096;
inline constexpr size_t kWholeBytesMax = model::kMessageBytesMax + (size_t{64} << 10);

// INVALID_ARGUMENT (BAD_REQUEST): the bytes that came are no message of this type.
absl::Status Unparsed(const google::protobuf::Descriptor* type);
// False after the call was ended, because `bytes` are no such message.
bool ParseMessage(CallReactor* reactor, const grpc::ByteBuffer& bytes, google::protobuf::Message* to);

// Room for the message once it is parsed. A message that cannot fit now is not even counted.
absl::StatusOr<ParseRoom::Lease> TakeRoom(const google::protobuf::Descriptor* type, const grpc::ByteBuffer& message,
                                          ParseRoom* room);

// Sends the answer, or the error.
template <typename Response>
Reply<Response> AnswerWith(CallReactor* reactor) {
  return [reactor](absl::StatusOr<Response> answer) {
    if (!answer.ok()) return reactor->Fail(answer.status());
    grpc::ByteBuffer bytes;
    bool own_buffer = false;
    const grpc::Status written = grpc::SerializationTraits<Response>::Serialize(*answer, &bytes, &own_buffer);
    if (written.ok()) return reactor->Answer(std::move(bytes));
    reactor->Fail(absl::InternalError(written.error_message()));
  };
}
// All ranks get the same answer: its bytes are there once, whatever the number of calls.
template <>
inline Reply<model::SealAnswer> AnswerWith<model::SealAnswer>(CallReactor* reactor) {
  return [reactor](absl::StatusOr<model::SealAnswer> answer) {
    if (!answer.ok()) return reactor->Fail(answer.status());
    const std::string& bytes = (**answer).bytes();
    auto* const shared = new model::SealAnswer(*std::move(answer));
    const grpc::Slice slice(
        const_cast<char*>(bytes.data()), bytes.size(), [](void* kept) { delete static_cast<model::SealAnswer*>(kept); },
        shared);
    reactor->Answer(grpc::ByteBuffer(&slice, 1));
  };
}

// How long a call's message is needed, and counted: the answer's maker may look at the message, or `run` needs nothing
// more once run has returned. gRPC ends no call whose read is being looked at.
enum class Needed { kUntilTheAnswer, kWhileItRuns };

// A method with a message and an answer: run(visit, request, limit, reply). `asked`: what the message asks for.
template <typename Request, typename Response>
Method MakeMethod(Call call, size_t bytes_max, const Gate* gate, ParseRoom* room,
                  std::function<AskedCall(const Request&)> asked,
                  std::function<void(const Visit&, Request*, const CallLimit&, Reply<Response>)> run,
                  Needed needed = Needed::kUntilTheAnswer) {
  return {call, bytes_max, Request::descriptor(),
          [gate, room, needed, asked = std::move(asked), run = std::move(run)](const Arrival& arrival,
                                                                               grpc::ByteBuffer* message) {
            CallReactor* const reactor = arrival.reactor;
            absl::StatusOr<ParseRoom::Lease> lease = TakeRoom(Request::descriptor(), *message, room);
            if (!lease.ok()) return reactor->Fail(lease.status());
            const bool large = message->Length() > ParseRoom::kSmallBytesMax;
            auto request = large ? MakeLargeMessage<Request>() : std::make_shared<Request>();
            if (!ParseMessage(reactor, *message, request.get())) return;
            message->Clear();
            if (needed == Needed::kUntilTheAnswer) reactor->Keep(request, *std::move(lease));
            const absl::StatusOr<Visit> visit = gate->Admit(arrival.visitor, asked(*request));
            if (!visit.ok()) return reactor->Fail(visit.status());
            run(*visit, request.get(), arrival.limit(), gate->Audited(*visit, AnswerWith<Response>(reactor)));
          }};
}

}  // namespace ballast::services
