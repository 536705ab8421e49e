#include "ballast/storage/tier/nvme_tier.h"

#include <algorithm>
#include <iterator>

#include "absl/strings/str_cat.h"
#include "ballast/proto/model/status.h"
#include "ballast/storage/faults/seeded_bugs.h"
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
  if (NvmeTier* const tier = tier_; tier != nullptr) tier->KeepAgain(std::move(*this));
}

NvmeTier::~NvmeTier() {
  std::map<uint64_t, NvmeExtent> kept;
  std::vector<NvmeExtent> disputed;
  {
    absl::MutexLock lock(&mutex_);
    kept.swap(kept_);
    disputed.swap(disputed_);
  }
  // Their leases end here, their blocks stay.
  for (auto& [offset, extent] : kept) extent.TakeLease();
  for (NvmeExtent& extent : disputed) extent.TakeLease();
}

absl::StatusOr<std::unique_ptr<NvmeTier>> NvmeTier::Open(const TiersOptions& options, Ledger* ledger, Disk* disk) {
  const std::string path = absl::StrCat(options.directory, "/nvme.tier");
  BALLAST_ASSIGN_OR_RETURN(auto file, disk->Open(path, Disk::Mode::kKept));
  std::unique_ptr<NvmeTier> tier(new NvmeTier(std::move(file), ledger));
  BALLAST_RETURN_IF_ERROR(tier->Keep(options.kept, options.unnamed_stays));
  return tier;
}

absl::Status NvmeTier::Keep(std::vector<ExtentPlace> kept, bool unnamed_stays) {
  std::sort(kept.begin(), kept.end(), [](const auto& a, const auto& b) { return a.offset < b.offset; });
  BALLAST_ASSIGN_OR_RETURN(const uint64_t file_bytes, file_->Size());
  absl::MutexLock lock(&mutex_);
  for (size_t i = 0; i < kept.size();) {
    const ExtentPlace& place = kept[i++];
    if (place.bytes == 0 || (place.offset | place.bytes) % kIoAlignment != 0 || place.offset > file_bytes ||
        place.bytes > file_bytes - place.offset) {
      continue;  // TakeKept says so
    }
    // At least one of several overlapping places is wrong, and nothing here tells the wrong place: all bytes stay.
    uint64_t end = place.offset + place.bytes;
    bool alone = true;
    for (; i < kept.size() && kept[i].offset < end; ++i) {
      alone = false;
      const uint64_t other_end = kept[i].offset + std::min(kept[i].bytes, file_bytes - kept[i].offset);
      end = std::max(end, AlignUp(other_end));
    }
    BALLAST_ASSIGN_OR_RETURN(BudgetLease lease,
                             ledger_->Lease(TierKind::kNvme, end - place.offset, "state that an earlier run left"));
    if (place.offset > end_ && !unnamed_stays) free_.emplace(end_, place.offset - end_);
    end_ = end;
    NvmeExtent extent(this, place.offset, std::move(lease));
    NoteReserved(place.offset, end);  // the disk has blocks for what was written
    if (alone) {
      kept_.emplace(place.offset, std::move(extent));
    } else {
      disputed_.push_back(std::move(extent));
    }
    if (Seeded(StorageBug::kKeptExtentsGivenAgain)) free_.emplace(place.offset, place.bytes);
  }
  if (unnamed_stays) end_ = std::max(end_, AlignUp(file_bytes));
  return absl::OkStatus();
}

void NvmeTier::KeepAgain(NvmeExtent extent) {
  absl::MutexLock lock(&mutex_);
  const uint64_t offset = extent.offset();
  kept_.emplace(offset, std::move(extent));
}

absl::Status NvmeTier::Trim() {
  absl::MutexLock lock(&mutex_);
  return file_->Truncate(end_);
}

absl::Status NvmeTier::Sync() {
  // One sync at a time: of two at the same time only one would get the error.
  absl::MutexLock lock(&sync_mutex_);
  if (sync_failed_.ok()) sync_failed_ = file_->Sync();
  return sync_failed_;
}

