// All calls of the server's own services: each is let in by its headers, then its message is read, and answered.
#pragma once

#include <grpcpp/generic/async_generic_service.h>

#include "ballast/services/rpc/methods.h"

namespace ballast::services {

// Threads: any.
class CallService final : public grpc::CallbackGenericService {
 public:
  // Borrows all.
  CallService(const Gate* gate, Reads* reads, const Methods* methods) : gate_(gate), reads_(reads), methods_(methods) {}

  grpc::ServerGenericBidiReactor* CreateReactor(grpc::GenericCallbackServerContext* context) override;

 private:
  const Gate* const gate_;
  Reads* const reads_;
  const Methods* const methods_;
};

}  // namespace ballast::services
