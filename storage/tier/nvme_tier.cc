#include "ballast/storage/tier/nvme_tier.h"

#include <iterator>

#include "absl/strings/str_cat.h"
#include "ballast/proto/model/status.h"
#include "ballast/storage/io/disk.h"

namespace ballast::storage {

NvmeExtent& NvmeExtent::operator=(NvmeExtent&& other) noexcept {
  if (this != &other) {
    Release();
    tier_ = std::exchange(other.tier_, nullptr);
    offset_ = std::exchange(other.offset_, 0);
    lease_ = std::move(other.lease_);
  }
  return *this;
}

void NvmeExtent::Release() {
  if (tier_ != nullptr) tier_->Free(offset_, lease_.bytes());
  tier_ = nullptr;
  lease_ = BudgetLease();
}

absl::StatusOr<std::unique_ptr<NvmeTier>> NvmeTier::Open(const std::string& directory, Ledger* ledger) {
  BALLAST_ASSIGN_OR_RETURN(auto file, SystemDisk()->Open(absl::StrCat(directory, "/nvme.tier"), Disk::Mode::kEmptied));
  return std::unique_ptr<NvmeTier>(new NvmeTier(std::move(file), ledger));
}

absl::StatusOr<NvmeExtent> NvmeTier::Allocate(uint64_t bytes, absl::string_view what) {
  bytes = AlignUp(bytes);
  BALLAST_ASSIGN_OR_RETURN(BudgetLease lease, ledger_->Lease(TierKind::kNvme, bytes, what));
  absl::MutexLock lock(&mutex_);
  const uint64_t offset = Place(bytes);
  if (absl::Status reserved = file_->Reserve(offset, bytes); !reserved.ok()) {
    FreeLocked(offset, bytes);
    return model::Annotate(reserved, absl::StrCat("nvme, for ", what));
  }
  return NvmeExtent(this, offset, std::move(lease));
}

uint64_t NvmeTier::Place(uint64_t bytes) {
  for (auto extent = free_.begin(); extent != free_.end(); ++extent) {
    const auto [offset, free_bytes] = *extent;
    if (free_bytes < bytes) continue;
    free_.erase(extent);
    if (free_bytes > bytes) free_.emplace(offset + bytes, free_bytes - bytes);
    return offset;
  }
  // Fragments too small for this extent: the file grows past the budget, so what they occupy on disk is given back
  // first.
  if (end_ + bytes > ledger_->budget().nvme) {
    for (const auto& [offset, free_bytes] : free_) file_->Discard(offset, free_bytes);
  }
  const uint64_t offset = end_;
  end_ += bytes;
  return offset;
}

void NvmeTier::Free(uint64_t offset, uint64_t bytes) {
  absl::MutexLock lock(&mutex_);
  FreeLocked(offset, bytes);
}

void NvmeTier::FreeLocked(uint64_t offset, uint64_t bytes) {
  auto [extent, inserted] = free_.emplace(offset, bytes);
  if (const auto next = std::next(extent); next != free_.end() && offset + bytes == next->first) {
    extent->second += next->second;
    free_.erase(next);
  }
  if (extent != free_.begin()) {
    if (const auto before = std::prev(extent); before->first + before->second == extent->first) {
      before->second += extent->second;
      free_.erase(extent);
      extent = before;
    }
  }
  if (extent->first + extent->second != end_) return;
  // Nothing lies behind it: the disk gets it back. A failure costs space only.
  end_ = extent->first;
  free_.erase(extent);
  (void)file_->Truncate(end_);
}

}  // namespace ballast::storage
