// One run of a chunk store: the updates of a step, applied to chunks wherever their state lives.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "ballast/kernels/thread_pool.h"
#include "ballast/storage/store/log_reads.h"
#include "ballast/storage/store/state_update.h"
#include "ballast/storage/store/store_core.h"

namespace ballast::storage {

// Several updates are under way at a time, so that all of the pool's threads have pieces: an update is begun while
// earlier ones are computed, unless it would have to wait for something. Updates end in order. Threads: the one that
// runs the store.
class StoreRun {
 public:
  StoreRun(StoreCore* core, absl::FunctionRef<void(size_t)> done, RunStageObserver observer,
           Dispensable dispensable = Needed);
  // As ChunkStore::Run. Once.
  absl::Status Run(absl::Span<const ChunkUpdate> updates, const ReadBack& read_back, Interrupt interrupt);

 private:
  // An update on its way. From StartPieces or StartOnDevice to Settle its chunk is changing, and threads compute the
  // pieces, or the device the whole.
  struct Begun {
    size_t index = 0;
    StoredChunk* chunk = nullptr;
    const ChunkUpdate* update = nullptr;
    std::byte* state = nullptr;
    std::unique_ptr<ChunkUpdate> fetched = nullptr;  // `update`, if part of it was in the log
    // State from the disk is compared with its digests during the update: a comparison before would read it twice.
    bool verified = true;
    absl::Status unreadable;  // of a restore: the old state could not be read
    bool stores = false;      // the new state goes to the disk
    NvmeExtent fresh = {};
    WrittenState read = {};  // the state from the disk
    std::unique_ptr<StateUpdate> work = nullptr;
    std::unique_ptr<kernels::ThreadPool::Batch> pieces = nullptr;
    HbmWork on_device = {};  // in place of `work` and `pieces`

    // Digests of the new state are wanted.
    bool digests_new() const { return stores || update->digests != nullptr; }
    bool changes() const { return !update->values.empty() || !update->segments.empty() || update->replaces(); }
    // Pins that want the old state get a copy. They lose a chunk that is imported.
    bool copies() const { return changes() && update->imported == nullptr; }
    uint64_t weight() const { return pieces == nullptr ? 0 : std::max<uint64_t>(pieces->count, 1); }
  };

  absl::StatusOr<std::vector<StoredChunk*>> CheckUpdates(absl::Span<const ChunkUpdate> updates) const;
  // Returns `update` with its logged gradient and values read from the log and compared with their digests. The bytes
  // lie in the memory of `reads_`.
  absl::StatusOr<std::unique_ptr<ChunkUpdate>> FetchLogged(size_t i, const ChunkUpdate& update);
  // Moments of state in DRAM that a restart has left on the disk, of all chunks whose updates need them.
  absl::Status LoadMoments(absl::Span<const ChunkUpdate> updates, absl::Span<StoredChunk* const> chunks,
                           Interrupt interrupt);
  // The queue for what goes between disk and memory; null if nothing does.
  absl::StatusOr<IoQueue*> QueueFor(absl::Span<const ChunkUpdate> updates, absl::Span<StoredChunk* const> chunks);
  // Does the update's new state go to the disk?
  bool Stores(const ChunkUpdate& update, const StoredChunk& chunk) const;
  // Begins all updates, in order. `interrupted`: the error of `interrupt` at which it stopped.
  absl::Status BeginAll(absl::Span<const ChunkUpdate> updates, absl::Span<StoredChunk* const> chunks,
                        Interrupt interrupt, absl::Status* interrupted);
  // Ends what was begun, and records it. `status`: BeginAll's.
  absl::Status End(absl::Status status);
  // Are so many updates under way that the oldest should end before another begins?
  bool Enough() const;
  // Begins update i, or applies it whole. Ends earlier updates first where it would have to wait for anything else.
  absl::Status Begin(size_t i, const ChunkUpdate& update, StoredChunk& chunk);
  // NVMe state on its way into a staging slot.
  absl::Status LoadState(Begun& next);
  // Where somebody reads the chunk, ends all earlier updates: the read may hang, and they do not wait for it.
  absl::Status FinishBeforeReader(StoredChunk& chunk);
  void StartPieces(Begun next, std::optional<CopyOnWrite> copy);
  // For an update in a device's memory that nothing else waits for.
  absl::Status StartOnDevice(Begun next);
  // For a replaced state, and for an update of a device's memory of which a version or a copy goes to the disk.
  absl::Status ApplyAtOnce(Begun& next, std::optional<CopyOnWrite> copy);
  // The state that the update replaces, if pins want it; ends all earlier updates then. A restore goes on where that
  // state cannot be read: the pins lose the chunk, and no restore needs what it replaces.
  absl::StatusOr<std::optional<CopyOnWrite>> CopyForPins(Begun& next);
  absl::StatusOr<CopyOnWrite> CopyFor(absl::Span<const int64_t> pins, Begun& next);
  // Has all of the old state in memory, and compares it with its digests. DATA_LOSS (CHECKSUM), INTERNAL (IO).
  absl::Status VerifyOld(Begun& next);
  // Ends the oldest update: computes until its pieces have returned, or waits for the device, starts its way to the
  // disk, and announces it. After an error nothing is under way, and later updates are not announced.
  absl::Status FinishOldest();
  absl::Status FinishAll();
  void Abandon();
  // The pieces have returned: the chunk has its new version, or the old one was rotten.
  absl::Status Settle(Begun& begun);
  // The old state was rotten, and the chunk is void from here on: nothing of the update stays.
  void Lose(Begun& begun);
  // `chunk`: the update's.
  void NoteVersion(Begun& changed, StoredChunk& chunk) ABSL_EXCLUSIVE_LOCKS_REQUIRED(chunk.mutex);
  absl::Status Conclude(const Begun& changed);
  // Durable store: takes an extent for the chunk's next version, after hardening older versions if room is short.
  absl::StatusOr<NvmeExtent> MakeRoom(const StoredChunk& chunk);
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
  const absl::FunctionRef<void(size_t)> done_;
  const RunStageObserver observer_;
  const Dispensable dispensable_;
  uint64_t run_ = 0;
  static constexpr uint64_t kLostShown = 16;
  uint64_t lost_for_pins_ = 0;  // chunks that CopyForPins could not copy
  std::optional<LogReads> reads_;
  std::optional<UpdatePipeline> pipeline_;
  const std::function<void()> poll_ = [this] { pipeline_->Poll(); };
  kernels::ThreadPool::Caller caller_;
  std::deque<Begun> begun_;  // oldest first
  uint64_t pieces_begun_ = 0;
  uint64_t begun_on_device_ = 0;
};

}  // namespace ballast::storage
