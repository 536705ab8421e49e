#include "ballast/services/gateway/admin_service.h"

#include <utility>

#include "ballast/services/gateway/known_fields.h"

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

void AdminServiceImpl::AddTo(Methods* methods) {
  const auto add = [methods](Method method) {
    const std::string path = absl::StrCat("/ballast.v1.AdminService/", kCallNames[static_cast<size_t>(method.call)]);
    methods->emplace(path, std::move(method));
  };
  const auto of_server = [](Call call) { return [call](const auto&) -> AskedCall { return {call, ""}; }; };
  add(MakeMethod<v1::GetServerStatusRequest, v1::GetServerStatusResponse>(
      Call::kGetServerStatus, kFewBytesMax, gate_, room_, of_server(Call::kGetServerStatus),
      [this](const Visit& visit, v1::GetServerStatusRequest*, const CallLimit&,
             Reply<v1::GetServerStatusResponse> reply) {
        const auto shown = [identity = visit.identity,
                            reply = std::move(reply)](absl::StatusOr<v1::GetServerStatusResponse> answer) {
          if (answer.ok()) {
            ShowOnly(identity, answer->mutable_jobs(), [](const v1::JobStatus& job) { return job.name(); });
          }
          reply(std::move(answer));
        };
        state_->GetServerStatus(shown);
      }));
  add(MakeMethod<v1::GetStepsRequest, v1::GetStepsResponse>(
      Call::kGetSteps, kFewBytesMax, gate_, room_, of_server(Call::kGetSteps),
      [this](const Visit& visit, v1::GetStepsRequest* request, const CallLimit&, Reply<v1::GetStepsResponse> reply) {
        state_->GetSteps(*request, [&](absl::StatusOr<v1::GetStepsResponse> answer) {
          if (answer.ok()) {
            ShowOnly(visit.identity, answer->mutable_jobs(), [](const v1::JobSteps& job) { return job.job(); });
          }
          reply(std::move(answer));
        });
      }));
  add(MakeMethod<v1::DropJobRequest, v1::DropJobResponse>(
      Call::kDropJob, kFewBytesMax, gate_, room_,
      [](const v1::DropJobRequest& request) -> AskedCall {
        return {Call::kDropJob, request.job()};
      },
      [this](const Visit&, v1::DropJobRequest* request, const CallLimit& limit, Reply<v1::DropJobResponse> reply) {
        state_->DropJob(KnownFields(request), std::move(reply), limit);
      }));
  add(MakeMethod<v1::SetBudgetRequest, v1::SetBudgetResponse>(
      Call::kSetBudget, kFewBytesMax, gate_, room_, of_server(Call::kSetBudget),
      [this](const Visit& visit, v1::SetBudgetRequest* request, const CallLimit& limit,
             Reply<v1::SetBudgetResponse> reply) {
        const auto shown = [identity = visit.identity,
                            reply = std::move(reply)](absl::StatusOr<v1::SetBudgetResponse> answer) {
          if (answer.ok()) {
            ShowOnly(identity, answer->mutable_jobs(), [](const v1::JobMoves& moves) { return moves.job(); });
          }
          reply(std::move(answer));
        };
        state_->SetBudget(KnownFields(request), shown, limit);
      }));
}

}  // namespace ballast::services
