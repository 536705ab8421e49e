// The part of a step bound by memory and processor: a chunk store's update of state in DRAM, and the digests of state
// on its way to or from disk.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "ballast/kernels/optimizer.h"
#include "ballast/kernels/thread_pool.h"
#include "ballast/storage/memory/arena.h"
#include "ballast/storage/store/chunk_store.h"
#include "ballast/storage/tier/tiers.h"

namespace ballast::services {

uint64_t PerSecond(uint64_t count, absl::Duration time);

// Runs AdamW over chunks in DRAM, larger together than the processor's caches. Threads: one.
class MemoryStep {
 public:
  // Takes kChunks chunks of 2^20 elements. Nothing is written to `directory`.
  static absl::StatusOr<std::unique_ptr<MemoryStep>> Make(const std::string& directory, kernels::MomentFormat moments);

  // Speed with `threads` threads, measured for about `duration`, at least one step. A step before the measurement, from
  // zero state, is not counted.
  absl::StatusOr<uint64_t> ElementsPerSecond(int threads, absl::Duration duration);
  // Bytes read and written to update an element: state, gradient, working copy.
  double bytes_per_element() const;

 private:
  static constexpr uint64_t kChunks = 16;
  static constexpr uint64_t kElements = uint64_t{1} << 20;
  MemoryStep() = default;
  absl::Status Step(storage::ChunkStore* store);
  absl::StatusOr<storage::ChunkStore*> StoreOf(int threads);

  kernels::OptimizerSpec spec_;
  std::unique_ptr<storage::Tiers> tiers_;
  storage::Arena gradients_;
  // The store of the last number of threads; made again when the number changes.
  std::unique_ptr<kernels::ThreadPool> pool_;
  std::unique_ptr<storage::ChunkStore> store_;
  uint64_t steps_ = 0;
};

// Bytes of state that a store digests per second, measured for about `duration` over the states in `memory`, round and
// round. REQUIRES: `memory` holds the state of at least one chunk of 2^20 elements.
uint64_t DigestBytesPerSecond(absl::Span<const std::byte> memory, int threads, absl::Duration duration);

}  // namespace ballast::services
