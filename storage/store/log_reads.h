// Reads the gradients of one run's updates back from the gradient log. While kernels work on earlier updates, gradients
// of the next updates are read ahead, as far as there is memory.
//
// Slot life: free -> loading -> loaded -> (kernel) -> free. Reads start in the order of the updates, so the read that
// the kernel waits for is always among the oldest.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "ballast/storage/io/io_queue.h"
#include "ballast/storage/store/chunk_update.h"
#include "ballast/storage/tier/tiers.h"

namespace ballast::storage {

// Threads: one.
class LogReads {
 public:
  // Each read has one request in flight.
  static constexpr uint64_t kReadsMax = 8;
  // Marks the tags of LogReads' requests: no request of another part has this bit.
  static constexpr uint64_t kTag = uint64_t{1} << 62;

  // The least memory needed: for the values of one chunk, and for one gradient.
  struct Sizes {
    uint64_t values_bytes = 0;
    uint64_t gradient_bytes = 0;  // the largest gradient's
    uint64_t bytes_min() const { return values_bytes + gradient_bytes; }
  };
  // `elements`: size of each update's chunk.
  static Sizes SizesOf(absl::Span<const ChunkUpdate> updates, absl::Span<const uint64_t> elements);

  // Borrows all arguments. REQUIRES: from.memory holds sizes.bytes_min().
  LogReads(absl::Span<const ChunkUpdate> updates, const Sizes& sizes, const ReadBack& from, IoQueue* queue,
           Tiers* tiers);

  // Starts as many reads as there is memory for.
  void Start();
  // From now on Start starts nothing.
  void End() { next_ = updates_.size(); }
  void Complete(const IoCompletion& completion);
  // Has the read of update i's gradient ended?
  bool Arrived(size_t i) const;
  // The gradient of update i, not compared with its digest unless it had to be read again. REQUIRES: Arrived(i).
  // INTERNAL (IO).
  absl::StatusOr<absl::Span<const std::byte>> Bytes(size_t i);
  // Reads the gradient of update i once more, as ReadPayload, to where Bytes has it. REQUIRES: Arrived(i). Blocks.
  absl::Status ReadAgain(size_t i);
  // Update i no longer needs its gradient's bytes.
  void Release(size_t i);
  // Memory for values. Values are read one slice after another, since initial values and edits are rare.
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
  Slot* Find(size_t update) { return const_cast<Slot*>(std::as_const(*this).Find(update)); }

  const absl::Span<const ChunkUpdate> updates_;
  const ReadBack from_;
  IoQueue* const queue_;
  Tiers* const tiers_;
  absl::Span<std::byte> values_memory_;
  std::vector<Slot> slots_;
  size_t next_ = 0;  // all updates before this index have been started, or have nothing in the log
};

}  // namespace ballast::storage
