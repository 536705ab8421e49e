// Intentions of the trainer groups in a schedule: headers, blobs and bits of every slice. All are pure functions, so
// the oracle can compute what a step must have consumed without watching the pushes.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "ballast/proto/model/epoch_plan.h"
#include "ballast/proto/model/verdict.h"
#include "ballast/tests/sim/random.h"

namespace ballast::sim {

inline constexpr int kServers = 3;
inline constexpr uint32_t kWorldSizeMax = 2;
inline constexpr char kJob[] = "sim";

// Call before each schedule. `pin_interval` is K of durability every-K; with 0, servers lose nothing already synced.
void BeginWorld(uint64_t pin_interval);
// The pin interval of the current world.
uint64_t PinInterval();
std::string ServerName(int server);
// An Open request, complete except for epoch and base.
const v1::OpenRequest& OpenTemplate(uint32_t world_size);
const model::EpochPlan& PlanOf(uint32_t world_size);

// One incarnation of a trainer group.
struct GroupIntent {
  uint64_t seed = 0;  // of the schedule
  uint32_t group = 0;
  uint32_t family = 0;  // the first epoch of the group: `group`, or an earlier one whose own next epoch this is
  uint32_t world_size = 1;
  v1::Epoch epoch;
  // If set, headers and blobs differ from all other groups. If not, groups of the same size have equal plan hashes, and
  // only the epoch tells their steps apart.
  bool salted = false;
  // From this step on, ranks 0 and 1 pass different gradient scales; -1: never.
  int64_t mismatch_from = -1;
  // Step `restore_at`, the first of its epoch, restores version `restored`, sealed with `restored_blobs`. -1: none.
  int64_t restore_at = -1;
  int64_t restored = -1;
  std::vector<std::string> restored_blobs;

  // It drops no attempt, so that its own next epoch may begin with the same.
  bool one_attempt = false;

  // The sealed attempt; earlier attempts are dropped.
  uint64_t FinalAttempt(int64_t step) const;
  v1::StepHeader Header(int64_t step, uint32_t rank) const;
  std::vector<std::string> Blobs(int64_t step) const;
  bool Mismatched(int64_t step) const { return mismatch_from >= 0 && step >= mismatch_from && world_size > 1; }
  std::string Hash(int64_t step, uint32_t rank) const;
  // The digest stands for the bits. `life` counts restarts of the rank within its epoch, which only a seeded bug does.
  uint32_t Digest(int64_t step, uint64_t attempt, v1::SliceKind kind, const model::Slice& slice, uint32_t life) const;
};

// Fills in a transaction of values, by bits of `chance`: the array to write, and sometimes step counts of the tensors.
inline void ChooseArray(uint64_t chance, uint32_t tensors, v1::StepHeader* header) {
  header->set_value_array(static_cast<uint32_t>(chance / 2048 % 3));
  if (chance / 8192 % 2 == 0) return;
  for (uint32_t tensor = 0; tensor < tensors; ++tensor) header->add_value_tensor_steps(Mix(chance, tensor) % 50);
}

// A chunk's norm as a function of its slices' digests. One digest in 64 stands for values with an Inf.
v1::ChunkNorm NormOf(const model::EpochPlan& plan, uint64_t chunk, absl::string_view presence,
                     absl::FunctionRef<uint32_t(const model::Slice&)> digest);

}  // namespace ballast::sim
