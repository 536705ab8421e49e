// The words between a store and its parts: the update of one chunk by one step, and how a store is asked for it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/types/span.h"
#include "ballast/kernels/optimizer.h"
#include "ballast/storage/io/block_file.h"
#include "ballast/storage/log/log_format.h"
#include "ballast/storage/placement/state_layout.h"
#include "ballast/storage/store/extent_label.h"
#include "ballast/storage/store/whole_state.h"

namespace ballast::storage {

// The work of a run's thread: it computes, waits for reads, waits for writes and syncs, or copies a pinned state.
enum class RunStage { kCompute, kRead, kWrite, kPin };
inline constexpr int kRunStages = 4;
// Called on the run's thread whenever its work changes: at most a few times per chunk.
using RunStageObserver = absl::FunctionRef<void(RunStage)>;
inline void UnobservedStage(RunStage) {}

// One step's work on one chunk, in this order: values overwrite the master, the optimizer updates segments, the working
// copy is rounded from the master. Or values overwrite a moment, and nothing else is done: these values cover whole
// segments, in one part or several, so each segment begins at a multiple of kernels::kMomentBlock and shares no block.
// Spans are borrowed until Run returns.
// `working`, for a store without working copies: the trainer's memory for the resulting working parameters, beginning
// with the first element, in the optimizer's working dtype. null: the parameters are written nowhere. Borrowed until
// the update is `done`. Where the layout lends masters, `working` is the master: every segment names it, and values
// without it are in the trainer's memory already.
struct ChunkUpdate {
  struct Values {
    uint64_t begin = 0;  // elements from the chunk's start
    absl::Span<const float> values;
    std::byte* working = nullptr;
    // Used instead of `values`: the values in the working dtype, to be widened to fp32.
    absl::Span<const std::byte> narrow = {};
    // `width`: bytes of a working parameter.
    uint64_t count(uint64_t width) const { return narrow.empty() ? values.size() : narrow.size() / width; }
  };
  // A slice of values whose bytes are in the gradient log.
  struct LoggedValues {
    PayloadPlace place;
    uint64_t begin = 0;  // the slice's first element, from the chunk's start
    struct Part {
      uint64_t begin = 0;  // elements from the chunk's start
      uint64_t end = 0;
      std::byte* working = nullptr;
    };
    std::vector<Part> parts;  // the parts of the slice to apply
  };
  struct SegmentUpdate {
    uint64_t begin = 0;
    uint64_t end = 0;
    kernels::Coefficients coefficients;
    const std::byte* gradient = nullptr;  // lent by the trainer, borrowed as `working`; null: in the chunk's gradient
    std::byte* working = nullptr;
  };
  uint64_t chunk = 0;                          // the store's own index, from Add
  StateArray values_of = StateArray::kMaster;  // values of a moment come without segments and without lent memory
  std::vector<Values> values;
  std::vector<SegmentUpdate> segments;
  std::vector<LoggedValues> logged_values;  // like `values`, for elements not in `values`
  // The gradient of all segments without a gradient of their own, in the optimizer's gradient dtype, from element
  // `gradient_begin` on; empty if there is none. `logged_gradient` names the same bytes in the gradient log instead.
  absl::Span<const std::byte> gradient;
  std::optional<PayloadPlace> logged_gradient;
  uint64_t gradient_begin = 0;
  kernels::RandomKey random;  // first_element: the chunk's, in its unit
  // Durable store: the chunk's version after this update, and whether state that lives in memory is written to disk.
  // State that lives on NVMe is always written.
  int64_t version = -1;
  bool flush = false;
  // Durable store: replaces the chunk's state by the state that this durable pin keeps, or by zero if the chunk had no
  // state when the pin was made. Nothing else is done.
  std::optional<int64_t> restored;
  // Replaces the chunk's whole state by this one, of another server's copy of the chunk; the working copy is rounded
  // from its master. Nothing else is done. A durable store always writes it to a fresh extent, whatever `flush` says:
  // no log leads from the state before to this one. Pins for reading that were made before do not have the chunk any
  // more; durable ones lack it, unless they keep it or ImportKept brought what belongs to them. Borrowed until Run
  // returns.
  const WholeState* imported = nullptr;
  // Gets the digests of the new state's arrays before the update is announced. Stays empty where the state is replaced
  // as a whole, or lies in HBM. null: nobody wants them. Borrowed until Run returns.
  std::optional<ArrayDigests>* digests = nullptr;

  // Replaces the whole state, whatever it was.
  bool replaces() const { return restored.has_value() || imported != nullptr; }
};

// A store whose chunks outlive the process. Every version of a chunk goes to a free extent; once the version is
// written, synced and recorded, the previous version's extent is free. So at every moment `record` knows one whole
// version of each chunk.
struct DurableOptions {
  std::string job;    // written into the labels
  uint64_t life = 0;  // the job's, written into the labels too
  // Keeps the entries for a restart, all or none, durably. Blocks. Called on the store's thread. Empty: a restart looks
  // for pins only, so an old version's extent is free as soon as the new version is written.
  std::function<absl::Status(absl::Span<const DurableChunk>)> record;
};

// The log and the memory for reading back logged gradients and values of a run's updates.
struct ReadBack {
  const BlockFile* log = nullptr;
  // Aligned to 4096. Holds the values of one chunk as fp32; the rest bounds how many gradients are read at the same
  // time, at most LogReads::kReadsMax.
  absl::Span<std::byte> memory;
};

}  // namespace ballast::storage
