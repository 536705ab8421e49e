// Reads the gradients of one run's updates back from the gradient log, past the kernels: those of the next updates are
// read ahead, as far as there is memory.
//
// Slot life: free -> loading -> loaded -> (kernel) -> free. Reads start in the order of the updates, so the one that
// the kernel waits for is always among the oldest.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "ballast/storage/chunk_store.h"
#include "ballast/storage/io/io_queue.h"
#include "ballast/storage/tier/tiers.h"

namespace ballast::storage {

// Threads: one.
class LogReads {
 public:
  // Each has one request in flight.
  static constexpr uint64_t kReadsMax = 8;
  // Tags of its requests; nobody else's have this bit.
  static constexpr uint64_t kTag = uint64_t{1} << 62;

  // Of `memory`, what values of one chunk take, and what gradients do at least.
  struct Sizes {
    uint64_t values_bytes = 0;
    uint64_t gradient_bytes = 0;  // of the largest
    uint64_t bytes_min() const { return values_bytes + gradient_bytes; }
  };
  // `elements`: of each update's chunk.
  static Sizes SizesOf(absl::Span<const ChunkUpdate> updates, absl::Span<const uint64_t> elements);

  // Borrows all. REQUIRES: from.memory holds sizes.bytes_min().
  LogReads(absl::Span<const ChunkUpdate> updates, const Sizes& sizes, const ReadBack& from, IoQueue* queue,
           Tiers* tiers);

  // Starts what there is memory for.
  void Start();
  // Starts no more.
  void End() { next_ = updates_.size(); }
  void Complete(const IoCompletion& completion);
  // Has the read of update i's gradient come to an end?
  bool Arrived(size_t i) const;
  // Its bytes, not compared with their digest. REQUIRES: Arrived(i). INTERNAL (IO).
  absl::StatusOr<absl::Span<const std::byte>> Bytes(size_t i) const;
  // Update i is through with them.
  void Release(size_t i);
  // For values, which are read one after the other: initial values and edits are rare.
  absl::Span<std::byte> values_memory() const { return values_memory_; }
  const BlockFile& log() const { return *from_.log; }

 private:
  enum class Phase { kFree, kLoading, kLoaded };
  struct Slot {
    Phase phase = Phase::kFree;
    size_t update = 0;
    std::byte* data = nullptr;
    absl::Status status;
  };
  const Slot* Find(size_t update) const;

  const absl::Span<const ChunkUpdate> updates_;
  const ReadBack from_;
  IoQueue* const queue_;
  Tiers* const tiers_;
  absl::Span<std::byte> values_memory_;
  std::vector<Slot> slots_;
  size_t next_ = 0;  // updates before it have been started, or have nothing in the log
};

}  // namespace ballast::storage
