#include "ballast/services/ctl/cluster.h"

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <memory>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "ballast/proto/model/status.h"
#include "ballast/services/rpc/status_codec.h"
#include "ballast/v1/admin_service.grpc.pb.h"
#include "ballast/v1/state_service.grpc.pb.h"

namespace ballast::services {
namespace {

std::unique_ptr<v1::AdminService::Stub> Connect(const std::string& address) {
  return v1::AdminService::NewStub(grpc::CreateChannel(address, grpc::InsecureChannelCredentials()));
}

void SetDeadline(grpc::ClientContext* context, absl::Duration timeout) {
  context->set_deadline(absl::ToChronoTime(absl::Now() + timeout));
}

}  // namespace

std::vector<ServerView> LookAt(const std::vector<std::string>& addresses, absl::Duration timeout) {
  std::vector<ServerView> views(addresses.size());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < addresses.size(); ++i) {
    threads.emplace_back([&view = views[i], &address = addresses[i], timeout] {
      view.address = address;
      grpc::ClientContext context;
      SetDeadline(&context, timeout);
      view.error = FromGrpc(Connect(address)->GetServerStatus(&context, v1::GetServerStatusRequest(), &view.status));
    });
  }
  for (std::thread& thread : threads) thread.join();
  return views;
}

namespace {

// Empty if the server has no such job.
absl::StatusOr<v1::JobStatus> LookAtJob(const std::string& address, const std::string& job, absl::Duration timeout) {
  grpc::ClientContext context;
  SetDeadline(&context, timeout);
  v1::GetServerStatusResponse status;
  BALLAST_RETURN_IF_ERROR(FromGrpc(Connect(address)->GetServerStatus(&context, v1::GetServerStatusRequest(), &status)));
  for (const v1::JobStatus& known : status.jobs()) {
    if (known.name() == job) return known;
  }
  return v1::JobStatus();
}

}  // namespace

absl::StatusOr<v1::JobSteps> LastSteps(const std::string& address, const std::string& job, absl::Duration timeout) {
  v1::GetStepsRequest request;
  request.set_job(job);
  grpc::ClientContext context;
  SetDeadline(&context, timeout);
  v1::GetStepsResponse response;
  BALLAST_RETURN_IF_ERROR(FromGrpc(Connect(address)->GetSteps(&context, request, &response)));
  if (response.jobs().empty()) return absl::NotFoundError(absl::StrCat("no job '", job, "' is served there"));
  return response.jobs(0);
}

absl::Status DropJob(const std::string& address, const std::string& job, absl::Duration timeout) {
  BALLAST_ASSIGN_OR_RETURN(const v1::JobStatus known, LookAtJob(address, job, timeout));
  v1::DropJobRequest request;
  request.set_job(job);
  *request.mutable_epoch() = known.epoch();
  grpc::ClientContext context;
  SetDeadline(&context, timeout);
  v1::DropJobResponse response;
  return FromGrpc(Connect(address)->DropJob(&context, request, &response));
}

absl::StatusOr<v1::UnpinResponse> UnpinVersion(const std::string& address, const std::string& job, int64_t version,
                                               absl::Duration timeout) {
  BALLAST_ASSIGN_OR_RETURN(const v1::JobStatus known, LookAtJob(address, job, timeout));
  // The pins of a job that was refused at start are unknown: the server will say why.
  const auto& pins = known.durable_versions();
  if (known.failure().empty() && std::find(pins.begin(), pins.end(), version) == pins.end()) {
    return absl::NotFoundError(absl::StrCat("no durable pin of version ", version, " of job '", job, "'"));
  }
  v1::UnpinRequest request;
  request.set_job(job);
  request.set_version(version);
  request.set_durable(true);
  *request.mutable_epoch() = known.epoch();
  grpc::ClientContext context;
  SetDeadline(&context, timeout);
  v1::UnpinResponse response;
  const auto stub = v1::StateService::NewStub(grpc::CreateChannel(address, grpc::InsecureChannelCredentials()));
  BALLAST_RETURN_IF_ERROR(FromGrpc(stub->Unpin(&context, request, &response)));
  return response;
}

absl::StatusOr<v1::SetBudgetResponse> SetBudget(const std::string& address, const v1::SetBudgetRequest& request,
                                                absl::Duration timeout) {
  grpc::ClientContext context;
  SetDeadline(&context, timeout);
  v1::SetBudgetResponse response;
  BALLAST_RETURN_IF_ERROR(FromGrpc(Connect(address)->SetBudget(&context, request, &response)));
  return response;
}

}  // namespace ballast::services
