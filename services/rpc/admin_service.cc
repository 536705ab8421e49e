#include "ballast/services/rpc/admin_service.h"

#include <utility>

#include "ballast/services/rpc/known_fields.h"

namespace ballast::services {
namespace {

// Leaves out the jobs that the caller may not see.
template <typename Jobs, typename Name>
void ShowOnly(const Identity& identity, Jobs* jobs, const Name& name) {
  for (int i = jobs->size(); i-- > 0;) {
    if (!identity.Sees(name(jobs->Get(i)))) jobs->DeleteSubrange(i, 1);
  }
}

}  // namespace

grpc::ServerUnaryReactor* AdminServiceImpl::GetServerStatus(grpc::CallbackServerContext* context,
                                                            const v1::GetServerStatusRequest*,
                                                            v1::GetServerStatusResponse* response) {
  return gate_->Quick(context, {Call::kGetServerStatus, ""}, response,
                      [&](const Visit& visit, Reply<v1::GetServerStatusResponse> reply) {
                        state_->GetServerStatus([&](absl::StatusOr<v1::GetServerStatusResponse> answer) {
                          if (answer.ok()) {
                            ShowOnly(visit.identity, answer->mutable_jobs(),
                                     [](const v1::JobStatus& job) { return job.name(); });
                          }
                          reply(std::move(answer));
                        });
                      });
}

grpc::ServerUnaryReactor* AdminServiceImpl::GetSteps(grpc::CallbackServerContext* context,
                                                     const v1::GetStepsRequest* request,
                                                     v1::GetStepsResponse* response) {
  return gate_->Quick(
      context, {Call::kGetSteps, ""}, response, [&](const Visit& visit, Reply<v1::GetStepsResponse> reply) {
        state_->GetSteps(*request, [&](absl::StatusOr<v1::GetStepsResponse> answer) {
          if (answer.ok()) {
            ShowOnly(visit.identity, answer->mutable_jobs(), [](const v1::JobSteps& job) { return job.job(); });
          }
          reply(std::move(answer));
        });
      });
}

grpc::ServerUnaryReactor* AdminServiceImpl::DropJob(grpc::CallbackServerContext* context,
                                                    const v1::DropJobRequest* request, v1::DropJobResponse* response) {
  return gate_->Waiting(context, {Call::kDropJob, request->job()}, response,
                        [&](const Visit&, const CallLimit& limit, Reply<v1::DropJobResponse> reply) {
                          state_->DropJob(KnownFields(request), std::move(reply), limit);
                        });
}

grpc::ServerUnaryReactor* AdminServiceImpl::SetBudget(grpc::CallbackServerContext* context,
                                                      const v1::SetBudgetRequest* request,
                                                      v1::SetBudgetResponse* response) {
  return gate_->Waiting(
      context, {Call::kSetBudget, ""}, response,
      [&](const Visit& visit, const CallLimit& limit, Reply<v1::SetBudgetResponse> reply) {
        state_->SetBudget(
            KnownFields(request),
            [identity = visit.identity, reply = std::move(reply)](absl::StatusOr<v1::SetBudgetResponse> answer) {
              if (answer.ok()) {
                ShowOnly(identity, answer->mutable_jobs(), [](const v1::JobMoves& moves) { return moves.job(); });
              }
              reply(std::move(answer));
            },
            limit);
      });
}

}  // namespace ballast::services
