// The parts that all services share: a call's deadline, its client's end, its answer.
#pragma once

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "ballast/services/foundation/caller.h"
#include "ballast/services/foundation/reply.h"
#include "ballast/services/rpc/status_codec.h"

namespace ballast::services {

// A little before the client's own deadline: otherwise the client's gRPC ends the call first, and the client never
// hears what the server was waiting for.
inline absl::Time DeadlineOf(const grpc::CallbackServerContext& context) {
  const std::chrono::system_clock::time_point point = context.deadline();
  if (point == std::chrono::system_clock::time_point::max()) return absl::InfiniteFuture();
  const absl::Time deadline = absl::FromChrono(point);
  const absl::Duration left = std::max(deadline - absl::Now(), absl::ZeroDuration());
  return deadline - std::min(left / 10, absl::Milliseconds(200));
}

// A call's reactor. DefaultReactor tells neither that the client is gone, nor the end of the call, until which an
// answer takes up room.
class CallReactor final : public grpc::ServerUnaryReactor {
 public:
  const std::shared_ptr<Caller>& caller() const { return caller_; }
  void Hold(AnswerRoom::Lease room) { room_ = std::move(room); }
  void OnCancel() override { caller_->Leave(); }
  void OnDone() override { delete this; }

 private:
  const std::shared_ptr<Caller> caller_ = std::make_shared<Caller>();
  AnswerRoom::Lease room_;
};

// Fills `response` and finishes. Both stay valid until the reactor is done, also when the client went away.
template <typename Response>
Reply<Response> FinishWith(grpc::ServerUnaryReactor* reactor, Response* response) {
  return [reactor, response](absl::StatusOr<Response> answer) {
    if (answer.ok()) *response = std::move(*answer);
    reactor->Finish(ToGrpc(answer.status()));
  };
}

}  // namespace ballast::services
