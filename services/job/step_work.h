// A decided step becomes updates of chunks: WorkOf makes the updates from the job's state and changes nothing, and
// Commit hands the chunks' slices over to the updates.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "ballast/services/job_state/held_chunk.h"
#include "ballast/storage/store/chunk_update.h"
#include "ballast/v1/state_service.pb.h"

namespace ballast::services {

// A decided step, as the worker applies it.
struct StepWork {
  int64_t step = 0;
  std::vector<storage::ChunkUpdate> updates;
  std::vector<std::shared_ptr<HeldChunk>> touched;    // of `updates`, in the same order
  std::vector<std::shared_ptr<HeldChunk>> untouched;  // get the new version, unchanged
  std::vector<std::shared_ptr<HeldChunk>> changed;    // the step changes them, though the disk may have that already
  std::vector<Intake::Buffers> buffers;               // per update: its spans borrow from them
  // Updates read slices from the log into this buffer; null if there are none to read.
  std::shared_ptr<SliceMemory::Buffer> read_back;
  // Where updates put digests of their chunks' new states, for those whose turn it is. Elements stay where they are.
  std::deque<std::optional<storage::ArrayDigests>> digests;
  std::shared_ptr<void> lent;  // while updates may touch a trainer's memory
  // In a replay. `incomplete`: an error if the log lacks a slice of the step. `replayed` hears, under the job's lock,
  // the bytes that a finished update read from the log.
  absl::Status incomplete;
  std::function<void(uint64_t)> replayed;
};

// The state that the work of a step depends on. Borrowed.
struct StepState {
  absl::Span<const std::shared_ptr<HeldChunk>> chunks;
  const storage::StateLayout* layout = nullptr;
  uint64_t seed = 0;                        // of the job
  absl::Span<const uint64_t> tensor_steps;  // with this step counted
  const LentMemory* lent = nullptr;         // for this step; null: nothing
  bool logged = false;                      // a restart replays the step from a log
  bool has_copies = false;                  // other servers have the chunks too
};

// Under the job's lock, which guards the chunks.
StepWork WorkOf(const StepState& state, const v1::PreparedRecord& prepared, const v1::Decision& decision);
// The work is going to be done: empties the intakes of all `chunks`. `release_idle`: buffers are part of no
// reservation. Returns how many buffers come back once the work is done.
uint64_t Commit(const StepWork& work, absl::Span<const std::shared_ptr<HeldChunk>> chunks, bool release_idle);
// When the work begins, under the job's lock: takes out updates of chunks that have the step already, or that the
// server lacks. `buffers`: how many come back.
struct PassedOverUpdates {
  HeldChunks chunks;
  size_t buffers = 0;
};
PassedOverUpdates PassOverOthers(StepWork* work);
// The updates from `first` on whose chunks are leased go behind the others, each in their order. Returns how many are
// not leased. No lock: their chunks get no lease any more.
size_t PutLeasedLast(StepWork* work, size_t first);

}  // namespace ballast::services
