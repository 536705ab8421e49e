// The chunks of one job on one server: where each lives, and the step that updates them.
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
#include "ballast/storage/extent_label.h"
#include "ballast/storage/log/log_format.h"
#include "ballast/storage/placement/placement.h"
#include "ballast/storage/tier/tiers.h"

namespace ballast::storage {

// What one step does to one chunk, in this order: values overwrite the master, segments are updated by the optimizer,
// the working copy is rounded from the master. Or values overwrite a moment, and nothing else is done: then they are of
// whole segments, in one part or several, so each begins at a multiple of kernels::kMomentBlock and has its blocks
// alone. Spans are borrowed until Run returns.
// `working`, of a store without working copies: where the trainer has the working parameters that these elements
// become, from the first on, in the optimizer's working dtype; null: nowhere. Borrowed until the update is `done`.
struct ChunkUpdate {
  struct Values {
    uint64_t begin = 0;  // elements from the chunk's start
    absl::Span<const float> values;
    std::byte* working = nullptr;
    // In the stead of `values`: in the working dtype, which they are widened from.
    absl::Span<const std::byte> narrow = {};
    // `width`: bytes of a working parameter.
    uint64_t count(uint64_t width) const { return narrow.empty() ? values.size() : narrow.size() / width; }
  };
  // A slice of values whose bytes are in the gradient log.
  struct LoggedValues {
    PayloadPlace place;
    uint64_t begin = 0;  // of the slice, elements from the chunk's start
    struct Part {
      uint64_t begin = 0;  // of the chunk
      uint64_t end = 0;
      std::byte* working = nullptr;
    };
    std::vector<Part> parts;  // what the update takes of it
  };
  struct SegmentUpdate {
    uint64_t begin = 0;
    uint64_t end = 0;
    kernels::Coefficients coefficients;
    const std::byte* gradient = nullptr;  // of its own, in the trainer's memory; null: in the chunk's. As `working`
    std::byte* working = nullptr;
  };
  uint64_t chunk = 0;                          // the store's own index, from Add
  StateArray values_of = StateArray::kMaster;  // of a moment: no segments, nothing lent
  std::vector<Values> values;
  std::vector<SegmentUpdate> segments;
  std::vector<LoggedValues> logged_values;  // as `values`, of other elements
  // In the optimizer's gradient dtype: all elements that segments without a gradient of their own touch, from
  // `gradient_begin` on; empty if there is none. Or where the gradient log has these bytes.
  absl::Span<const std::byte> gradient;
  std::optional<PayloadPlace> logged_gradient;
  uint64_t gradient_begin = 0;
  kernels::RandomKey random;  // first_element: the chunk's, in its unit
  // Of a durable store: what the chunk's state is after this update, and whether it goes to the disk although it lives
  // in memory. State that lives on NVMe does so in any case.
  int64_t version = -1;
  bool flush = false;
  // Of a durable store: the state that this durable pin keeps takes the place of the chunk's, or zero if the chunk had
  // none when the pin was made; nothing else is done.
  std::optional<int64_t> restored;
};

// A store whose chunks outlive the process. Every version of a chunk goes to a free extent; when it is there, synced
// and recorded, the extent of the version before is free. So at every moment each chunk has one whole version that
// `record` was told of.
struct DurableOptions {
  std::string job;    // for the labels
  uint64_t life = 0;  // of it, too
  // Keeps the entries for a restart, all or none of them, durably. Blocks. On the thread that runs the store. Empty:
  // nobody looks for them after a restart, pins aside, so what a new version replaces is free as soon as that is
  // written.
  std::function<absl::Status(absl::Span<const DurableChunk>)> record;
};

// Where a run reads back what its updates only have places of.
struct ReadBack {
  const BlockFile* log = nullptr;
  // Aligned to 4096. As many gradients are on their way as it holds, at most LogReads::kReadsMax, beside the values of
  // one chunk as fp32.
  absl::Span<std::byte> memory;
};

struct ChunkToAdd {
  uint64_t elements = 0;
  uint64_t id = 0;                      // durable: in the job's layout
  std::optional<DurableChunk> durable;  // as an earlier run left it, in an extent that the NVMe tier kept
  uint64_t aside_bytes = 0;             // durable: of NVMe budget, for automatic pins of it
};

// Threads: Run, Add, pins and unpins from one thread at a time; reads from any thread, at any time. A read sees a chunk
// before or after an update, never amid it; who needs an exact version orders reads himself (services/job does).
class ChunkStore {
 public:
  // Borrows `tiers` and `compute`, which must outlive it; without the latter Run computes on its caller's thread alone.
  // Space is taken by Add, returned by the destructor. REQUIRES: kernels::Unsupported(layout.optimizer()) is empty.
  // Without working copies no state can be in HBM.
  ChunkStore(Tiers* tiers, const StateLayout& layout, kernels::ThreadPool* compute = nullptr,
             std::optional<DurableOptions> durable = std::nullopt);
  ChunkStore(Tiers* tiers, const kernels::OptimizerSpec& optimizer, kernels::ThreadPool* compute = nullptr,
             std::optional<DurableOptions> durable = std::nullopt)
      : ChunkStore(tiers, StateLayout(optimizer), compute, std::move(durable)) {}
  ~ChunkStore();  // what is durable stays on the disk
  // Of a durable store that is not wanted any more, before the destructor: its extents are freed.
  void Discard();

