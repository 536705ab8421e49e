// The DRAM that a store takes for states on their way: slots for updates, buffers for reads from disk, slots for pulls.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "ballast/storage/placement/placement.h"
#include "ballast/storage/store/chunk_reader.h"
#include "ballast/storage/store/pulled_copies.h"
#include "ballast/storage/store/update_pipeline.h"
#include "ballast/storage/tier/tiers.h"

namespace ballast::storage {

// Each part is taken once, when the first chunk needs it.
// Threads: the store's thread; `reader` and `pulled` from any.
class StoreBuffers {
 public:
  // `account`: whose the memory is.
  StoreBuffers(Tiers* tiers, std::shared_ptr<Account> account)
      : reader(tiers, account), tiers_(tiers), account_(std::move(account)) {}

  // Takes the staging memory to move states of this size; 0: no state needs moving. INVALID_ARGUMENT (BAD_CONFIG) if
  // the server's staging is too small; RESOURCE_EXHAUSTED (BUDGET).
  absl::Status TakeStaging(uint64_t state_bytes, DramTier::Limit limit);
  // Takes memory for pulls of chunks without a working copy. RESOURCE_EXHAUSTED (BUDGET).
  absl::Status TakePullMemory(const PullMemory& wanted, DramTier::Limit limit = DramTier::Limit::kBudget);

  // No state lies on NVMe any more: the slots' memory goes back.
  void ReleaseStaging() { staging.Release(); }
  // No chunk is left: everything goes back. REQUIRES: nobody reads.
  void Release();

  // Bytes that the staging memory has for slots.
  uint64_t slot_memory_bytes() const;
  // What is still to be taken: as ChunkStore's.
  uint64_t staging_bytes_missing() const;
  uint64_t flush_buffer_bytes_missing() const;
  PullMemory pull_memory_missing(uint64_t copy_bytes, uint64_t chunks) const;

  ChunkReader reader;
  PulledCopies pulled;
  PipelineStaging staging;

 private:
  Tiers* const tiers_;
  const std::shared_ptr<Account> account_;
  DramBlock pull_memory_;  // of `pulled` and of further buffers of `reader`
};

}  // namespace ballast::storage
