// The chunks of one job on one server: where each chunk lives, and the step that updates the chunks.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "ballast/kernels/kernels.h"
#include "ballast/kernels/optimizer.h"
#include "ballast/kernels/thread_pool.h"
#include "ballast/storage/io/interrupt.h"
#include "ballast/storage/placement/placement.h"
#include "ballast/storage/store/chunk_update.h"
#include "ballast/storage/store/extent_label.h"
#include "ballast/storage/store/scrubbed_extent.h"
#include "ballast/storage/tier/tiers.h"

namespace ballast::storage {

struct ChunkToAdd {
  uint64_t elements = 0;
  uint64_t id = 0;                      // durable: the chunk's id in the job's layout
  std::optional<DurableChunk> durable;  // state left by an earlier run, in an extent kept by the NVMe tier
  uint64_t aside_bytes = 0;             // durable: NVMe budget to set aside for the chunk's automatic pins
  StateForm form = StateForm::kFull;
  bool imported = false;  // its state is to be imported, and then becomes resident
};

// Called before bytes of NVMe are taken. An error refuses them.
using Admit = absl::FunctionRef<absl::Status(uint64_t bytes)>;
inline absl::Status Admitted(uint64_t) { return absl::OkStatus(); }

// Called if the disk does not return a state as it was written (`found`: DATA_LOSS, CHECKSUM), for the i-th chunk of a
// call. True: the caller can do without the state, the chunk is void from here on, as by ChunkStore::Void, and the call
// goes on. False: the call ends with `found`.
using Dispensable = absl::FunctionRef<bool(size_t i, const absl::Status& found)>;
inline bool Needed(size_t, const absl::Status&) { return false; }

class StoreCore;

// Threads: Run, Add, pins and unpins from one thread at a time; reads from any thread, at any time. A read sees a chunk
// before or after an update, never in between. A caller that needs an exact version must order reads and runs, as
// services/job_state does.
class ChunkStore {
 public:
  // Borrows `tiers` and `compute`, both of which must outlive the store; without `compute`, Run computes on its
  // caller's thread alone. Add takes space, and the destructor returns it. `account`: the account that the space counts
  // for.
  // REQUIRES: kernels::Unsupported(layout.optimizer()) is empty. A store without working copies has no state in HBM.
  // Chunks that keep a remainder cannot be in HBM either, and Add refuses them in a durable store. Add refuses chunks
  // with lent masters in a durable store, and in a store with working copies; reads of such a master are UNIMPLEMENTED
  // (UNSUPPORTED).
  ChunkStore(Tiers* tiers, const StateLayout& layout, kernels::ThreadPool* compute = nullptr,
             std::optional<DurableOptions> durable = std::nullopt, std::shared_ptr<Account> account = nullptr);
  ChunkStore(Tiers* tiers, const kernels::OptimizerSpec& optimizer, kernels::ThreadPool* compute = nullptr,
             std::optional<DurableOptions> durable = std::nullopt)
      : ChunkStore(tiers, StateLayout(optimizer), compute, std::move(durable)) {}
  ~ChunkStore();  // durable state stays on the disk
  // Call before destroying a durable store whose data is no longer needed: the destructor then frees the extents.
  void Discard();

