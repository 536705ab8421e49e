// Where new versions of a durable store's chunks go, and what must happen before an old one's place is free.
//
// Order: the new version is written; the file is synced; the entries are recorded; the old extents are freed. A crash
// before the record leaves the old version, a crash after it the new one.
#pragma once

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

  const std::string& job() const { return options_.job; }
  uint64_t life() const { return options_.life; }
  // Versions that may be written before some must be hardened.
  static constexpr uint64_t kSparesMax = 16;
  // NVMe budget that is missing for chunks of these sizes besides their own.
  uint64_t SpareBytesMissing(uint64_t chunks, uint64_t largest_bytes) const;
  void AddRoom(BudgetLease lease, uint64_t spare_bytes);

  bool HasRoom(uint64_t bytes) const { return room_.bytes() >= bytes; }
  // REQUIRES: HasRoom. RESOURCE_EXHAUSTED (IO) if the disk is full.
  absl::StatusOr<NvmeExtent> Take(uint64_t bytes);
  // `chunk` has been written to its extent; `old`, perhaps empty, holds the version before.
  void Written(const DurableChunk& chunk, NvmeExtent old);
  // Makes all that was written durable. After an error it never tries again.
  absl::Status Harden();

 private:
  NvmeTier* const nvme_;
  const DurableOptions options_;
  BudgetLease room_;
  uint64_t spare_bytes_ = 0;
  std::vector<DurableChunk> written_;
  std::vector<NvmeExtent> old_;
  absl::Status failed_;
};

}  // namespace ballast::storage
