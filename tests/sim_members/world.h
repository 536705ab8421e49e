// What all parts of a schedule share: the job, its servers' names, and what trainer groups intend. All pure functions,
// so the oracle can compute what a step must have consumed without watching the pushes.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ballast/proto/model/epoch_plan.h"
#include "ballast/tests/sim/random.h"
#include "ballast/v1/state_service.pb.h"

namespace ballast::sim_members {

using sim::Mix;
using sim::Random;

inline constexpr int kServers = 4;
inline constexpr char kJob[] = "members";

std::string ServerName(int server);
// -1: not a server of the schedule.
int ServerOf(const std::string& id);
// Three tensors in three chunks.
const v1::JobSpec& Spec();
const model::Layout& JobLayout();
// Complete but for epoch, base, table, group and step counts.
const v1::OpenRequest& OpenTemplate(uint32_t world_size);

// A trainer group: every epoch that it goes through has the same.
struct Intent {
  uint64_t seed = 0;
  uint32_t group = 0;
  uint32_t world_size = 1;

  std::string Name() const { return std::string("group ") + static_cast<char>('a' + group); }
  // The sealed attempt; earlier ones are dropped.
  uint64_t FinalAttempt(int64_t step) const;
  v1::StepHeader Header(int64_t step) const;
  std::vector<std::string> Blobs(int64_t step) const;
  // The digest stands for the bits of a slice.
  uint32_t Digest(int64_t step, uint64_t attempt, v1::SliceKind kind, const model::Slice& slice) const;
};

// A chunk's norm as a function of its slices' digests.
template <typename DigestOf>
v1::ChunkNorm NormOf(const model::EpochPlan& plan, uint64_t chunk, const std::string& presence, DigestOf digest) {
  v1::ChunkNorm norm;
  norm.set_chunk(chunk);
  double sum = 0;
  for (const uint32_t index : plan.slices_of_chunk(chunk)) {
    if (plan.Touches(plan.slices()[index], presence)) sum += static_cast<double>(digest(index) >> 8);
  }
  norm.add_segments()->set_squared_norm(sum);
  return norm;
}

// Stands for a chunk's bits after a step that consumed slices with these digests.
uint64_t Evolve(uint64_t content, int64_t step, uint64_t digests, const v1::Verdict& verdict);

}  // namespace ballast::sim_members