  // Appends chunks of these sizes (elements), placed as `plan` says (one entry per size). New chunks are zero in every
  // tier. RESOURCE_EXHAUSTED (BUDGET, DISK_FULL) if a tier lacks space; then nothing was added. Add and PinDurably take
  // all space that runs of a durable store need, so a full disk refuses these two and never a run. Chunks with a
  // durable state are read back: DATA_LOSS (CHECKSUM) if the disk returns anything else than was written, INTERNAL
  // (IO). `interrupt`: asked before each of the latter; after its error the store must not be used.
  absl::Status Add(absl::Span<const ChunkToAdd> chunks, const Plan& plan, Interrupt interrupt = Uninterrupted,
                   Dispensable dispensable = Needed);
  absl::Status Add(absl::Span<const uint64_t> elements, const Plan& plan);
  uint64_t chunk_count() const;  // with gaps, so the next chunk's index
  uint64_t present_count() const;
  // Makes room in DRAM by dropping working copies, the last chunks' first: pulls then round the masters. Between two
  // runs, on the store's thread. False if this would gain no memory. Chunks with state in HBM, chunks that keep a
  // remainder, and all chunks of a server with a GPU keep their copies.
  absl::StatusOr<bool> DropWorkingCopies();
  bool may_drop_working_copies() const;
  // The same for these chunks. Passes over those that keep their copies, and takes the memory for pulls even beyond the
  // budget.
  absl::Status DropWorkingCopies(absl::Span<const uint64_t> chunks);
  // Whether the chunk has a working copy, which ReadWorking reads from memory.
  bool has_working_copy(uint64_t chunk) const;
  // The working copy, if it lies in this process's DRAM and the chunk is not being moved; else empty.
  // Never blocks. Valid until the chunk's next update, or until its copy is dropped.
  absl::Span<const std::byte> working_copy(uint64_t chunk) const;
  std::vector<PlacedChunk> placed() const;  // by index, a removed chunk is a gap
  // The layout of chunks that are not frozen.
  const StateLayout& layout() const;
  bool durable() const;
  // The store is durable and records its versions for a restart.
  bool records() const;
  // Durable store, on the store's thread: whether the chunk's state is newer than its extent; the version that the
  // extent holds.
  bool dirty(uint64_t chunk) const;
  int64_t durable_version(uint64_t chunk) const;
  // For a dirty chunk: the version before the first update since the extent was written. The extent's content is valid
  // up to this version, so replaying later updates makes the state again. At least durable_version.
  int64_t needed_from(uint64_t chunk) const;
  // After a crash the log is needed from this version on to make the chunk's state again: the version of its recorded
  // extent, or a later version up to which nothing changed the chunk. nullopt: the recorded extent holds the state.
  std::optional<int64_t> recoverable_from(uint64_t chunk) const;
  // Durable store, between runs: syncs and records the versions that earlier runs wrote and left unrecorded. Blocks.
  // Errors as Run's: afterwards the store refuses every further run.
  absl::Status Harden();
  // NVMe budget that a plan for these further chunks must count besides their own: room for new versions.
  uint64_t spare_bytes_missing(absl::Span<const ChunkToAdd> added) const;
  // Memory for pulls of chunks without a working copy, in a store of `chunks` chunks of at most `elements` each. Zero
  // once the store has taken it.
  PullMemory pull_memory_missing(uint64_t elements, uint64_t chunks) const;
  // DRAM that a plan for further chunks must count as staging: 0 once the store has taken its staging memory.
  uint64_t staging_bytes_missing() const;
  // The part of staging_bytes_missing that flushes of durable HBM state need, even where nothing is on NVMe.
  uint64_t flush_buffer_bytes_missing() const;
  // The part of the staging memory for slots, that is, for states on their way.
  uint64_t slot_memory_bytes() const;

  // Moves a chunk's state to another tier, between two runs; content, version and pins stay. On the store's thread;
  // blocks for one transfer of the state. At every moment the chunk has one valid state for reads. A working copy in
  // HBM leaves HBM with the state. Durable store: to NVMe, the chunk must not be dirty (Run flushes it first) and lives
  // in its present extent afterwards; away from NVMe, the extent stays the durable version. May take staging beyond a
  // lowered budget. RESOURCE_EXHAUSTED (BUDGET), FAILED_PRECONDITION if dirty, INVALID_ARGUMENT where the tier is
  // missing or cannot take the chunk, DATA_LOSS (CHECKSUM), INTERNAL (IO): then nothing has changed.
  absl::Status Move(uint64_t chunk, TierKind to);

  // Applies `updates`; `done(i)` is called in the order of the updates, each as soon as update i is visible to reads
  // (state may still be on its way to its tier). Loads, kernels and stores of different chunks overlap; with `compute`,
  // kernels of several chunks do, too, and reads of these chunks wait. Returns when all is stored. A durable
  // store records the new versions before Run returns, at the end of one of the next runs, or in Harden;
  // recoverable_from tells. On an error the chunks not yet announced by `done` may hold anything, and no version of
  // theirs is recorded: the caller must stop serving the job. A logged slice whose bytes differ from what was written
  // is DATA_LOSS (CHECKSUM), before its chunk changes; so is an imported state whose digests differ, before any chunk
  // changes. RESOURCE_EXHAUSTED: only where a pin's copy finds no space, see
  // Pin. `interrupt`: asked before each update; after its error the updates not announced by `done` have changed
  // nothing, and the store goes on. `dispensable`: called in place of `done`, in the same order, for a state on NVMe
  // that an update has found rotten.
  absl::Status Run(absl::Span<const ChunkUpdate> updates, absl::FunctionRef<void(size_t)> done,
                   const ReadBack& read_back = {}, Interrupt interrupt = Uninterrupted,
                   RunStageObserver observer = UnobservedStage, Dispensable dispensable = Needed);

