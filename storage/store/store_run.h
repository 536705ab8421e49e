// One run of a chunk store: the updates of a step, applied to chunks wherever their state lives.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "ballast/storage/store/store_core.h"

namespace ballast::storage {

// Threads: the one that runs the store.
class StoreRun {
 public:
  StoreRun(StoreCore* core, RunStageObserver observer) : core_(*core), observer_(observer) {}
  // As ChunkStore::Run.
  absl::Status Run(absl::Span<const ChunkUpdate> updates, absl::FunctionRef<void(size_t)> done,
                   const ReadBack& read_back, Interrupt interrupt);

 private:
  absl::StatusOr<std::vector<StoredChunk*>> CheckUpdates(absl::Span<const ChunkUpdate> updates) const;
  // Returns `update` with its logged gradient and values read from the log and compared with their digests. The bytes
  // lie in the memory of `reads`.
  absl::StatusOr<ChunkUpdate> FetchLogged(size_t i, const ChunkUpdate& update, UpdatePipeline& pipeline,
                                          LogReads& reads) const;
  // Moments of state in DRAM that a restart has left on the disk, of all chunks that the run changes.
  absl::Status LoadMoments(absl::Span<const ChunkUpdate> updates, absl::Span<StoredChunk* const> chunks,
                           Interrupt interrupt);
  absl::Status Apply(size_t i, const ChunkUpdate& update, StoredChunk& chunk, UpdatePipeline& pipeline);
  // Durable store: takes an extent for the chunk's next version, after hardening older versions if room is short.
  absl::StatusOr<NvmeExtent> MakeRoom(const StoredChunk& chunk, UpdatePipeline& pipeline);
  // Durable store: begins the chunk's next version in the extent `fresh`, which is empty if the chunk's extent is fresh
  // already. Labels `state`, in host memory, for its way to the extent.
  void StartVersion(StoredChunk& chunk, std::byte* state, int64_t version, NvmeExtent fresh)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(chunk.mutex);
  // As StartVersion, for state on a device, which it writes to the extent; readers of the working copy do not wait.
  absl::Status SpillVersion(StoredChunk& chunk, int64_t version, NvmeExtent fresh)
      ABSL_SHARED_LOCKS_REQUIRED(chunk.reading) ABSL_LOCKS_EXCLUDED(chunk.mutex);
  DurableChunk EntryOf(const StoredChunk& chunk, int64_t version, const NvmeExtent& extent) const;
  // The chunk moves on to the version `entry`.
  void TakeVersion(StoredChunk& chunk, const DurableChunk& entry, NvmeExtent fresh)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(chunk.mutex);
  absl::Status ApplyOnDevice(const ChunkUpdate& update, StoredChunk& chunk) ABSL_EXCLUSIVE_LOCKS_REQUIRED(chunk.mutex);
  // ApplyOnDevice for an update of the master: queues values, rounding and segments.
  absl::Status QueueUpdate(const ChunkUpdate& update, const StoredChunk& chunk, HbmQueue& queue) const;
  void CountUpdate(const ChunkUpdate& update, const StoredChunk& chunk) const;

  // `work`, which `stage` names for the observer.
  template <typename Work>
  auto As(RunStage stage, const Work& work) const {
    observer_(stage);
    auto result = work();
    observer_(RunStage::kCompute);
    return result;
  }

  StoreCore& core_;
  const RunStageObserver observer_;
};

}  // namespace ballast::storage
