#include "ballast/client/transactions/norms.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "ballast/client/transport/call_all.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/model/verdict.h"

namespace ballast::client {
namespace {

// Rank 0's message to the other ranks: norms follow, or all send their gradients again first.
constexpr char kNorms[] = "n", kResend[] = "r";
constexpr int kTriesMax = 4;

absl::StatusOr<double> NormOf(const v1::NormResponse& answer) {
  std::vector<const v1::ChunkNorm*> norms;
  for (const v1::ChunkNorm& norm : answer.norms()) {
    if (norm.overflow()) return std::numeric_limits<double>::infinity();
    norms.push_back(&norm);
  }
  std::sort(norms.begin(), norms.end(),
            [](const v1::ChunkNorm* a, const v1::ChunkNorm* b) { return a->chunk() < b->chunk(); });
  BALLAST_ASSIGN_OR_RETURN(const double squared, model::GlobalSquaredNorm(norms));
  return std::sqrt(squared);
}

}  // namespace

absl::StatusOr<double> Norms::Norm() {
  for (int tries = 1;; ++tries) {
    v1::StepHeader header;
    header.set_kind(v1::STEP_KIND_UPDATE);
    const auto agreed = transactions_->Settle("Norm", absl::OkStatus(), std::move(header), "", nullptr);
    if (!agreed.ok()) return job_->Conclude(agreed.status());
    const std::string& presence = agreed->header.gradient_presence();
    const Seat& seat = job_->seat();
    if (known_.version == seat.version && known_.attempt == seat.attempt && known_.presence == presence) {
      return known_.norm;
    }
    const auto answer = Share(presence, tries >= kTriesMax);
    if (!answer.ok()) return job_->Conclude(answer.status());
    if (answer->has_value()) {
      BALLAST_ASSIGN_OR_RETURN(const double norm, NormOf(**answer));
      known_ = {seat.version, seat.attempt, presence, norm};
      return norm;
    }
    if (absl::Status sent = gradients_->ResendAll(presence); !sent.ok()) return job_->Conclude(std::move(sent));
  }
}

absl::StatusOr<std::optional<v1::NormResponse>> Norms::Share(const std::string& presence, bool last) {
  // Rank 0 asks for all ranks: if each asked for itself, a faster rank could drop the gradients that a slower rank asks
  // about.
  absl::StatusOr<v1::NormResponse> answer = v1::NormResponse();
  if (job_->group()->rank() == 0 && AnyBit(presence)) answer = Ask(presence);
  // A restarted server has lost slices that were not yet in its log.
  const bool lost = model::ReasonOf(answer.status()) == model::kIncomplete && !last;
  BALLAST_ASSIGN_OR_RETURN(
      const auto shared,
      job_->group()->Agree("Norm", lost ? absl::OkStatus() : answer.status(),
                           lost || !answer.ok() ? kResend : absl::StrCat(kNorms, answer->SerializeAsString())));
  if (shared[0] == kResend) return std::nullopt;
  v1::NormResponse all;
  if (!absl::StartsWith(shared[0], kNorms) || !all.ParseFromString(shared[0].substr(1))) {
    return model::Error(absl::StatusCode::kInternal, model::kBadRequest, "rank 0 sent no norms");
  }
  return all;
}

absl::StatusOr<v1::NormResponse> Norms::Ask(const std::string& presence) {
  const Seat& seat = job_->seat();
  v1::NormRequest request;
  request.set_job(seat.job);
  *request.mutable_epoch() = seat.epoch();
  request.set_step(seat.version + 1);
  request.set_attempt(seat.attempt);
  request.set_gradient_presence(presence);
  BALLAST_ASSIGN_OR_RETURN(auto answers, (CallAll<v1::NormRequest, v1::NormResponse>(
                                             seat.router, &Transport::Norm,
                                             absl::StrCat("Norm of step ", request.step()), request, seat.Deadline())));
  v1::NormResponse all;
  for (v1::NormResponse& answer : answers) {
    for (v1::ChunkNorm& norm : *answer.mutable_norms()) *all.add_norms() = std::move(norm);
  }
  return all;
}

}  // namespace ballast::client
