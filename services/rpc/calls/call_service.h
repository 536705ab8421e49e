// All calls of the server's own services: each is let in by its headers, then its message is read, and answered.
#pragma once

#include <grpcpp/generic/async_generic_service.h>

#include <memory>

#include "ballast/services/foundation/executor.h"
#include "ballast/services/rpc/calls/methods.h"
#include "ballast/services/rpc/calls/reflection.h"
#include "ballast/services/rpc/door/connections.h"

namespace ballast::services {

// Threads: any.
class CallService final : public grpc::CallbackGenericService {
 public:
  // Borrows all.
  CallService(const Gate* gate, Reads* reads, const Methods* methods, Connections* connections, Reflection* reflection)
      : gate_(gate), reads_(reads), methods_(methods), connections_(connections), reflection_(reflection) {}

  grpc::ServerGenericBidiReactor* CreateReactor(grpc::GenericCallbackServerContext* context) override;

 private:
  void Run(const Method& method, const std::shared_ptr<Arrival>& arrival, grpc::ByteBuffer* message);

  const Gate* const gate_;
  Reads* const reads_;
  const Methods* const methods_;
  Connections* const connections_;
  Reflection* const reflection_;  // null: turned off
  // Parses messages of many fields, one at a time, so that steps keep gRPC's threads and the processors. All comes from
  // one arena of malloc: of two threads each could keep the largest message's memory.
  ThreadExecutor parser_{1};
};

}  // namespace ballast::services