absl::StatusOr<NvmeExtent> NvmeTier::TakeKept(uint64_t offset) {
  absl::MutexLock lock(&mutex_);
  const auto found = kept_.find(offset);
  if (found == kept_.end()) {
    return model::Error(absl::StatusCode::kDataLoss, model::kIo,
                        absl::StrCat("the catalog says that state lies at offset ", offset, " of ", file_->path(),
                                     ": that is outside of it, no place for an extent, or another entry says the same "
                                     "of these bytes. Run `ballastctl verify --rebuild`"));
  }
  NvmeExtent extent = std::move(found->second);
  kept_.erase(found);
  return extent;
}

absl::StatusOr<NvmeExtent> NvmeTier::Allocate(uint64_t bytes, absl::string_view what) {
  BALLAST_ASSIGN_OR_RETURN(BudgetLease lease, ledger_->Lease(TierKind::kNvme, AlignUp(bytes), what));
  return AllocateFrom(&lease, lease.bytes(), what);
}

absl::StatusOr<NvmeExtent> NvmeTier::AllocateFrom(BudgetLease* room, uint64_t bytes, absl::string_view what) {
  absl::MutexLock lock(&mutex_);
  const uint64_t offset = Place(bytes);
  if (absl::Status reserved = Reserve(offset, bytes); !reserved.ok()) {
    FreeLocked(offset, bytes, Blocks::kGivenBack);
    return model::Annotate(reserved, absl::StrCat("nvme, for ", what));
  }
  return NvmeExtent(this, offset, room->Split(bytes));
}

absl::Status NvmeTier::Reserve(uint64_t offset, uint64_t bytes) {
  // Not again what is reserved: the file system would wait for all transfers of the file that are in flight.
  const auto next = reserved_.upper_bound(offset);
  if (next != reserved_.begin() && std::prev(next)->second >= offset + bytes) return absl::OkStatus();
  BALLAST_RETURN_IF_ERROR(file_->Reserve(offset, bytes));
  NoteReserved(offset, offset + bytes);
  return absl::OkStatus();
}

void NvmeTier::NoteReserved(uint64_t offset, uint64_t end) {
  auto next = reserved_.upper_bound(offset);
  if (next != reserved_.begin() && std::prev(next)->second >= offset) offset = (--next)->first;
  for (; next != reserved_.end() && next->first <= end; next = reserved_.erase(next)) end = std::max(end, next->second);
  reserved_[offset] = end;
}

void NvmeTier::NoteUnreserved(uint64_t offset, uint64_t end) {
  auto next = reserved_.upper_bound(offset);
  if (next != reserved_.begin() && std::prev(next)->second > offset) --next;
  while (next != reserved_.end() && next->first < end) {
    const auto [begin, until] = *next;
    next = reserved_.erase(next);
    if (begin < offset) reserved_[begin] = offset;
    if (until > end) reserved_[end] = until;
  }
}

uint64_t NvmeTier::Place(uint64_t bytes) {
  for (auto extent = free_.begin(); extent != free_.end(); ++extent) {
    const auto [offset, free_bytes] = *extent;
    if (free_bytes < bytes) continue;
    free_.erase(extent);
    if (free_bytes > bytes) free_.emplace(offset + bytes, free_bytes - bytes);
    return offset;
  }
  // All fragments are too small for this extent: the file grows. If the fragments' blocks and the used budget, with
  // this extent, would exceed the budget, the fragments' blocks are given back first.
  uint64_t fragments = 0;
  for (const auto& [offset, free_bytes] : free_) fragments += free_bytes;
  if (ledger_->used().nvme + fragments > ledger_->budget().nvme) {
    for (const auto& [offset, free_bytes] : free_) {
      NoteUnreserved(offset, offset + free_bytes);
      file_->Discard(offset, free_bytes);
    }
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
  // A free extent at the end goes back to the disk. A failure costs space only.
  end_ = extent->first;
  free_.erase(extent);
  NoteUnreserved(end_, ~uint64_t{0});
  (void)file_->Truncate(end_);
}

}  // namespace ballast::storage
