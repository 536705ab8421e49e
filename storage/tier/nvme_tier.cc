#include "ballast/storage/tier/nvme_tier.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "ballast/proto/model/status.h"
#include "ballast/storage/faults/seeded_bugs.h"
#include "ballast/storage/io/disk.h"

namespace ballast::storage {

NvmeRoom& NvmeRoom::operator=(NvmeRoom&& other) noexcept {
  if (this != &other) {
    Release(FileSpace::Blocks::kGiveBack);
    tier_ = std::exchange(other.tier_, nullptr);
    lease_ = std::move(other.lease_);
  }
  return *this;
}

void NvmeRoom::Release(FileSpace::Blocks blocks) {
  if (tier_ != nullptr && bytes() > 0) {
    absl::MutexLock lock(&tier_->mutex_);
    tier_->space_.EndPromise(bytes(), blocks);
  }
  tier_ = nullptr;
  lease_ = BudgetLease();
}

void NvmeRoom::Join(NvmeRoom other) {
  if (other.tier_ == nullptr) return;
  tier_ = std::exchange(other.tier_, nullptr);
  lease_.Join(std::move(other.lease_));
}

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
  if (tier_ != nullptr) {
    absl::MutexLock lock(&tier_->mutex_);
    tier_->space_.Free(range());
  }
  tier_ = nullptr;
  lease_ = BudgetLease();
}

NvmeRoom NvmeExtent::TakeRoom() {
  if (tier_ == nullptr) return {};
  {
    absl::MutexLock lock(&tier_->mutex_);
    tier_->space_.FreeIntoPromise(range());
  }
  lease_.Mark(TierPart::kSpare);
  return {std::exchange(tier_, nullptr), std::move(lease_)};
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
  for (auto& [offset, extent] : kept) extent.tier_ = nullptr;
  for (NvmeExtent& extent : disputed) extent.tier_ = nullptr;
}

absl::StatusOr<std::unique_ptr<NvmeTier>> NvmeTier::Open(const TiersOptions& options, Ledger* ledger, Disk* disk) {
  const std::string path = absl::StrCat(options.directory, "/nvme.tier");
  BALLAST_ASSIGN_OR_RETURN(auto file, disk->Open(path, Disk::Mode::kKept));
  std::unique_ptr<NvmeTier> tier = OpenOn(std::move(file), ledger);
  BALLAST_RETURN_IF_ERROR(tier->Keep(options.kept, options.unnamed_stays));
  return tier;
}

std::unique_ptr<NvmeTier> NvmeTier::OpenOn(std::unique_ptr<BlockFile> file, Ledger* ledger) {
  return std::unique_ptr<NvmeTier>(new NvmeTier(std::move(file), ledger));
}

absl::Status NvmeTier::Keep(std::vector<ExtentPlace> kept, bool unnamed_stays) {
  std::sort(kept.begin(), kept.end(), [](const auto& a, const auto& b) { return a.offset < b.offset; });
  BALLAST_ASSIGN_OR_RETURN(const uint64_t file_bytes, file_->Size());
  const auto before = unnamed_stays ? FileSpace::Between::kUnknown : FileSpace::Between::kFree;
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
    space_.Keep({place.offset, end}, before);  // the disk has blocks for what was written
    NvmeExtent extent(this, place.offset, std::move(lease));
    if (alone) {
      kept_.emplace(place.offset, std::move(extent));
    } else {
      disputed_.push_back(std::move(extent));
    }
    if (Seeded(StorageBug::kKeptExtentsGivenAgain)) {
      space_.FreeIntoPromise({place.offset, place.offset + place.bytes});
    }
  }
  if (unnamed_stays) space_.KeepUpTo(AlignUp(file_bytes));
  return absl::OkStatus();
}

void NvmeTier::KeepAgain(NvmeExtent extent) {
  absl::MutexLock lock(&mutex_);
  const uint64_t offset = extent.offset();
  kept_.emplace(offset, std::move(extent));
}

absl::Status NvmeTier::Trim() {
  absl::MutexLock lock(&mutex_);
  return space_.Trim();
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

uint64_t NvmeTier::UnusedMax() const {
  const uint64_t budget = ledger_->budget().nvme;
  return budget - std::min(budget, ledger_->used().nvme);
}

absl::Status NvmeTier::Reserve(uint64_t bytes, FileSpace::Shape shape) {
  Reservation reservation;
  {
    absl::MutexLock lock(&mutex_);
    reservation = space_.StartPromise(bytes, shape, UnusedMax());
  }
  absl::Status reserved = reservation.Run(file_.get());
  absl::MutexLock lock(&mutex_);
  return space_.FinishPromise(reservation, std::move(reserved));
}

absl::StatusOr<NvmeRoom> NvmeTier::Promise(uint64_t bytes, absl::string_view what, FileSpace::Shape shape) {
  bytes = AlignUp(bytes);
  BALLAST_ASSIGN_OR_RETURN(BudgetLease lease, ledger_->Lease(TierKind::kNvme, bytes, what, TierPart::kSpare));
  absl::Status reserved = Reserve(bytes, shape);
  if (model::ReasonOf(reserved) == model::kDiskFull) {
    {
      absl::MutexLock lock(&mutex_);
      space_.GiveBackUnused();
    }
    reserved = Reserve(bytes, shape);
  }
  if (!reserved.ok()) return model::Annotate(reserved, absl::StrCat("nvme, for ", what));
  return NvmeRoom(this, std::move(lease));
}

absl::StatusOr<NvmeExtent> NvmeTier::Allocate(uint64_t bytes, absl::string_view what) {
  BALLAST_ASSIGN_OR_RETURN(NvmeRoom room, Promise(bytes, what, FileSpace::Shape::kOnePiece));
  return AllocateFrom(&room, room.bytes(), what);
}

absl::StatusOr<NvmeExtent> NvmeTier::AllocateFrom(NvmeRoom* room, uint64_t bytes, absl::string_view what) {
  absl::MutexLock lock(&mutex_);
  absl::StatusOr<uint64_t> offset = space_.TakePromised(bytes, UnusedMax());
  while (model::ReasonOf(offset.status()) == model::kDiskFull && space_.in_the_making() > 0) {
    // A promise in the making may hold this room's blocks, and gives them back as it ends.
    const auto ended = [this] {
      mutex_.AssertHeld();
      return space_.in_the_making() == 0;
    };
    mutex_.Await(absl::Condition(&ended));
    offset = space_.TakePromised(bytes, UnusedMax());
  }
  if (!offset.ok()) return model::Annotate(offset.status(), absl::StrCat("nvme, for ", what));
  BudgetLease lease = room->lease_.Split(bytes);
  lease.Mark(TierPart::kState);
  return NvmeExtent(this, *offset, std::move(lease));
}

}  // namespace ballast::storage
