#include "ballast/storage/tier/nvme_tier.h"

#include <algorithm>
#include <iterator>

#include "absl/strings/str_cat.h"
#include "ballast/proto/model/status.h"
#include "ballast/storage/io/disk.h"
#include "ballast/storage/io/seeded_bugs.h"

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
  if (tier_ != nullptr) tier_->Free(offset_, lease_.bytes(), NvmeTier::Blocks::kGivenBack);
  tier_ = nullptr;
  lease_ = BudgetLease();
}

BudgetLease NvmeExtent::TakeLease() {
  if (tier_ != nullptr) tier_->Free(offset_, lease_.bytes(), NvmeTier::Blocks::kKept);
  tier_ = nullptr;
  return std::move(lease_);
}

void NvmeExtent::Leave() {
  tier_ = nullptr;
  lease_ = BudgetLease();
}

NvmeTier::~NvmeTier() {
  absl::MutexLock lock(&mutex_);
  for (auto& [offset, extent] : kept_) extent.Leave();
}

absl::StatusOr<std::unique_ptr<NvmeTier>> NvmeTier::Open(const std::string& directory, Ledger* ledger, Disk* disk,
                                                         absl::Span<const ExtentPlace> kept) {
  const std::string path = absl::StrCat(directory, "/nvme.tier");
  BALLAST_ASSIGN_OR_RETURN(auto file, disk->Open(path, kept.empty() ? Disk::Mode::kEmptied : Disk::Mode::kKept));
  std::unique_ptr<NvmeTier> tier(new NvmeTier(std::move(file), ledger));
  BALLAST_RETURN_IF_ERROR(tier->Keep({kept.begin(), kept.end()}));
  return tier;
}

absl::Status NvmeTier::Keep(std::vector<ExtentPlace> kept) {
  std::sort(kept.begin(), kept.end(), [](const auto& a, const auto& b) { return a.offset < b.offset; });
  BALLAST_ASSIGN_OR_RETURN(const uint64_t file_bytes, file_->Size());
  absl::MutexLock lock(&mutex_);
  for (const ExtentPlace& place : kept) {
    if (place.offset < end_ || place.bytes == 0 || (place.offset | place.bytes) % kIoAlignment != 0 ||
        place.offset > file_bytes || place.bytes > file_bytes - place.offset) {
      return model::Error(
          absl::StatusCode::kDataLoss, model::kIo,
          absl::StrCat("the catalog says that state lies in ", place.bytes, " bytes at offset ", place.offset, " of ",
                       file_->path(), ", which has ", file_bytes, " bytes, and the extent before ends at ", end_,
                       ": run `ballastctl verify --rebuild`"));
    }
    BALLAST_ASSIGN_OR_RETURN(BudgetLease lease,
                             ledger_->Lease(TierKind::kNvme, place.bytes, "state that an earlier run left"));
    if (place.offset > end_) free_.emplace(end_, place.offset - end_);
    end_ = place.offset + place.bytes;
    kept_.emplace(place.offset, NvmeExtent(this, place.offset, std::move(lease)));
    if (Seeded(StorageBug::kKeptExtentsGivenAgain)) free_.emplace(place.offset, place.bytes);
  }
  return file_->Truncate(end_);
}

absl::StatusOr<NvmeExtent> NvmeTier::TakeKept(uint64_t offset) {
  absl::MutexLock lock(&mutex_);
  const auto found = kept_.find(offset);
  if (found == kept_.end()) {
    return model::Error(absl::StatusCode::kNotFound, model::kIo,
                        absl::StrCat("no extent at offset ", offset, " of ", file_->path(), " was kept"));
  }
  NvmeExtent extent = std::move(found->second);
  kept_.erase(found);
  return extent;
}

absl::StatusOr<NvmeExtent> NvmeTier::Allocate(uint64_t bytes, absl::string_view what) {
  BALLAST_ASSIGN_OR_RETURN(BudgetLease lease, ledger_->Lease(TierKind::kNvme, AlignUp(bytes), what));
  return AllocateFrom(std::move(lease), what);
}

absl::StatusOr<NvmeExtent> NvmeTier::AllocateFrom(BudgetLease lease, absl::string_view what) {
  const uint64_t bytes = lease.bytes();
  absl::MutexLock lock(&mutex_);
  const uint64_t offset = Place(bytes);
  if (absl::Status reserved = file_->Reserve(offset, bytes); !reserved.ok()) {
    FreeLocked(offset, bytes, Blocks::kGivenBack);
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

void NvmeTier::Free(uint64_t offset, uint64_t bytes, Blocks blocks) {
  absl::MutexLock lock(&mutex_);
  FreeLocked(offset, bytes, blocks);
}

void NvmeTier::FreeLocked(uint64_t offset, uint64_t bytes, Blocks blocks) {
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
  if (blocks == Blocks::kKept || extent->first + extent->second != end_) return;
  // Nothing lies behind it: the disk gets it back. A failure costs space only.
  end_ = extent->first;
  free_.erase(extent);
  (void)file_->Truncate(end_);
}

}  // namespace ballast::storage
