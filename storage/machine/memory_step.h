// The part of a step that is bound by memory and processor: a chunk store's update of state in DRAM, and the digests of
// state that moves.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "ballast/kernels/optimizer.h"
#include "ballast/kernels/thread_pool.h"
#include "ballast/storage/chunk_store.h"
#include "ballast/storage/io/arena.h"
#include "ballast/storage/tier/tiers.h"

namespace ballast::storage {

uint64_t PerSecond(uint64_t count, absl::Duration time);

// AdamW with these moments over chunks in DRAM, more than a cache holds. Threads: one.
class MemoryStep {
 public:
  // Takes kChunks chunks of 2^20 elements. Nothing is written to `directory`.
  static absl::StatusOr<std::unique_ptr<MemoryStep>> Make(const std::string& directory, kernels::MomentFormat moments);

  // By `threads` threads, for about `duration`, at least one step. After the first call, which is slower.
  absl::StatusOr<uint64_t> ElementsPerSecond(int threads, absl::Duration duration);
  // Read and written by an update of one element: state, gradient, working copy.
  double bytes_per_element() const;

 private:
  static constexpr uint64_t kChunks = 16;
  static constexpr uint64_t kElements = uint64_t{1} << 20;
  MemoryStep() = default;
  absl::Status Step(ChunkStore* store);
  absl::StatusOr<ChunkStore*> StoreOf(int threads);

  kernels::OptimizerSpec spec_;
  std::unique_ptr<Tiers> tiers_;
  Arena gradients_;
  // One store a number of threads, made when it is first asked for; the other is gone.
  std::unique_ptr<kernels::ThreadPool> pool_;
  std::unique_ptr<ChunkStore> store_;
  uint64_t steps_ = 0;
};

// Of the states in `memory`, one after the other, as a store computes them, for about `duration`. REQUIRES: room for a
// chunk's state of 2^20 elements.
uint64_t DigestBytesPerSecond(absl::Span<const std::byte> memory, int threads, absl::Duration duration);

}  // namespace ballast::storage
