// The pure functions by which any client can finish a step started by another client: plan hash, verdict, resolve.
// services/step/README.md has the rules.
#pragma once

#include <compare>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "ballast/proto/model/epoch_plan.h"
#include "ballast/v1/state_service.pb.h"

namespace ballast::model {

// Lexicographic by (counter, nonce).
std::strong_ordering Compare(const v1::Epoch& a, const v1::Epoch& b);
// False if the epochs differ. An epoch with counter 0 is not known, and may be any.
bool MayBeSame(const v1::Epoch& a, const v1::Epoch& b);

// A fence may raise a promise's counter by so much. Groups raise it by little, and a promise near the end of the
// numbers would leave none for the groups to come: 2^32 such fences would be needed for that.
inline constexpr uint64_t kEpochsSkippedMax = uint64_t{1} << 32;

// SHA-256 over W, tiling, step, attempt, header bits, blobs, the spec's digest and the protocol version, field by field
// in a fixed order (doubles as their bits). 32 bytes.
std::string PlanHash(const EpochPlan& plan, int64_t step, uint64_t attempt, const v1::StepHeader& header,
                     absl::Span<const std::string> blobs);

// Live tensors that were registered at `version`: they hold no values before transaction version + 1.
std::vector<uint32_t> TensorsWithoutValues(const EpochPlan& plan, int64_t version);

// INVALID_ARGUMENT if the size of `bitmap` does not match the plan's tensors, or `bitmap` has a replaced tensor.
absl::Status CheckPresence(const EpochPlan& plan, absl::string_view bitmap, absl::string_view name);

// INVALID_ARGUMENT if `header` does not fit the plan and `step`, or the blobs do not fit either:
// - wrong group count or bitmaps; hyper-parameters or scale not finite (the scale also in fp32); negative max_norm;
// - blobs over 64 KiB in all, or not one per rank (a RESTORE has the restored version's blobs);
// - a VALUES step without values, or of a moment that the optimizer lacks;
// - tensors without values (registered at version step - 1) whose masters this step does not give;
// - step counts for some tensors only;
// - a RESTORE of a version not older than `step`, or with slices.
absl::Status CheckHeader(const EpochPlan& plan, int64_t step, const v1::StepHeader& header,
                         absl::Span<const std::string> blobs);
// The header alone: of a seal that has no blobs.
absl::Status CheckHeader(const EpochPlan& plan, int64_t step, const v1::StepHeader& header);

// Squared norm of one chunk: its segments' squared norms summed in order.
double ChunkSquaredNorm(const v1::ChunkNorm& norm);

// Global squared norm of pushed values: chunk norms of all servers, in any order, summed in chunk order.
// INVALID_ARGUMENT (DIVERGED) if a chunk appears twice.
absl::StatusOr<double> GlobalSquaredNorm(absl::Span<const v1::ChunkNorm* const> norms);

// clip = min(1, max_norm / (scale x norm + 1e-6)) in fp64 (torch.nn.utils.clip_grad_norm_); factor = fp32(scale x
// clip). Also skips where factor x norm is beyond fp32, because some scaled gradient might be.
v1::Verdict MakeVerdict(const v1::StepHeader& header, double squared_norm, bool overflow);

// Rule 7: derives the decision from the prepared records of all servers. FAILED_PRECONDITION (PLAN_MISMATCH) unless all
// agree on (epoch, step, attempt, plan hash); FAILED_PRECONDITION (OTHER_SERVER) if two are of one server.
absl::StatusOr<v1::Decision> Decide(absl::Span<const v1::PreparedRecord> records);

// Rules 10 and 14: the conclusion from the answers of *all* servers to a fence.
struct Resolution {
  int64_t base = -1;
  // To be sent to every server as Open's base_decision. Empty when base = -1, and when `restores` is set.
  std::optional<v1::Decision> decision;
  // Set when some server lost its state: step base + 1 must restore this version on all servers.
  std::optional<int64_t> restores;
};
// DATA_LOSS: STATE_LOST (names the server) if state is lost and there is no version to go back to; DIVERGED if servers
// are more than one step apart or decided differently.
absl::StatusOr<Resolution> Resolve(absl::Span<const v1::GetJobResponse> answers);

}  // namespace ballast::model
