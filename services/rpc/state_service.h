// StateService over a StateServer: turns messages into calls and answers into messages, and blocks nowhere.
#pragma once

#include <grpcpp/support/byte_buffer.h>

#include <memory>
#include <utility>

#include "ballast/services/rpc/gate.h"
#include "ballast/services/server/state_server.h"
#include "ballast/services/shared_memory/shared_memory.h"
#include "ballast/storage/memory/slabs.h"
#include "ballast/v1/state_service.grpc.pb.h"

namespace ballast::services {

// Pull and Push are raw, so that their payloads are neither zeroed nor copied more than needed. Their bytes on the wire
// are the messages of the .proto file.
using StateServiceBase = v1::StateService::WithCallbackMethod_Identify<v1::StateService::WithCallbackMethod_GetJob<
    v1::StateService::WithCallbackMethod_Fence<v1::StateService::WithCallbackMethod_Open<
        v1::StateService::WithRawCallbackMethod_Push<v1::StateService::WithCallbackMethod_Norm<
            v1::StateService::WithCallbackMethod_Seal<v1::StateService::WithCallbackMethod_Commit<
                v1::StateService::WithRawCallbackMethod_Pull<v1::StateService::WithCallbackMethod_Pin<
                    v1::StateService::WithCallbackMethod_Unpin<v1::StateService::Service>>>>>>>>>>>;

// Threads: any. Every call finishes its reactor exactly once, cancelled or not: gRPC keeps the reactor until then.
class StateServiceImpl final : public StateServiceBase {
 public:
  // `answers`: memory for answers to pulls; an answer that finds no room there gets memory of its own. `shared`: memory
  // of clients on this host; null: all bytes go over the wire.
  StateServiceImpl(StateServer* state, const Gate* gate, std::shared_ptr<storage::Slabs> answers, SharedMemory* shared)
      : state_(state), gate_(gate), answers_(std::move(answers)), shared_(shared) {}

  grpc::ServerUnaryReactor* Identify(grpc::CallbackServerContext*, const v1::IdentifyRequest*,
                                     v1::IdentifyResponse*) override;
  grpc::ServerUnaryReactor* GetJob(grpc::CallbackServerContext*, const v1::GetJobRequest*,
                                   v1::GetJobResponse*) override;
  grpc::ServerUnaryReactor* Fence(grpc::CallbackServerContext*, const v1::FenceRequest*, v1::FenceResponse*) override;
  grpc::ServerUnaryReactor* Open(grpc::CallbackServerContext*, const v1::OpenRequest*, v1::OpenResponse*) override;
  grpc::ServerUnaryReactor* Push(grpc::CallbackServerContext*, const grpc::ByteBuffer*, grpc::ByteBuffer*) override;
  grpc::ServerUnaryReactor* Norm(grpc::CallbackServerContext*, const v1::NormRequest*, v1::NormResponse*) override;
  grpc::ServerUnaryReactor* Seal(grpc::CallbackServerContext*, const v1::SealRequest*, v1::SealResponse*) override;
  grpc::ServerUnaryReactor* Commit(grpc::CallbackServerContext*, const v1::CommitRequest*,
                                   v1::CommitResponse*) override;
  grpc::ServerUnaryReactor* Pull(grpc::CallbackServerContext*, const grpc::ByteBuffer*, grpc::ByteBuffer*) override;
  grpc::ServerUnaryReactor* Pin(grpc::CallbackServerContext*, const v1::PinRequest*, v1::PinResponse*) override;
  grpc::ServerUnaryReactor* Unpin(grpc::CallbackServerContext*, const v1::UnpinRequest*, v1::UnpinResponse*) override;

 private:
  absl::StatusOr<SharedMemory::Part> SharedPart(const v1::SharedPlace& place) const;
  void PullIntoShared(v1::PullRequest* request, const grpc::CallbackServerContext& context, CallReactor* reactor,
                      grpc::ByteBuffer* response);

  StateServer* const state_;
  const Gate* const gate_;
  const std::shared_ptr<storage::Slabs> answers_;  // gRPC may hold an answer for longer than this service lives
  SharedMemory* const shared_;
};

}  // namespace ballast::services
