// Moves NVMe state past the kernels of one run: the next chunks are read ahead while one is computed and earlier ones
// are written back. What updates only have places of is read ahead beside it (log_reads.h).
//
// Slot life: free -> loading -> loaded -> (kernel) -> storing -> stored -> free. Loads start in the order of the
// updates, so the slot that the kernel waits for is always among the oldest. A slot whose store is complete is freed
// once the chunk's readers have been sent back to the disk.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "ballast/storage/io/io_queue.h"
#include "ballast/storage/log_reads.h"
#include "ballast/storage/stored_chunk.h"
#include "ballast/storage/tier/tiers.h"

namespace ballast::storage {

// The memory and the queue that a store's runs share.
struct PipelineStaging {
  // Of flushes, in flight: a step waits for its gradient log, which must not queue up behind whole chunks.
  static constexpr uint64_t kFlushBytesMax = uint64_t{4} << 20;
  // Bound on slots: each has at most one request in flight; and one is a flush's.
  static constexpr uint64_t kSlotsMax = kIoRequestsMax - 1 - LogReads::kReadsMax;

  // A queue of this thread for the disk's files, made again when another thread runs the store.
  absl::StatusOr<IoQueue*> Queue(Disk* disk);
  // REQUIRES: there is none yet. A queue that was made before it had the memory is made again.
  void Take(DramBlock block) {
    queue_.reset();
    memory = std::move(block);
  }

  DramBlock memory;
  uint64_t slot_bytes = 0;  // of the largest chunk state

 private:
  std::unique_ptr<IoQueue> queue_;  // dies before the memory registered with it
  uint64_t queue_thread_ = 0;
};

// Threads: one.
class UpdatePipeline {
 public:
  // `chunks`: one per update, in order; only those on NVMe are moved. Borrows all; `reads`: null if nothing is.
  UpdatePipeline(absl::Span<StoredChunk* const> chunks, PipelineStaging* staging, IoQueue* queue, Tiers* tiers,
                 LogReads* reads);

  // The state of update i, in memory as the disk returned it: not compared with its digests. Before the kernel.
  absl::StatusOr<std::byte*> Load(size_t i);
  // The gradient of update i, from the log, not compared with its digest; valid until the caller releases it from the
  // reads. REQUIRES: the update has its place.
  absl::StatusOr<absl::Span<const std::byte>> LoadGradient(size_t i);
  // Starts writing the state of update i back. The chunk's `staged` must point to it by then.
  absl::Status Store(size_t i);
  // Writes state that lives in memory to the chunk's extent, behind what was to be flushed before. It must not change
  // before Drain.
  absl::Status Flush(size_t i);
  // Waits until all that Store and Flush began is on its way no more. The first that failed, if any.
  absl::Status DrainStores();
  // Looks at completions and starts what became possible, without blocking: kernels call it between pieces.
  void Poll();
  // Waits for all that is in flight, also after an error. The first store that failed, if any: its chunk stays staged.
  absl::Status Drain();

 private:
  enum class Phase { kFree, kLoading, kLoaded, kStoring, kStored };
  struct Slot {
    Phase phase = Phase::kFree;
    std::byte* data = nullptr;
    size_t update = 0;
    absl::Status status;  // of the load
  };

  // Where an update's state is before it. Looked up once: Poll runs while a chunk's lock is held and takes no other
  // one.
  struct Source {
    uint64_t offset = 0;
    bool zero = false;
  };

  Slot* Find(size_t update);
  void LoadAhead();
  absl::Status StartLoad(Slot& slot);
  absl::Status Submit(const Slot& slot, IoRequest::Kind kind, uint64_t offset);
  absl::Status Transfer(IoRequest::Kind kind, uint64_t offset, absl::Span<std::byte> buffer, uint64_t tag);
  void Reap(bool wait);
  void Complete(const IoCompletion& completion);
  void SendFlush();
  // `may_wait`: for readers of the chunk. Not while another chunk's lock is held.
  void FreeStored(bool may_wait);

  const absl::Span<StoredChunk* const> chunks_;
  IoQueue* const queue_;
  Tiers* const tiers_;
  LogReads* const reads_;
  std::vector<Source> sources_;  // by update
  std::vector<Slot> slots_;
  struct Unsent {
    uint64_t offset = 0;
    absl::Span<std::byte> bytes;
  };
  std::deque<Unsent> to_flush_;
  bool flushing_ = false;  // a part of one is in flight
  uint64_t loading_bytes_ = 0;
  size_t next_load_ = 0;  // updates before it have been loaded, or need not be
  absl::Status failed_;   // the first store that failed
  std::vector<IoCompletion> completions_;
};

}  // namespace ballast::storage