  // Fill `to` with elements from `begin` on. ReadWorking reads the working copy in its dtype, of kE4m3Blocks whole
  // blocks; for a chunk without a working copy it rounds the master, and values of a frozen chunk come from its tier.
  // `crc32c`: gets that of the copy in `to`, while this is in the cache; null: nobody wants it.
  // ReadState reads a state array as fp32; kMaster of a frozen chunk are its values. INVALID_ARGUMENT outside the
  // chunk, amid a block, and for a moment that the optimizer lacks; DATA_LOSS (CHECKSUM) if the tier returned something
  // else than was written.
  absl::Status ReadWorking(uint64_t chunk, uint64_t begin, absl::Span<std::byte> to, uint32_t* crc32c = nullptr) const;
  absl::Status ReadState(uint64_t chunk, StateArray array, uint64_t begin, absl::Span<float> to) const;

  // The chunk's whole state for another server's copy of it, bit for bit, from wherever it lies. On the store's thread,
  // between runs; blocks for one transfer of the state. If the store keeps digests of the state, compares them:
  // DATA_LOSS (CHECKSUM). INTERNAL (IO); UNIMPLEMENTED (UNSUPPORTED) where a part of the master is the working copy or
  // the trainer's memory.
  absl::StatusOr<WholeState> ReadWhole(uint64_t chunk) const;

  // From now on the content of these chunks in memory does not count. They are not dirty, no run writes their state,
  // recoverable_from is nullopt, pins for reading do not have them, and a scrub leaves out their newest extents. The
  // extents stay as they are until an imported version replaces them, which makes the chunks normal again. Until then
  // any other update of them is INVALID_ARGUMENT (BAD_REQUEST), before anything changes, and so is ReadWhole. Other
  // reads may return anything. On the store's thread, between runs.
  void Void(absl::Span<const uint64_t> chunks);

  // Gives these chunks up. Their memory, their extents, those of pins, and all else that Add took for them return to
  // the tiers. Staging returns once no state lies on NVMe, buffers for reads once no chunk is left. On a server with a
  // GPU, working copies that share page-locked memory return with the last chunk of their Add. On the store's thread,
  // between runs; blocks for reads of the chunks under way, and for a Harden of the others. The indices of other chunks
  // stay. A removed chunk's index is a gap: nothing counts it, every pass over all chunks leaves it out, and reads,
  // moves and updates of it are INVALID_ARGUMENT (BAD_RANGE). REQUIRES: no thread uses a working_copy() of theirs.
  // Since the last run, the caller has erased their entries, and those of pins, from what a restart reads.
  // INVALID_ARGUMENT (BAD_RANGE): one of them is not there, and nothing has changed. Else as Harden.
  absl::Status Remove(absl::Span<const uint64_t> chunks);

  // Keeps all chunks as they are now readable under `pin` while later steps go on: copy on write, into free NVMe space,
  // else DRAM. A Run that finds no space for a copy fails before it changes that chunk: RESOURCE_EXHAUSTED (BUDGET).
  // Chunks added or imported later do not exist under the pin: FAILED_PRECONDITION (VERSION_GONE). A restore also
  // replaces a state that can no longer be read. The pin then has no copy of the chunk, and reads of it are DATA_LOSS
  // (CHECKSUM, IO).
  absl::Status Pin(int64_t pin);
  // Bytes of copies that Run would make of these chunks for pins: of NVMe where there is such a tier, else of DRAM.
  uint64_t CopyBytes(absl::Span<const ChunkUpdate> updates) const;
  absl::Status ReadPinnedWorking(int64_t pin, uint64_t chunk, uint64_t begin, absl::Span<std::byte> to) const;
  absl::Status ReadPinnedState(int64_t pin, uint64_t chunk, StateArray array, uint64_t begin,
                               absl::Span<float> to) const;
  void Unpin(int64_t pin);

  // Durable store: keeps the chunks' present state on the disk as `version`, until UnpinDurably and beyond the store's
  // end. Writes the states that are not on the disk yet; chunks that were never updated have none. Returns the entries
  // that TakeBackPin needs after a restart; the pin is durable once the caller has recorded these entries.
  // RESOURCE_EXHAUSTED (BUDGET, DISK_FULL): the pin does not fit; UNAVAILABLE (BUSY): a chunk is void; then nothing was
  // done. Any other error: a device failed, as in Run. `automatic`: takes budget from what was set aside for automatic
  // pins, and returns the budget there. `interrupt`: asked before each chunk that is written; after its error there is
  // no pin, and the store goes on. `admit`: asked first, unless the pin is automatic.
  absl::StatusOr<std::vector<DurableChunk>> PinDurably(int64_t version, bool automatic = false,
                                                       Interrupt interrupt = Uninterrupted, Admit admit = Admitted);
  // A client also wants this automatic pin: takes ordinary budget for it. RESOURCE_EXHAUSTED (BUDGET, DISK_FULL):
  // nothing was done.
  absl::Status AdoptPin(int64_t version, Admit admit = Admitted);
  // After a restart: an earlier run of the server left this pin, perhaps without any chunk.
  void ExpectPin(int64_t version);
  // After Add, before any Run: the pin keeps this state of the chunk.
  // RESOURCE_EXHAUSTED (BUDGET, DISK_FULL); DATA_LOSS (IO) if the NVMe tier did not keep the extent.
  absl::Status TakeBackPin(int64_t version, uint64_t chunk, const DurableChunk& kept, bool automatic = false);
  // Reads all state that the pin keeps: DATA_LOSS (CHECKSUM) if the disk returns anything else than was written.
  // FAILED_PRECONDITION (VERSION_GONE) if there is no such pin, or it lacks a chunk. Blocks. Not while Run runs.
  // `interrupt`: asked before each chunk. `mends`: called for each damaged state, with its chunk's index in the store.
  // True: the reading goes on. The state stays as it is.
  absl::Status VerifyPin(int64_t version, Interrupt interrupt, Dispensable mends = Needed);
  // Drops the pin and frees what nothing else needs. REQUIRES: the pin is not recorded any more.
  void UnpinDurably(int64_t version);

