// One addition of chunks to a store: takes all of their places, appends them, and reads back what an earlier run left.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "ballast/storage/store/store_core.h"

namespace ballast::storage {

// Threads: the one that runs the store.
class StoreAddition {
 public:
  // Borrows all three.
  StoreAddition(StoreCore* core, absl::Span<const ChunkToAdd> added, const Plan& plan);
  // As ChunkStore::Add. Once.
  absl::Status Run(Interrupt interrupt, Dispensable dispensable = Needed);

 private:
  absl::Status Check() const;
  absl::Status CheckChunk(size_t i) const;
  // Takes DRAM for all chunks together. On a server with a GPU each state has memory of its own.
  absl::Status TakeMemory();
  absl::StatusOr<OwnMemory> TakeOwn(size_t i) const;
  // Extents for NVMe state, and those of an earlier run. A durable store also takes the budget for the first version of
  // chunks in memory and for new versions of all chunks.
  absl::Status TakeNvme();
  absl::Status TakeKept();
  absl::Status TakeFresh();
  // After an error of this run: leaves the extents of an earlier run on the disk.
  void LeaveKept();
  std::vector<StoredChunk*> Append();
  // The new chunk's memory. `shared`: the chunks' DRAM, of which the bytes before `*next` are given out.
  ChunkMemory MemoryOf(size_t i, DramBlock* shared, std::byte** next);
  absl::Status Restore(const std::vector<StoredChunk*>& chunks, Interrupt interrupt, Dispensable dispensable);

  StateLayout LayoutOf(size_t i) const { return core_.layout.Of(added_[i].form, plan_.chunks[i]); }
  uint64_t StateBytes(size_t i) const { return LayoutOf(i).StateBytes(added_[i].elements); }
  // States in DRAM lie in the memory that all new chunks share.
  bool shares() const { return core_.tiers->hbm() == nullptr; }
  // Every chunk was left by an earlier run.
  bool restores() const;
  // Every chunk was left by an earlier run, or is imported later: memory that is touched now is touched twice.
  bool fills() const;

  StoreCore& core_;
  const absl::Span<const ChunkToAdd> added_;
  const Plan& plan_;
  // The tiers get these back unless the store takes them over.
  DramBlock dram_;
  std::vector<OwnMemory> own_;       // of each chunk
  std::vector<NvmeExtent> extents_;  // of each chunk
  NvmeRoom room_;                    // durable store: for new versions, and set aside for automatic pins
  uint64_t spare_bytes_ = 0;
  uint64_t aside_bytes_ = 0;
};

}  // namespace ballast::storage
