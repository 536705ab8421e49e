#include "ballast/client/group/fencing.h"

#include <algorithm>
#include <memory>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ballast/client/transport/call_all.h"
#include "ballast/client/transport/tally.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/model/protocol.h"
#include "ballast/proto/model/verdict.h"

namespace ballast::client {
namespace {

// Each step is a promise that the server makes durable: with 64 the session still opens within seconds.
constexpr uint64_t kStepsMax = 64;

}  // namespace

Fencing::Fencing(Router* router, std::string job, std::vector<uint64_t> promised, std::vector<v1::Peer> peers)
    : router_(router), job_(std::move(job)), promised_(std::move(promised)), peers_(std::move(peers)) {
  epoch_.set_counter(*std::max_element(promised_.begin(), promised_.end()) + 1);
  // Tells apart groups that saw the same promises.
  std::random_device random;
  epoch_.set_nonce(static_cast<uint64_t>(random()) << 32 | random());
}

std::vector<uint64_t> Fencing::Promised(absl::Span<const v1::GetJobResponse> answers) {
  std::vector<uint64_t> promised;
  for (const v1::GetJobResponse& answer : answers) promised.push_back(answer.promised().counter());
  return promised;
}

std::string Fencing::What() const { return absl::StrCat("Fence of job '", job_, "'"); }

uint64_t Fencing::StepsBefore(uint32_t server) const {
  if (promised_[server] >= epoch_.counter()) return 0;
  return (epoch_.counter() - promised_[server] - 1) / model::kEpochsSkippedMax;
}

absl::Status Fencing::CheckApart() const {
  const auto least = std::min_element(promised_.begin(), promised_.end());
  const auto server = static_cast<uint32_t>(least - promised_.begin());
  if (StepsBefore(server) <= kStepsMax) return absl::OkStatus();
  return model::Error(
      absl::StatusCode::kFailedPrecondition, model::kBadRequest,
      absl::StrCat("server ", router_->name(server), " has promised epoch ", *least, " of job '", job_,
                   "', and another server epoch ", epoch_.counter() - 1,
                   ". No trainer moves epochs so far apart (over ", kStepsMax, " fences of ", model::kEpochsSkippedMax,
                   " epochs). Find out who fences this job; then drop the job (", model::kHowToDrop,
                   ") and start it again"));
}

absl::Status Fencing::CatchUp(uint32_t server, v1::FenceRequest request, absl::Time deadline) {
  uint64_t counter = promised_[server];
  for (uint64_t left = StepsBefore(server); left > 0; --left) {
    counter += model::kEpochsSkippedMax;
    request.mutable_epoch()->set_counter(counter);
    const auto fenced = std::make_shared<Tally>();
    fenced->Start();
    router_->Call<v1::FenceRequest, v1::FenceResponse>(
        &Transport::Fence, server, What(), std::make_shared<const v1::FenceRequest>(request), deadline,
        [fenced](const absl::StatusOr<v1::FenceResponse>& answer) { fenced->Finish(answer.status()); });
    BALLAST_RETURN_IF_ERROR(fenced->Wait());
  }
  return absl::OkStatus();
}

absl::StatusOr<v1::FenceRequest> Fencing::Begin(bool expect_empty, absl::Time deadline) {
  BALLAST_RETURN_IF_ERROR(CheckApart());
  v1::FenceRequest request;
  request.set_job(job_);
  *request.mutable_epoch() = epoch_;
  request.set_expect_empty(expect_empty);
  request.set_protocol_version(model::kProtocolVersion);
  request.set_group(group_);
  request.mutable_peers()->Assign(peers_.begin(), peers_.end());
  for (uint32_t server = 0; server < router_->server_count(); ++server) {
    BALLAST_RETURN_IF_ERROR(CatchUp(server, request, deadline));
  }
  return request;
}

absl::StatusOr<std::shared_ptr<Answers<v1::FenceResponse>>> Fencing::Ask(bool expect_empty, absl::Time deadline) {
  BALLAST_ASSIGN_OR_RETURN(const v1::FenceRequest request, Begin(expect_empty, deadline));
  return AskAll<v1::FenceRequest, v1::FenceResponse>(router_, &Transport::Fence, What(), request, deadline);
}

absl::StatusOr<std::vector<v1::GetJobResponse>> Fencing::Fence(bool expect_empty, absl::Time deadline) {
  BALLAST_ASSIGN_OR_RETURN(const v1::FenceRequest request, Begin(expect_empty, deadline));
  BALLAST_ASSIGN_OR_RETURN(auto fenced, (CallAll<v1::FenceRequest, v1::FenceResponse>(router_, &Transport::Fence,
                                                                                      What(), request, deadline)));
  std::vector<v1::GetJobResponse> answers;
  for (v1::FenceResponse& response : fenced) answers.push_back(std::move(*response.mutable_job()));
  return answers;
}

}  // namespace ballast::client
