// All calls of the server's own services: each is let in by its headers, then its message is read, and answered.
#pragma once

#include <grpcpp/generic/async_generic_service.h>

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
  const Gate* const gate_;
  Reads* const reads_;
  const Methods* const methods_;
  Connections* const connections_;
  Reflection* const reflection_;  // null: turned off
};

}  // namespace ballast::services
