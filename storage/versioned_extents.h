// Where new versions of a durable store's chunks go, and what must happen before an old one's place is free.
//
// Order: the new version is written; the file is synced; the entries are recorded; the old extents are freed. A crash
// before the record leaves the old version, a crash after it the new one. The record may come some runs later: until
// then both versions have their extents, and the log must hold what makes the one of the other.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "ballast/storage/chunk_store.h"
#include "ballast/storage/tier/ledger.h"
#include "ballast/storage/tier/nvme_tier.h"

namespace ballast::storage {

// Threads: the one that runs the store.
class VersionedExtents {
 public:
  VersionedExtents(NvmeTier* nvme, DurableOptions options) : nvme_(nvme), options_(std::move(options)) {}
  ~VersionedExtents();
  // Of a store that is not wanted any more, before the destructor: nobody will look for what its old extents hold.
  void Discard() { old_.clear(); }

  const std::string& job() const { return options_.job; }
  uint64_t life() const { return options_.life; }
  // Versions that may be written before some must be hardened, which stops a run: a quarter of all, so that runs that
  // store few need not; at least so many that the disk has something to write meanwhile; at most 1.5 GiB of Adam's
  // state, after which a stop costs little beside the writes.
  static constexpr uint64_t kSparesMin = 16, kSparesMax = 128;
  static uint64_t Spares(uint64_t chunks) { return std::min(chunks, std::clamp(chunks / 4, kSparesMin, kSparesMax)); }
  // Runs whose versions may wait for one sync and one record: each saves a run's end these, and holds up the cut of the
  // log by one step.
  static constexpr int kRunsMax = 4;
  // NVMe budget that is missing for chunks of these sizes besides their own.
  uint64_t SpareBytesMissing(uint64_t chunks, uint64_t largest_bytes) const;
  void AddRoom(BudgetLease lease, uint64_t spare_bytes);

  bool HasRoom(uint64_t bytes) const { return room_.bytes() >= bytes; }
  // REQUIRES: HasRoom. RESOURCE_EXHAUSTED (IO) if the disk is full.
  absl::StatusOr<NvmeExtent> Take(uint64_t bytes);
  // `chunk` has been written to its extent; `old`, perhaps empty, holds the version before.
  void Written(const DurableChunk& chunk, NvmeExtent old);
  // A run has ended: must it be hardened before the next? Yes if that might run out of room, or after kRunsMax.
  bool EndRun();
  // Makes all that was written durable; or, where nothing is recorded, only frees what it replaced. REQUIRES: no write
  // is in flight. After an error it never tries again.
  absl::Status Harden();
  bool records() const { return options_.record != nullptr; }

 private:
  absl::Status Record();

  NvmeTier* const nvme_;
  const DurableOptions options_;
  BudgetLease room_;
  uint64_t spare_bytes_ = 0;
  std::vector<DurableChunk> written_;
  std::vector<NvmeExtent> old_;
  uint64_t written_bytes_ = 0;  // of written_
  uint64_t before_run_ = 0;     // of these, before the last run
  int runs_ = 0;                // that wrote them
  absl::Status failed_;
};

}  // namespace ballast::storage