  // What the pin keeps of the chunk, for another server that copies both. On the store's thread, between runs; blocks
  // for one read. FAILED_PRECONDITION (VERSION_GONE): there is no such pin, or it lacks the chunk; DATA_LOSS
  // (CHECKSUM); else as ReadWhole.
  absl::StatusOr<KeptState> ReadKept(int64_t version, uint64_t chunk) const;
  // Has the pin keep this state of the chunk, which comes from another server. Makes the pin if it is not there. If the
  // pin keeps a state already, that state stays, and is mended (MendKept). The state is written, but not synced: call
  // SyncKept, then record KeptBy, before the chunk is imported. On the store's thread, between runs. RESOURCE_EXHAUSTED
  // (BUDGET, DISK_FULL), or `admit`'s error; INVALID_ARGUMENT and DATA_LOSS as an imported state: then nothing has
  // changed. INTERNAL (IO): as in Run.
  absl::Status ImportKept(int64_t version, uint64_t chunk, const KeptState& kept, Admit admit = Admitted);
  absl::Status SyncKept(int64_t version);
  // `kept`: what another server's pin keeps of the chunk. If the bytes here are damaged, rewrites them in their place,
  // and syncs. On the store's thread, between runs. FAILED_PRECONDITION (VERSION_GONE): the pin keeps nothing of the
  // chunk; INVALID_ARGUMENT and DATA_LOSS (CHECKSUM) as an imported state; DATA_LOSS (DIVERGED): the other server keeps
  // another state; INTERNAL (IO): not written; after a failed sync the store refuses every further run.
  absl::Status MendKept(int64_t version, uint64_t chunk, const KeptState& kept);
  // A pin that keeps these bytes; nullopt if no pin does.
  std::optional<int64_t> PinOf(const ScrubbedExtent& extent) const;
  // By chunk: bytes of the states that durable pins keep of it, each counted once. ImportKept takes the same number for
  // all of them. On the store's thread. Empty where the store is not durable.
  std::vector<uint64_t> KeptBytes() const;
  // The entries of what the pin keeps, except for chunks `without`.
  std::vector<DurableChunk> KeptBy(int64_t version, absl::Span<const uint64_t> without = {}) const;

  // Scrub, on the store's thread, between runs. Reads at most `buffer`, aligned to 4096, of the states on the disk.
  ScrubPiece ScrubNext(absl::Span<std::byte> buffer);
  // Bytes of the pass of a scrub under way.
  uint64_t scrub_pass_bytes() const;
  // The chunk's states on the disk.
  std::vector<ScrubbedExtent> Extents(uint64_t chunk) const;
  // For a chunk whose state lies in memory: reads the moments that a restart has left on the disk, for its next update.
  // DATA_LOSS (CHECKSUM), INTERNAL (IO): nothing has changed.
  absl::Status LoadMoments(uint64_t chunk);
  // The same for those of `chunks` that lack their moments, ahead of a run. After an error, some have them.
  absl::Status LoadMoments(absl::Span<const uint64_t> chunks, Dispensable dispensable);
  // Rewrites the extent from the state in memory, and syncs. REQUIRES: in_memory, and neither dirty, kept nor
  // moments_unread.
  // DATA_LOSS (CHECKSUM): memory does not hold that state. INTERNAL (IO): not written; after a failed sync the store
  // refuses every further run.
  absl::Status Rewrite(const ScrubbedExtent& extent);

  // Bytes of state / of working copies in each tier.
  struct Residency {
    TierBytes state;
    TierBytes working;
  };
  Residency residency() const;

 private:
  std::unique_ptr<StoreCore> core_;
};

}  // namespace ballast::storage
