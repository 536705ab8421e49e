// StateService over a StateServer: turns messages into calls and answers into messages, and blocks nowhere. Bytes on
// the wire are the messages of the .proto file, and generated clients speak to them.
#pragma once

#include <grpcpp/support/byte_buffer.h>

#include <functional>
#include <memory>
#include <utility>

#include "ballast/services/gateway/gate.h"
#include "ballast/services/gateway/methods.h"
#include "ballast/services/gateway/parse_room.h"
#include "ballast/services/gateway/shared_memory.h"
#include "ballast/services/server/state_server.h"
#include "ballast/storage/memory/slabs.h"
#include "ballast/v1/state_service.pb.h"

namespace ballast::services {

// Threads: any. Every call is ended exactly once, cancelled or not: gRPC keeps its reactor until then.
class StateServiceImpl final {
 public:
  // `answers`: memory for answers to pulls; an answer that finds no room there gets memory of its own. `shared`: memory
  // of clients on this host; null: all bytes go over the wire.
  StateServiceImpl(StateServer* state, const Gate* gate, ParseRoom* room, std::shared_ptr<storage::Slabs> answers,
                   SharedMemory* shared)
      : state_(state), gate_(gate), room_(room), answers_(std::move(answers)), shared_(shared) {}

  void AddTo(Methods* methods);

 private:
  // A method whose request names its job.
  template <typename Request, typename Response>
  Method OfJob(Call call, size_t bytes_max,
               std::function<void(const Visit&, Request*, const CallLimit&, Reply<Response>)> run,
               Needed needed = Needed::kUntilTheAnswer);
  void AddPins(const std::function<void(Method)>& add);
  void AddExport(const std::function<void(Method)>& add);
  void Identify(v1::IdentifyRequest* request, Reply<v1::IdentifyResponse> reply);
  // Push and Pull parse for themselves, so that payloads stay where gRPC has them.
  void Push(const Arrival& arrival, grpc::ByteBuffer* message);
  void Pull(const Arrival& arrival, const grpc::ByteBuffer& message);
  void PullIntoShared(v1::PullRequest* request, const Arrival& arrival);
  absl::StatusOr<SharedMemory::Part> SharedPart(const v1::SharedPlace& place) const;

  StateServer* const state_;
  const Gate* const gate_;
  ParseRoom* const room_;
  const std::shared_ptr<storage::Slabs> answers_;  // gRPC may hold an answer for longer than this service lives
  SharedMemory* const shared_;
};

}  // namespace ballast::services