  // Appends chunks of these sizes (elements), placed as `plan` says (one entry per size). All zero, and zero in every
  // tier. RESOURCE_EXHAUSTED (BUDGET) if a tier lacks space; then nothing was added.
  // Chunks with a durable state are read back: DATA_LOSS (CHECKSUM) if one is not what was written, INTERNAL (IO).
  absl::Status Add(absl::Span<const ChunkToAdd> chunks, const Plan& plan);
  absl::Status Add(absl::Span<const uint64_t> elements, const Plan& plan);
  uint64_t chunk_count() const;
  std::vector<PlacedChunk> placed() const;
  const StateLayout& layout() const;
  bool durable() const;
  // Durable, and its versions are recorded for a restart.
  bool records() const;
  // Of a durable store, on the thread that runs it: is chunk's state newer than its extent, and at which version is
  // that?
  bool dirty(uint64_t chunk) const;
  int64_t durable_version(uint64_t chunk) const;
  // Of a dirty chunk: the version that its extent stands for until its next update, so what came later makes it again.
  // At least durable_version.
  int64_t needed_from(uint64_t chunk) const;
  // The version from which on the log is needed to make the chunk's state again after a crash: that of its recorded
  // extent, or a later one up to which nothing changed it. None: the recorded extent holds its state.
  std::optional<int64_t> recoverable_from(uint64_t chunk) const;
  // Of a durable store, between runs: makes durable and records what runs stored and left for later. Blocks. Errors as
  // Run's: afterwards nothing works any more.
  absl::Status Harden();
  // NVMe budget that a plan for these further chunks must count besides their own: room for new versions.
  uint64_t spare_bytes_missing(absl::Span<const uint64_t> elements) const;
  // DRAM that a plan for further chunks must count as staging: 0 once it is taken.
  uint64_t staging_bytes_missing() const;
  // Of these, what durable state in HBM is flushed through: needed also where nothing is on NVMe.
  uint64_t flush_buffer_bytes_missing() const;
  // Of the staging memory, what holds states on their way.
  uint64_t slot_memory_bytes() const;

  // Moves a chunk's state to another tier, between two runs; its content, version and pins stay. On the thread that
  // runs the store; blocks for one transfer of the state. At every moment the chunk has one valid state, which reads
  // find. A working copy that is in HBM leaves it with the state. Of a durable store: to NVMe, the chunk must not be
  // dirty (Run flushes it first), and the extent that it has is where it lives; from there, its extent stays the
  // durable version. May take staging beyond a lowered budget. RESOURCE_EXHAUSTED (BUDGET), FAILED_PRECONDITION if
  // dirty, INVALID_ARGUMENT where the tier is not there or takes no such chunk, DATA_LOSS (CHECKSUM), INTERNAL (IO):
  // then nothing has changed.
  absl::Status Move(uint64_t chunk, TierKind to);

