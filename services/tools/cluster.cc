#include "ballast/services/tools/cluster.h"

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <memory>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "ballast/proto/base/address.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/base/threads.h"
#include "ballast/proto/base/tls_probe.h"
#include "ballast/proto/model/protocol.h"
#include "ballast/services/gateway/status_codec.h"
#include "ballast/services/monitoring/show.h"
#include "ballast/v1/admin_service.grpc.pb.h"
#include "ballast/v1/state_service.grpc.pb.h"

namespace ballast::services {
namespace {

// Makes a call on a connection of its own.
template <typename Stub, typename Request, typename Response>
absl::StatusOr<Response> Ask(const std::string& address, const Asking& asking,
                             grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&, Response*),
                             const Request& request) {
  BALLAST_ASSIGN_OR_RETURN(const model::Address server, model::ParseAddress(address, model::AddressUse::kConnect));
  BALLAST_RETURN_IF_ERROR(model::CheckAccess(asking.access, server));
  BALLAST_ASSIGN_OR_RETURN(const model::AccessContent access, model::ReadAccess(asking.access));
  const auto credentials = access.ca.empty() ? grpc::InsecureChannelCredentials()
                                             : grpc::SslCredentials({access.ca, access.key, access.certificate});
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + asking.timeout));
  if (!access.authorization.empty()) context.AddMetadata("authorization", access.authorization);
  context.AddMetadata(model::kVersionMetadata, absl::StrCat(model::kProtocolVersion));
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);  // as trainers' channels, or a proxy would get the token
  Stub stub(grpc::CreateCustomChannel(address, credentials, arguments));
  Response response;
  absl::Status status = FromGrpc((stub.*method)(&context, request, &response));
  if (absl::IsUnavailable(status)) {
    // gRPC knows of little more than a closed socket.
    const absl::Status tls = model::ProbeTls(server, access, absl::Now() + asking.timeout);
    if (!tls.ok()) status = tls;
  }
  // A server's words go to a terminal.
  if (!status.ok()) return absl::Status(status.code(), Printable(std::string(status.message())));
  return response;
}

}  // namespace

std::vector<ServerView> LookAt(const std::vector<std::string>& addresses, const Asking& asking) {
  std::vector<ServerView> views(addresses.size());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < addresses.size(); ++i) {
    const auto look = [&view = views[i], &address = addresses[i], &asking] {
      view.address = address;
      auto status = Ask(address, asking, &v1::AdminService::Stub::GetServerStatus, v1::GetServerStatusRequest());
      view.error = status.status();
      if (status.ok()) view.status = *std::move(status);
    };
    absl::StatusOr<std::thread> thread = model::MakeThread(look);
    thread.ok() ? threads.push_back(*std::move(thread)) : look();  // one after the other
  }
  for (std::thread& thread : threads) thread.join();
  return views;
}

namespace {

// Empty if the server has no such job.
absl::StatusOr<v1::JobStatus> LookAtJob(const std::string& address, const std::string& job, const Asking& asking) {
  BALLAST_ASSIGN_OR_RETURN(
      const v1::GetServerStatusResponse status,
      Ask(address, asking, &v1::AdminService::Stub::GetServerStatus, v1::GetServerStatusRequest()));
  for (const v1::JobStatus& known : status.jobs()) {
    if (known.name() == job) return known;
  }
  return v1::JobStatus();
}

}  // namespace

ClusterView JudgeByTwoLooks(absl::FunctionRef<std::vector<ServerView>()> look) {
  ClusterView cluster = Judge(look());
  const bool all_answered = std::all_of(cluster.servers.begin(), cluster.servers.end(),
                                        [](const ServerView& view) { return view.error.ok(); });
  return cluster.problems.empty() || !all_answered ? cluster : Judge(look());
}

absl::StatusOr<v1::JobSteps> LastSteps(const std::string& address, const std::string& job, const Asking& asking) {
  v1::GetStepsRequest request;
  request.set_job(job);
  BALLAST_ASSIGN_OR_RETURN(const v1::GetStepsResponse response,
                           Ask(address, asking, &v1::AdminService::Stub::GetSteps, request));
  if (response.jobs().empty()) return absl::NotFoundError(absl::StrCat("no job '", job, "' is served there"));
  return response.jobs(0);
}

absl::StatusOr<v1::GetJobResponse> FetchJob(const std::string& address, const std::string& job, const Asking& asking,
                                            bool without_open) {
  v1::GetJobRequest request;
  request.set_job(job);
  request.set_without_open(without_open);
  return Ask(address, asking, &v1::StateService::Stub::GetJob, request);
}

absl::Status DropJob(const std::string& address, const std::string& job, const Asking& asking) {
  BALLAST_ASSIGN_OR_RETURN(const v1::JobStatus known, LookAtJob(address, job, asking));
  v1::DropJobRequest request;
  request.set_job(job);
  *request.mutable_epoch() = known.epoch();
  return Ask(address, asking, &v1::AdminService::Stub::DropJob, request).status();
}

absl::StatusOr<v1::UnpinResponse> UnpinVersion(const std::string& address, const std::string& job, int64_t version,
                                               const Asking& asking) {
  BALLAST_ASSIGN_OR_RETURN(const v1::JobStatus known, LookAtJob(address, job, asking));
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
  return Ask(address, asking, &v1::StateService::Stub::Unpin, request);
}

absl::StatusOr<v1::SetBudgetResponse> SetBudget(const std::string& address, const v1::SetBudgetRequest& request,
                                                const Asking& asking) {
  return Ask(address, asking, &v1::AdminService::Stub::SetBudget, request);
}

}  // namespace ballast::services
