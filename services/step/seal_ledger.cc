#include "ballast/services/step/seal_ledger.h"

#include "ballast/proto/base/status.h"
#include "ballast/proto/model/step_header.h"

namespace ballast::services {
namespace {

// Enough of a hash for a person to tell two hashes apart.
std::string Short(const std::string& hash) {
  std::string text;
  for (size_t i = 0; i < hash.size() && i < 4; ++i) {
    absl::StrAppend(&text, absl::Hex(static_cast<uint8_t>(hash[i]), absl::kZeroPad2));
  }
  return text;
}

absl::Status Mismatch(absl::string_view message) {
  return model::Error(absl::StatusCode::kFailedPrecondition, model::kPlanMismatch,
                      absl::StrCat(message, "; this epoch is over: exit and restart the group with resume=auto"));
}

}  // namespace

void SealLedger::Open(const model::EpochPlan* plan) {
  plan_ = plan;
  agreement_ = absl::OkStatus();
  NextStep();
}

void SealLedger::NextStep() {
  ranks_.assign(plan_->world_size(), std::nullopt);
  count_ = 0;
  first_unsealed_ = 0;
  first_.Clear();
}

absl::Status SealLedger::CheckFirst(const v1::SealRequest& request) const {
  if (request.blobs().empty()) return model::CheckHeader(*plan_, request.step(), request.header());
  const std::vector<std::string> blobs(request.blobs().begin(), request.blobs().end());
  BALLAST_RETURN_IF_ERROR(model::CheckHeader(*plan_, request.step(), request.header(), blobs));
  const std::string expected = model::PlanHash(*plan_, request.step(), request.attempt(), request.header(), blobs);
  if (request.plan_hash() == expected) return absl::OkStatus();
  return model::Error(
      absl::StatusCode::kInvalidArgument, model::kBadRequest,
      absl::StrCat("rank ", request.rank(), " sealed step ", request.step(), " with plan hash ",
                   Short(request.plan_hash()), ", but its header and blobs under this epoch's tiling give ",
                   Short(expected), "; client and server disagree about the epoch or about the hash"));
}

absl::Status SealLedger::Seal(const v1::SealRequest& request) {
  BALLAST_RETURN_IF_ERROR(agreement_);
  if (request.rank() == 0 && request.blobs().empty()) {
    return model::Error(
        absl::StatusCode::kInvalidArgument, model::kBadRequest,
        absl::StrCat("rank 0's seal of step ", request.step(), " came without blobs; expected those of ",
                     plan_->world_size(), " ranks, which it brings for all"));
  }
  // A seal with the hash of a checked seal needs no check of its own: the hash covers the whole plan. The first blobs
  // need one, since nobody could compute the hash before.
  const bool same = request.plan_hash() == first_.plan_hash() && request.attempt() == first_.attempt();
  const bool agrees = any() && same;
  const bool brings_blobs = !request.blobs().empty() && first_.blobs().empty();
  if (!agrees || brings_blobs) {
    BALLAST_RETURN_IF_ERROR(CheckFirst(request));
    if (!agrees && any()) {
      agreement_ = Mismatch(absl::StrCat(
          "rank ", request.rank(), " sealed step ", request.step(), ", attempt ", request.attempt(), " with plan hash ",
          Short(request.plan_hash()), ", rank ", first_.rank(), " sealed attempt ", first_.attempt(), " with ",
          Short(first_.plan_hash()), "; all ranks must pass the same hyper-parameters, tensors and blobs"));
      return agreement_;
    }
    first_ = request;
  }
  if (!ranks_[request.rank()].has_value()) ++count_;
  ranks_[request.rank()] = request.attempt();
  return absl::OkStatus();
}

std::vector<uint32_t> SealLedger::UnsealedRanks(size_t max) const {
  std::vector<uint32_t> ranks;
  while (first_unsealed_ < ranks_.size() && ranks_[first_unsealed_].has_value()) ++first_unsealed_;
  for (uint32_t rank = first_unsealed_; rank < ranks_.size() && ranks.size() < max; ++rank) {
    if (!ranks_[rank].has_value()) ranks.push_back(rank);
  }
  return ranks;
}

}  // namespace ballast::services
