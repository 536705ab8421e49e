// AdminService over a StateServer.
#pragma once

#include "ballast/services/rpc/gate.h"
#include "ballast/services/server/state_server.h"
#include "ballast/v1/admin_service.grpc.pb.h"

namespace ballast::services {

// Threads: any.
class AdminServiceImpl final : public v1::AdminService::CallbackService {
 public:
  AdminServiceImpl(StateServer* state, const Gate* gate) : state_(state), gate_(gate) {}

  grpc::ServerUnaryReactor* GetServerStatus(grpc::CallbackServerContext*, const v1::GetServerStatusRequest*,
                                            v1::GetServerStatusResponse*) override;
  grpc::ServerUnaryReactor* GetSteps(grpc::CallbackServerContext* context, const v1::GetStepsRequest* request,
                                     v1::GetStepsResponse* response) override;
  grpc::ServerUnaryReactor* DropJob(grpc::CallbackServerContext*, const v1::DropJobRequest*,
                                    v1::DropJobResponse*) override;
  grpc::ServerUnaryReactor* SetBudget(grpc::CallbackServerContext*, const v1::SetBudgetRequest*,
                                      v1::SetBudgetResponse*) override;

 private:
  StateServer* const state_;
  const Gate* const gate_;
};

}  // namespace ballast::services
