// The pure functions by which any client can finish a step started by another client: verdict, decision, resolution.
// services/step/README.md has the rules.
#pragma once

#include <compare>
#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "ballast/v1/state_service.pb.h"

namespace ballast::model {

// Lexicographic by (counter, nonce).
std::strong_ordering Compare(const v1::Epoch& a, const v1::Epoch& b);
// False if the epochs differ. Counter 0 stands for an unknown epoch, which may be any.
bool MayBeSame(const v1::Epoch& a, const v1::Epoch& b);

// The most by which a fence may raise a promise's counter. Groups raise it by little. A promise near the end of the
// numbers would leave none for later groups; with this bound that takes 2^32 fences.
inline constexpr uint64_t kEpochsSkippedMax = uint64_t{1} << 32;

// Squared norm of one chunk: its segments' squared norms summed in order.
double ChunkSquaredNorm(const v1::ChunkNorm& norm);

// Global squared norm of pushed values: chunk norms of all servers, in any order, summed in chunk order. A chunk counts
// once, however many servers have it. DATA_LOSS (DIVERGED) if two of them tell other bits.
absl::StatusOr<double> GlobalSquaredNorm(absl::Span<const v1::ChunkNorm* const> norms);

// clip = min(1, max_norm / (scale x norm + 1e-6)) in fp64 (torch.nn.utils.clip_grad_norm_); factor = fp32(scale x
// clip). Also skips where factor x norm is beyond fp32, because some scaled gradient might be.
v1::Verdict MakeVerdict(const v1::StepHeader& header, double squared_norm, bool overflow);

// Rule 7: derives the decision from the prepared records of all servers. FAILED_PRECONDITION (PLAN_MISMATCH) unless all
// agree on (epoch, step, attempt, plan hash); FAILED_PRECONDITION (OTHER_SERVER) if two are of one server.
absl::StatusOr<v1::Decision> Decide(absl::Span<const v1::PreparedRecord> records);

// Updates the tensors' step counts (registration order, an entry per tensor) for the decided step of `record`.
void CountSteps(const v1::PreparedRecord& record, bool skip, std::vector<uint64_t>* tensor_steps);

// Do two decisions say the same of the same step?
bool SameDecision(const v1::Decision& a, const v1::Decision& b);

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
