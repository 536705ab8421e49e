// The gRPC service AdminService. A StateServer answers its calls.
#pragma once

#include "ballast/services/gateway/gate.h"
#include "ballast/services/gateway/methods.h"
#include "ballast/services/gateway/parse_room.h"
#include "ballast/services/server/state_server.h"
#include "ballast/v1/admin_service.pb.h"

namespace ballast::services {

// Threads: any.
class AdminServiceImpl final {
 public:
  AdminServiceImpl(StateServer* state, const Gate* gate, ParseRoom* room) : state_(state), gate_(gate), room_(room) {}

  void AddTo(Methods* methods);

 private:
  StateServer* const state_;
  const Gate* const gate_;
  ParseRoom* const room_;
};

}  // namespace ballast::services
