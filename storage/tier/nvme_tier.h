// Disk: one file of extents. Its content belongs to the running server: it is emptied at start.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "ballast/storage/io/block_file.h"
#include "ballast/storage/tier/ledger.h"

namespace ballast::storage {

class NvmeTier;

// A reserved part of the file, with its share of the budget. Its old content is undefined.
class NvmeExtent {
 public:
  NvmeExtent() = default;
  NvmeExtent(NvmeTier* tier, uint64_t offset, BudgetLease lease)
      : tier_(tier), offset_(offset), lease_(std::move(lease)) {}
  NvmeExtent(NvmeExtent&& other) noexcept { *this = std::move(other); }
  NvmeExtent& operator=(NvmeExtent&& other) noexcept;
  ~NvmeExtent() { Release(); }
  uint64_t offset() const { return offset_; }
  uint64_t bytes() const { return lease_.bytes(); }

 private:
  void Release();
  NvmeTier* tier_ = nullptr;
  uint64_t offset_ = 0;
  BudgetLease lease_;
};

// Threads: any.
class NvmeTier {
 public:
  // Creates `directory`/nvme.tier. INTERNAL (IO) if that cannot be written; FAILED_PRECONDITION (BUSY) if another
  // server has it.
  static absl::StatusOr<std::unique_ptr<NvmeTier>> Open(const std::string& directory, Ledger* ledger);

  // `bytes` rounded up to 4096. RESOURCE_EXHAUSTED: (BUDGET), or (IO) if the disk itself is full.
  absl::StatusOr<NvmeExtent> Allocate(uint64_t bytes, absl::string_view what);
  const BlockFile& file() const { return *file_; }

 private:
  friend class NvmeExtent;
  NvmeTier(std::unique_ptr<BlockFile> file, Ledger* ledger) : file_(std::move(file)), ledger_(ledger) {}
  uint64_t Place(uint64_t bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Free(uint64_t offset, uint64_t bytes);
  void FreeLocked(uint64_t offset, uint64_t bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const std::unique_ptr<BlockFile> file_;
  Ledger* const ledger_;
  absl::Mutex mutex_;
  std::map<uint64_t, uint64_t> free_ ABSL_GUARDED_BY(mutex_);  // offset -> bytes, neighbours joined
  uint64_t end_ ABSL_GUARDED_BY(mutex_) = 0;                   // of the last extent
};

}  // namespace ballast::storage
