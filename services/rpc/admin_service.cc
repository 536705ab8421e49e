#include "ballast/services/rpc/admin_service.h"

#include "ballast/services/rpc/known_fields.h"
#include "ballast/services/rpc/status_codec.h"

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

grpc::ServerUnaryReactor* AdminServiceImpl::DropJob(grpc::CallbackServerContext* context,
                                                    const v1::DropJobRequest* request, v1::DropJobResponse* response) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  state_->DropJob(KnownFields(request),
                  [reactor](absl::StatusOr<v1::DropJobResponse> answer) { reactor->Finish(ToGrpc(answer.status())); });
  return reactor;
}

grpc::ServerUnaryReactor* AdminServiceImpl::SetBudget(grpc::CallbackServerContext* context,
                                                      const v1::SetBudgetRequest* request,
                                                      v1::SetBudgetResponse* response) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  state_->SetBudget(KnownFields(request), [reactor, response](absl::StatusOr<v1::SetBudgetResponse> answer) {
    if (answer.ok()) *response = std::move(*answer);
    reactor->Finish(ToGrpc(answer.status()));
  });
  return reactor;
}

}  // namespace ballast::services
