// Moves NVMe state past the kernels of one run: while a chunk is computed, the next chunks are read ahead and earlier
// chunks are written back. Gradients in the log are read ahead at the same time (log_reads.h).
//
// Slot life: free -> loading -> loaded -> (kernel) -> storing -> stored -> free. Loads start in the order of the
// updates, so the slot that the kernel waits for is always among the oldest. After its store is complete a slot is
// freed as soon as readers of the chunk go to the disk again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "ballast/storage/io/io_queue.h"
#include "ballast/storage/store/chunk_update.h"
#include "ballast/storage/store/log_reads.h"
#include "ballast/storage/store/stored_chunk.h"
#include "ballast/storage/tier/nvme_tier.h"
#include "ballast/storage/tier/tiers.h"

namespace ballast::storage {

// The memory and the queue that a store's runs share.
struct PipelineStaging {
  // Bytes of flushes in flight: a step waits for its gradient log, whose writes must not queue up behind whole chunks.
  static constexpr uint64_t kFlushBytesMax = uint64_t{4} << 20;
  // Files that flushes go to at the same time.
  static constexpr int64_t kFlushesMax = 4;
  // Bound on slots: every slot, every log read and every flush have at most one request in flight.
  static constexpr uint64_t kSlotsMax = kIoRequestsMax - kFlushesMax - LogReads::kReadsMax;

  // The calling thread's queue for the disk's files, made again when another thread runs the store.
  absl::StatusOr<IoQueue*> Queue(Disk* disk);
  // Takes the slots' memory. REQUIRES: there is no memory yet. A queue made earlier is made again, to register `block`.
  void Take(DramBlock block) {
    queue_.reset();
    memory = std::move(block);
  }

  // Gives the slots' memory back.
  void Release() {
    queue_.reset();
    memory = DramBlock();
    slot_bytes = 0;
  }

  DramBlock memory;
  uint64_t slot_bytes = 0;  // size of the largest chunk state

 private:
  std::unique_ptr<IoQueue> queue_;  // dies before the memory registered with it
  uint64_t queue_thread_ = 0;
};

// Threads: one.
class UpdatePipeline {
 public:
  // `chunks`: the chunk of each update, in order; only chunks on NVMe are moved. Borrows all arguments. `reads`: null
  // if nothing is read from the log. `unread`: by update, true where nobody needs the old state, which is then not
  // read, and zero; empty: all are read.
  UpdatePipeline(absl::Span<StoredChunk* const> chunks, PipelineStaging* staging, IoQueue* queue, Tiers* tiers,
                 LogReads* reads, RunStageObserver observer = UnobservedStage, const std::vector<bool>& unread = {});

  // Would Load(i) return at once?
  bool Loaded(size_t i);
  // Waits for the state of update i, before the kernel. The bytes are as the disk returned them: not compared with
  // their digests. `unreadable`, for an update that can do without them: gets the error of their read, which is then
  // no error of Load.
  absl::StatusOr<std::byte*> Load(size_t i, absl::Status* unreadable = nullptr);
  // Waits for the gradient of update i from the log. The bytes are not compared with their digest, and valid until
  // LogReads::Release(i). REQUIRES: the update has a logged gradient.
  absl::StatusOr<absl::Span<const std::byte>> LoadGradient(size_t i);
  // Starts to write the state of update i back. REQUIRES: the state is staged.
  absl::Status Store(size_t i);
  // Writes state that lives in memory to the chunk's extent, after the flushes that are queued already. The state must
  // not change before Drain.
  absl::Status Flush(size_t i);
  // Update i changes nothing: the slot that Load returned is free.
  void Release(size_t i);
  // Waits until all writes of Store and Flush have ended. Returns the first error.
  absl::Status DrainStores();
  // Handles completions and starts new transfers, without blocking: kernels call Poll between pieces.
  void Poll();
  // Waits for everything in flight, also after an error. Returns the first failed store, whose chunk stays staged.
  absl::Status Drain();

 private:
  enum class Phase { kFree, kLoading, kLoaded, kStoring, kStored };
  struct Slot {
    Phase phase = Phase::kFree;
    std::byte* data = nullptr;
    size_t update = 0;
    absl::Status status;  // the load's
    NvmeFile* stores_to = nullptr;
  };

  // The place of an update's old state. Looked up once: Poll runs while a chunk's lock is held and must not take the
  // lock of a second chunk.
  struct Source {
    NvmeFile* file = nullptr;
    uint64_t offset = 0;
    bool zero = false;
  };

  struct Unsent {
    uint64_t offset = 0;
    absl::Span<std::byte> bytes;
  };
  // Flushes to one file, in order; a part of one of them is in flight.
  struct Flushes {
    NvmeFile* file = nullptr;
    uint64_t index = 0;
    std::deque<Unsent> unsent;
    uint64_t in_flight = 0;  // bytes
  };

  Slot* Find(size_t update);
  Flushes& FlushesOf(NvmeFile* file);
  void LoadAhead();
  absl::Status StartLoad(Slot& slot);
  absl::Status Submit(const Slot& slot, IoRequest::Kind kind, NvmeFile* file, uint64_t offset);
  absl::Status Transfer(IoRequest::Kind kind, NvmeFile* file, uint64_t offset, absl::Span<std::byte> buffer,
                        uint64_t tag);
  void Reap(bool wait);
  // Waits for a completion, which `stage` names for the observer.
  void Wait(RunStage stage);
  void Complete(const IoCompletion& completion);
  void SendFlush(Flushes& flushes);
  // `may_wait`: may block on readers of the chunk. Not while another chunk's lock is held.
  void FreeStored(bool may_wait);

  const absl::Span<StoredChunk* const> chunks_;
  IoQueue* const queue_;
  Tiers* const tiers_;
  LogReads* const reads_;
  const RunStageObserver observer_;
  std::vector<Source> sources_;  // by update
  std::vector<Slot> slots_;
  std::deque<Flushes> flushes_;
  uint64_t loading_bytes_max_ = 0;
  uint64_t loading_bytes_ = 0;
  size_t next_load_ = 0;  // all updates before this index have been loaded, or need no load
  absl::Status failed_;   // the first failed store
  std::vector<IoCompletion> completions_;
};

}  // namespace ballast::storage
