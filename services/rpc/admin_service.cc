#include "ballast/services/rpc/admin_service.h"

#include "ballast/services/rpc/call_reactor.h"
#include "ballast/services/rpc/known_fields.h"

namespace ballast::services {

grpc::ServerUnaryReactor* AdminServiceImpl::GetServerStatus(grpc::CallbackServerContext* context,
                                                            const v1::GetServerStatusRequest* request,
                                                            v1::GetServerStatusResponse* response) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  state_->GetServerStatus([reactor, response](absl::StatusOr<v1::GetServerStatusResponse> answer) {
    *response = *std::move(answer);
    reactor->Finish(grpc::Status::OK);
  });
  return reactor;
}

grpc::ServerUnaryReactor* AdminServiceImpl::GetSteps(grpc::CallbackServerContext* context,
                                                     const v1::GetStepsRequest* request,
                                                     v1::GetStepsResponse* response) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  state_->GetSteps(*request, [reactor, response](absl::StatusOr<v1::GetStepsResponse> answer) {
    *response = *std::move(answer);
    reactor->Finish(grpc::Status::OK);
  });
  return reactor;
}

grpc::ServerUnaryReactor* AdminServiceImpl::DropJob(grpc::CallbackServerContext* context,
                                                    const v1::DropJobRequest* request, v1::DropJobResponse* response) {
  auto* reactor = new CallReactor;
  state_->DropJob(KnownFields(request), FinishWith(reactor, response), {DeadlineOf(*context), reactor->caller()});
  return reactor;
}

grpc::ServerUnaryReactor* AdminServiceImpl::SetBudget(grpc::CallbackServerContext* context,
                                                      const v1::SetBudgetRequest* request,
                                                      v1::SetBudgetResponse* response) {
  auto* reactor = new CallReactor;
  state_->SetBudget(KnownFields(request), FinishWith(reactor, response), {DeadlineOf(*context), reactor->caller()});
  return reactor;
}

}  // namespace ballast::services
