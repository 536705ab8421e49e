#include "ballast/services/gateway/call_service.h"

#include <memory>
#include <utility>

#include "ballast/proto/base/status.h"

namespace ballast::services {
namespace {

// What is parsed in milliseconds: a few long fields, such as blobs, as fast as they are copied.
uint64_t QuicklyParsed(const grpc::ByteBuffer& message) { return 2 * message.Length() + (uint64_t{1} << 20); }

// Many small fields.
bool TakesLong(const Method& method, const grpc::ByteBuffer& message) {
  const uint64_t quick = QuicklyParsed(message);
  return method.type != nullptr && message.Length() > ParseRoom::kSmallBytesMax &&
         ParsedBytes(method.type, message, quick).value_or(0) > quick;
}

}  // namespace

void CallService::Run(const Method& method, const std::shared_ptr<Arrival>& arrival, grpc::ByteBuffer* message) {
  if (message->Length() <= method.bytes_max) {
    if (!TakesLong(method, *message)) return method.run(*arrival, message);
    // Its bytes do not wait for the parser while others have the room.
    const absl::Status fits = room_->CheckFree(QuicklyParsed(*message));
    if (!fits.ok()) return arrival->reactor->Fail(fits);
    return arrival->reactor->GoOn(&parser_, *message,
                                  [run = &method.run, arrival](grpc::ByteBuffer* bytes) { (*run)(*arrival, bytes); });
  }
  arrival->reactor->Fail(
      model::Error(absl::StatusCode::kInvalidArgument, model::kBadRequest,
                   absl::StrCat("a ", kCallNames[static_cast<size_t>(method.call)], "Request has at most ",
                                method.bytes_max, " bytes, got ", message->Length())));
}

grpc::ServerGenericBidiReactor* CallService::CreateReactor(grpc::GenericCallbackServerContext* context) {
  if (reflection_ != nullptr && Reflection::Has(context->method())) return reflection_->MakeStream(*context);
  if (Health::Has(context->method())) return health_->MakeCall(*context, context->method());
  auto* const reactor = new CallReactor(reads_, trimmer_);
  const auto found = methods_->find(context->method());
  if (found == methods_->end()) {
    reactor->Fail(model::Error(absl::StatusCode::kUnimplemented, model::kUnsupported,
                               absl::StrCat("this server has no method ", context->method().substr(0, 200))));
    return reactor;
  }
  const Method* const method = &found->second;
  absl::StatusOr<Visitor> visitor = gate_->Know(*context, method->call);
  if (!visitor.ok()) {
    reactor->Fail(visitor.status());
    return reactor;
  }
  const absl::Status known = connections_->Know(visitor->peer, visitor->turn);
  if (!known.ok()) {
    reactor->Fail(known);
    return reactor;
  }
  const bool push = method->call == Call::kPush;
  const std::string turn = visitor->turn, connection = visitor->peer;
  reactor->caller()->set_identity(turn);
  const auto arrival = std::make_shared<Arrival>(Arrival{reactor, *std::move(visitor), DeadlineOf(*context)});
  reactor->ReadMessage(turn, connection, push,
                       [this, method, arrival](grpc::ByteBuffer* message) { Run(*method, arrival, message); });
  return reactor;
}

}  // namespace ballast::services
