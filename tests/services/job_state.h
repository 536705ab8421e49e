// A job's state for tests of its parts: a plan and chunks, without a server, threads or a lock.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ballast/proto/model/optimizer.h"
#include "ballast/proto/model/protocol.h"
#include "ballast/proto/model/tiling.h"
#include "ballast/services/job_state/held_chunk.h"
#include "ballast/services/job_state/state_form.h"
#include "ballast/tests/scratch_directory.h"
#include "ballast/tests/services/trainer_group.h"

namespace ballast::services {

// An Open of `spec` on the server "s" alone.
inline v1::OpenRequest OpenOf(const v1::JobSpec& spec, uint32_t world_size) {
  v1::OpenRequest open;
  open.mutable_epoch()->set_counter(1);
  open.set_base(-1);
  *open.mutable_spec() = spec;
  open.set_spec_digest(model::SpecDigest(spec));
  open.set_protocol_version(model::kProtocolVersion);
  *open.mutable_tiling() = model::EvenTiling(world_size);
  v1::Member* const member = open.add_members();
  member->set_server_id("s");
  member->set_weight(1);
  return open;
}

inline std::shared_ptr<const model::EpochPlan> PlanOf(const v1::JobSpec& spec, uint32_t world_size = 1) {
  absl::StatusOr<model::EpochPlan> plan = model::EpochPlan::Make(OpenOf(spec, world_size));
  EXPECT_TRUE(plan.ok()) << plan.status();
  return std::make_shared<const model::EpochPlan>(*std::move(plan));
}

// DRAM for slices, and chunks that a plan gives to the server, at version -1.
class JobMemory {
 public:
  std::vector<std::shared_ptr<HeldChunk>> ChunksOf(const model::EpochPlan& plan, bool logged = false) const {
    const kernels::OptimizerSpec optimizer = *model::OptimizerOf(plan.open().spec());
    std::vector<std::shared_ptr<HeldChunk>> chunks;
    for (const model::Chunk& chunk : plan.layout().chunks()) {
      const auto held = std::make_shared<HeldChunk>(memory, chunks.size(), chunk.index, chunk.range.size(),
                                                    FormOf(chunk), optimizer, logged);
      held->Open(chunk, plan);
      held->ComeBack(-1);
      chunks.push_back(held);
    }
    return chunks;
  }

 private:
  ScratchDirectory directory_;

 public:
  const std::unique_ptr<storage::Tiers> tiers =
      *storage::Tiers::Open({.budget = {.dram = uint64_t{64} << 20}, .directory = directory_.path()});
  const std::shared_ptr<SliceMemory> memory = std::make_shared<SliceMemory>(tiers.get());
};

}  // namespace ballast::services
