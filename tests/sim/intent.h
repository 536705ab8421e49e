// What the trainer groups of a schedule mean to do: headers, blobs, bits of every slice. Pure functions, so that the
// oracle knows what a step must have consumed without watching anybody push.
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

// Before each schedule: the K of the job's durability; 0: its servers lose nothing that was synced.
void BeginWorld(uint64_t pin_interval);
// The same, of the job that there is.
uint64_t PinInterval();
std::string ServerName(int server);
// An epoch's Open, without epoch and base.
const v1::OpenRequest& OpenTemplate(uint32_t world_size);
const model::EpochPlan& PlanOf(uint32_t world_size);

// One incarnation of a trainer group.
struct GroupIntent {
  uint64_t seed = 0;  // the schedule's
  uint32_t group = 0;
  uint32_t world_size = 1;
  v1::Epoch epoch;
  // Headers and blobs differ from those of other groups. If not, groups of the same size have the same plan hashes, and
  // only the epoch tells their steps apart.
  bool salted = false;
  // Rank 1 passes another gradient scale than rank 0 from this step on; -1: never.
  int64_t mismatch_from = -1;
  // Step `restore_at`, the first of its epoch, restores this version, which was sealed with these blobs; -1: none does.
  int64_t restore_at = -1;
  int64_t restored = -1;
  std::vector<std::string> restored_blobs;

  // The attempt that is sealed; those before it are dropped.
  uint64_t FinalAttempt(int64_t step) const;
  v1::StepHeader Header(int64_t step, uint32_t rank) const;
  std::vector<std::string> Blobs(int64_t step) const;
  bool Mismatched(int64_t step) const { return mismatch_from >= 0 && step >= mismatch_from && world_size > 1; }
  std::string Hash(int64_t step, uint32_t rank) const;
  // The digest stands for the bits. `life`: how often the rank was restarted within its epoch (a seeded bug).
  uint32_t Digest(int64_t step, uint64_t attempt, v1::SliceKind kind, const model::Slice& slice, uint32_t life) const;
};

// Of a transaction of values: which array they are of, and step counts that may come with them; by bits of `chance`.
inline void ChooseArray(uint64_t chance, uint32_t tensors, v1::StepHeader* header) {
  header->set_value_array(static_cast<uint32_t>(chance / 2048 % 3));
  if (chance / 8192 % 2 == 0) return;
  for (uint32_t tensor = 0; tensor < tensors; ++tensor) header->add_value_tensor_steps(Mix(chance, tensor) % 50);
}

// A chunk's norm as a function of the digests that its slices have; one in 64 digests stands for values with an Inf.
v1::ChunkNorm NormOf(const model::EpochPlan& plan, uint64_t chunk, absl::string_view presence,
                     absl::FunctionRef<uint32_t(const model::Slice&)> digest);

}  // namespace ballast::sim
