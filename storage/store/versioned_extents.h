// Extents for new versions of a durable store's chunks, and the steps before the old version's extent is free.
//
// Order: the new version is written; the file is synced; the entries are recorded; the old extents are freed. A crash
// before the record leaves the old version, a crash after the record the new version. The record may come some runs
// later: until then both versions have their extents, and the log must hold the steps from the old version to the new.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "ballast/storage/store/chunk_update.h"
#include "ballast/storage/tier/nvme_tier.h"

namespace ballast::storage {

// Threads: the store's thread.
class VersionedExtents {
 public:
  VersionedExtents(NvmeTier* nvme, DurableOptions options) : nvme_(nvme), options_(std::move(options)) {}
  ~VersionedExtents();
  // Call before destroying a store whose data is no longer needed: frees the old extents and the
  // room.
  void Discard();

  const std::string& job() const { return options_.job; }
  uint64_t life() const { return options_.life; }
  // Number of versions that may be written before a run must stop and harden. A quarter of all chunks, so that a run
  // that stores few chunks need not stop; at least 16, so that the disk has something to write meanwhile; at most 128,
  // which is 1.5 GiB of Adam's state: beside so much writing a stop costs little.
  static constexpr uint64_t kSparesMin = 16, kSparesMax = 128;
  static uint64_t Spares(uint64_t chunks) { return std::min(chunks, std::clamp(chunks / 4, kSparesMin, kSparesMax)); }
  // Number of runs whose versions share a sync and a record. Every run more saves a sync and a record, and delays the
  // cut of the log by a step.
  static constexpr int kRunsMax = 4;
  // NVMe budget still missing for new versions of `chunks` chunks, besides the chunks' own extents. At least a version
  // for each file, so that room in pieces has a piece for a version.
  uint64_t SpareBytesMissing(uint64_t chunks, uint64_t largest_bytes) const;
  void AddRoom(NvmeRoom room, uint64_t spare_bytes);

  // The chunk with this id is about to go, and nobody has its entry any more: what waits to be recorded of it counts no
  // more. Its old extents are free with the next Harden.
  void Forget(uint64_t id);
  // Chunks have gone. Gives back `bytes` of the room, which were for their first versions, and what `chunks` chunks of
  // at most `largest_bytes` do not need as spares.
  void GiveBack(uint64_t bytes, uint64_t chunks, uint64_t largest_bytes);

  // In one piece, on a device that works.
  bool HasRoom(uint64_t bytes) const { return nvme_->Holds(room_, bytes); }
  bool HasBytes(uint64_t bytes) const { return room_.bytes() >= bytes; }
  // Makes HasRoom(bytes) true where the room lies in pieces too small, or on a device that fails. An error leaves the
  // room as it is: then Take finds room on a device that fails, if any.
  absl::Status Gather(uint64_t bytes);
  // Errors: NvmeTier::AllocateFrom's.
  absl::StatusOr<NvmeExtent> Take(uint64_t bytes);
  // `chunk` has been written to its extent; `old`, perhaps empty, holds the version before.
  void Written(const DurableChunk& chunk, NvmeExtent old);
  // A run has ended: must the caller harden before the next run? Yes if the next run might lack room, or after
  // kRunsMax.
  bool EndRun();
  // Syncs and records all written versions and frees the old extents; a store that records nothing only frees.
  // REQUIRES: no write is in flight. After an error every later call returns this error.
  absl::Status Harden();
  bool records() const { return options_.record != nullptr; }

 private:
  // What is wanted for new versions of `chunks` chunks.
  uint64_t SpareBytes(uint64_t chunks, uint64_t largest_bytes) const;
  absl::Status Record();

  NvmeTier* const nvme_;
  const DurableOptions options_;
  NvmeRoom room_;
  uint64_t spare_bytes_ = 0;
  std::vector<DurableChunk> written_;
  std::vector<NvmeExtent> old_;
  uint64_t written_bytes_ = 0;  // total of written_
  uint64_t before_run_ = 0;     // written_bytes_ before the last run
  int runs_ = 0;                // number of runs that wrote `written_`
  absl::Status failed_;
};

}  // namespace ballast::storage
