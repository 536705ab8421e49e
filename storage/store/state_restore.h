// Takes states back from the disk, in the tiers where their chunks live now: those of an earlier run of the server, and
// those that durable pins keep.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "ballast/kernels/thread_pool.h"
#include "ballast/storage/io/interrupt.h"
#include "ballast/storage/store/chunk_store.h"
#include "ballast/storage/store/state_update.h"
#include "ballast/storage/store/stored_chunk.h"
#include "ballast/storage/store/update_pipeline.h"
#include "ballast/storage/tier/tiers.h"

namespace ballast::storage {

// Is the entry of this chunk? DATA_LOSS (IO).
absl::Status CheckFits(const StoredChunk& chunk, const DurableChunk& durable);

// Every state is checked: DATA_LOSS (CHECKSUM) if the disk returns anything else than was written, INTERNAL (IO).
// Threads: the store's thread.
class StateRestore {
 public:
  // Borrows the pointers. `job`: as in the labels.
  StateRestore(Tiers* tiers, kernels::ThreadPool* compute, PipelineStaging* staging, std::string job)
      : tiers_(tiers), compute_(compute), staging_(staging), job_(std::move(job)) {}

  // Takes back the states left by an earlier run. A restart is over once trainers can pull, and pulls need the master
  // alone: the master and the label are read and checked here, moments where the first update needs them (Moments,
  // UpdatePipeline). State in HBM is read whole.
  absl::Status All(absl::Span<const ChunkToAdd> added, const std::vector<StoredChunk*>& chunks, Interrupt interrupt,
                   Dispensable dispensable = Needed) const;
  // Reads and checks the moments that All left on the disk, of those chunks whose state lives in DRAM. Nothing in
  // flight on the store's queue. `interrupt`'s error, which is asked before each chunk: then the chunks that were not
  // read are as before.
  absl::Status Moments(absl::Span<StoredChunk* const> chunks, Interrupt interrupt,
                       Dispensable dispensable = Needed) const;
  // The same of one chunk, which may have them already, with a read of its own: transfers may be in flight.
  absl::Status Moments(StoredChunk& chunk) const;

  // Reads the state `durable` from its extent into `state`, in host memory, or into the chunk's own memory on a device,
  // and makes the working copy.
  absl::Status Version(const StoredChunk& chunk, const DurableChunk& durable, std::byte* state,
                       const Compute& with) const;
  // The same with the zero state of a chunk that was never updated.
  absl::Status Zero(const StoredChunk& chunk, std::byte* state, const Compute& with) const;
  // The same with another server's state, whose digests were compared before.
  absl::Status Imported(const StoredChunk& chunk, const WholeState& imported, std::byte* state,
                        const Compute& with) const;

  // Compares a whole state, or its label alone, with what the entry says.
  absl::Status CheckState(const StoredChunk& chunk, const DurableChunk& durable, const std::byte* state,
                          const Compute& with) const;
  absl::Status CheckLabel(const StoredChunk& chunk, const DurableChunk& durable, const std::byte* label) const;

 private:
  // Compares one array, at `bytes`, with its digest.
  absl::Status CheckArray(const WrittenState& written, const StoredChunk& chunk, StateArray array,
                          const std::byte* bytes, const Compute& with) const;
  // The rest of Moments, once they were read.
  absl::Status TakeMoments(StoredChunk& chunk, uint64_t read_bytes, const Compute& with) const;
  // `durable` has been taken back, `read_bytes` of it read.
  void TakeDurable(StoredChunk& chunk, const DurableChunk& durable, uint64_t read_bytes, bool moments_unread) const;
  // The rest of Version, once `state` was read: checks label and digests, then TakeState.
  absl::Status TakeRead(const StoredChunk& chunk, const DurableChunk& durable, std::byte* state,
                        const Compute& with) const;
  // Copies `state`, in host memory, to the device if the chunk lives there, and makes the working copy.
  absl::Status TakeState(const StoredChunk& chunk, std::byte* state, const Compute& with) const;

  Tiers* const tiers_;
  kernels::ThreadPool* const compute_;
  PipelineStaging* const staging_;
  const std::string job_;
};

}  // namespace ballast::storage