  // Applies `updates` in order; `done(i)` is called as soon as update i is visible to reads (state may still be on its
  // way to its tier). Loads, kernels and stores of different chunks overlap. Returns when all is stored; in a durable
  // store it is recorded by then, at the end of one of the next runs, or by Harden (recoverable_from tells). On an
  // error the chunks not yet announced by `done` may hold anything: the caller must stop serving the job. A slice that
  // is not in the log as it was written is DATA_LOSS (CHECKSUM), before its chunk changes.
  absl::Status Run(absl::Span<const ChunkUpdate> updates, absl::FunctionRef<void(size_t)> done,
                   const ReadBack& read_back = {});

  // Elements from `begin` on, as many as `to` holds: of the working copy in its dtype (of a store without: the rounded
  // master, read from where the state is) / of a state array as fp32.
  // INVALID_ARGUMENT outside the chunk, and for a moment that the optimizer does not have; DATA_LOSS (CHECKSUM) if what
  // the tier returned is not what was written.
  absl::Status ReadWorking(uint64_t chunk, uint64_t begin, absl::Span<std::byte> to) const;
  absl::Status ReadState(uint64_t chunk, StateArray array, uint64_t begin, absl::Span<float> to) const;

  // Keeps all chunks as they are now readable under `pin` while later steps go on: copy on write, into free NVMe space,
  // else DRAM. A Run that finds no space for a copy fails before it changes that chunk: RESOURCE_EXHAUSTED (BUDGET).
  // Chunks added later do not exist under the pin: FAILED_PRECONDITION (VERSION_GONE).
  absl::Status Pin(int64_t pin);
  absl::Status ReadPinnedWorking(int64_t pin, uint64_t chunk, uint64_t begin, absl::Span<std::byte> to) const;
  absl::Status ReadPinnedState(int64_t pin, uint64_t chunk, StateArray array, uint64_t begin,
                               absl::Span<float> to) const;
  void Unpin(int64_t pin);

  // Of a durable store: keeps the state that all chunks with one have now, `version`, on the disk until UnpinDurably,
  // beyond the store's end. Writes what is not there yet. Returns what a restart needs for TakeBackPin; the pin is
  // durable once the caller has recorded that. RESOURCE_EXHAUSTED (BUDGET, IO): it does not fit; nothing was done.
  // Else: a device failed, as in Run.
  // `automatic`: from the budget that was set aside for such pins, and back to it.
  absl::StatusOr<std::vector<DurableChunk>> PinDurably(int64_t version, bool automatic = false);
  // An automatic pin is wanted by somebody else too, who takes budget of his own for it. RESOURCE_EXHAUSTED (BUDGET,
  // IO): nothing was done.
  absl::Status AdoptPin(int64_t version);
  // After a restart: there is such a pin of an earlier run of the server, though it may keep no chunk.
  void ExpectPin(int64_t version);
  // After Add, before any Run: such a pin keeps this state of the chunk.
  // RESOURCE_EXHAUSTED (BUDGET); DATA_LOSS (IO) if the NVMe tier did not keep it.
  absl::Status TakeBackPin(int64_t version, uint64_t chunk, const DurableChunk& kept, bool automatic = false);
  // Reads all that the pin keeps: DATA_LOSS (CHECKSUM) if some of it is not what was written. FAILED_PRECONDITION
  // (VERSION_GONE) if there is no such pin. Blocks. Not beside Run.
  // `refusal`: asked before each chunk; what it returns unless OK ends the reading.
  absl::Status VerifyPin(int64_t version, absl::FunctionRef<absl::Status()> refusal);
  // The pin must not be recorded any more. Frees what nothing else has.
  void UnpinDurably(int64_t version);

  // Bytes of state / of working copies in each tier.
  struct Residency {
    TierBytes state;
    TierBytes working;
  };
  Residency residency() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ballast::storage
