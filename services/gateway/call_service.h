// All calls of the server's own services: each is let in by its headers, then its message is read, and answered.
#pragma once

#include <grpcpp/generic/async_generic_service.h>

#include <memory>

#include "ballast/services/gateway/connections.h"
#include "ballast/services/gateway/health.h"
#include "ballast/services/gateway/methods.h"
#include "ballast/services/gateway/parse_room.h"
#include "ballast/services/gateway/reflection.h"
#include "ballast/services/threads/executor.h"

namespace ballast::services {

// Threads: any.
class CallService final : public grpc::CallbackGenericService {
 public:
  // Borrows all.
  CallService(const Gate* gate, Reads* reads, Trimmer* trimmer, const Methods* methods, ParseRoom* room,
              Connections* connections, Health* health, Reflection* reflection)
      : gate_(gate),
        reads_(reads),
        trimmer_(trimmer),
        methods_(methods),
        room_(room),
        connections_(connections),
        health_(health),
        reflection_(reflection) {}

  grpc::ServerGenericBidiReactor* CreateReactor(grpc::GenericCallbackServerContext* context) override;

 private:
  void Run(const Method& method, const std::shared_ptr<Arrival>& arrival, grpc::ByteBuffer* message);

  const Gate* const gate_;
  Reads* const reads_;
  Trimmer* const trimmer_;
  const Methods* const methods_;
  ParseRoom* const room_;
  Connections* const connections_;
  Health* const health_;
  Reflection* const reflection_;  // null: turned off
  // Parses messages of many fields, one at a time, so that steps keep gRPC's threads and the processors. All comes from
  // one arena of malloc: of two threads each could keep the largest message's memory.
  ThreadExecutor parser_{1};
};

}  // namespace ballast::services
