// A chunk store over tiers in its own directory.
#pragma once

#include <memory>
#include <vector>

#include "ballast/storage/store/chunk_store.h"
#include "ballast/tests/scratch_directory.h"
#include "ballast/tests/storage/store/reference_chunks.h"
#include "ballast/tests/storage/tier/test_hbm.h"

namespace ballast::storage {

// Elements of each chunk. Sizes differ, and all chunks together exceed the staging; the last of each three is short.
inline const std::vector<uint64_t>& Sizes() {
  static const std::vector<uint64_t> sizes = {65536, 65536, 20224, 65536, 65536, 256, 65536, 65536, 1280};
  return sizes;
}

struct StoreOnTiers {
  // Staging for `slots` full chunks, and the readers' buffer.
  static uint64_t StagingBytes(uint64_t slots) { return kMiB + slots * StateLayout().StateBytes(65536); }

  StoreOnTiers(TierBytes budget, uint64_t slots, kernels::MasterFormat master = kernels::MasterFormat::kF32) {
    tiers = *Tiers::Open(
        {.budget = budget, .directory = directory.path(), .staging_bytes = StagingBytes(slots), .open_hbm = TestHbm()});
    store = std::make_unique<ChunkStore>(tiers.get(), kernels::OptimizerSpec{.master = master}, &compute);
    for (const uint64_t n : Sizes()) reference.emplace_back(n);
  }

  // Places chunk i's state on kinds[i modulo kinds.size()].
  Plan PlanOf(const std::vector<TierKind>& kinds) const {
    Plan plan;
    for (size_t i = 0; i < Sizes().size(); ++i) plan.chunks.push_back({.state = kinds[i % kinds.size()]});
    return plan;
  }
  static PullMemory PullMemoryOf(uint64_t chunks) {
    const ScratchDirectory empty;
    const auto tiers = *Tiers::Open({.budget = {.dram = kMiB}, .directory = empty.path()});
    return ChunkStore(tiers.get(), kernels::OptimizerSpec()).pull_memory_missing(65536, chunks);
  }
  // The same without working copies, with memory for their pulls.
  Plan PlanWithoutCopies(const std::vector<TierKind>& kinds) const {
    Plan plan = PlanOf(kinds);
    for (ChunkPlacement& chunk : plan.chunks) chunk.working = std::nullopt;
    plan.pull = store->pull_memory_missing(65536, Sizes().size());
    return plan;
  }

  absl::Status Run(const StepUpdates& step) {
    const absl::Status status = store->Run(step.updates(), [](size_t) {});
    if (status.ok()) step.ApplyTo(reference);
    return status;
  }

  absl::Status RunValues(uint64_t seed) {
    StepUpdates step(seed);
    for (size_t i = 0; i < Sizes().size(); ++i) step.AddValues(i, Sizes()[i]);
    return Run(step);
  }

  // `stride` > 1 leaves chunks out.
  absl::Status RunSegments(uint64_t t, size_t stride = 1) {
    StepUpdates step(1000 + t);
    for (size_t i = 0; i < Sizes().size(); i += stride) step.AddSegments(i, Sizes()[i], t);
    return Run(step);
  }

  ScratchDirectory directory;
  kernels::ThreadPool compute{3};
  std::unique_ptr<Tiers> tiers;
  std::unique_ptr<ChunkStore> store;
  std::vector<ReferenceChunk> reference;
};

}  // namespace ballast::storage
