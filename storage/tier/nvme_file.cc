#include "ballast/storage/tier/nvme_file.h"

#include <algorithm>
#include <cerrno>

#include "absl/strings/str_cat.h"
#include "ballast/proto/base/status.h"
#include "ballast/storage/io/disk.h"

namespace ballast::storage {

FileRoom& FileRoom::operator=(FileRoom&& other) noexcept {
  if (this != &other) {
    Release(FileSpace::Blocks::kGiveBack);
    file_ = std::exchange(other.file_, nullptr);
    lease_ = std::move(other.lease_);
  }
  return *this;
}

void FileRoom::Release(FileSpace::Blocks blocks) {
  if (file_ != nullptr && bytes() > 0) {
    absl::MutexLock lock(&file_->mutex_);
    file_->space_.EndPromise(bytes(), blocks);
  }
  file_ = nullptr;
  lease_ = BudgetLease();
}

void FileRoom::Join(FileRoom other) {
  if (other.file_ == nullptr) return;
  file_ = std::exchange(other.file_, nullptr);
  lease_.Join(std::move(other.lease_));
}

NvmeExtent& NvmeExtent::operator=(NvmeExtent&& other) noexcept {
  if (this != &other) {
    Release();
    file_ = std::exchange(other.file_, nullptr);
    offset_ = std::exchange(other.offset_, 0);
    lease_ = std::move(other.lease_);
  }
  return *this;
}

void NvmeExtent::Release() {
  if (file_ != nullptr) {
    absl::MutexLock lock(&file_->mutex_);
    file_->space_.Free(range());
  }
  file_ = nullptr;
  lease_ = BudgetLease();
}

FileRoom NvmeExtent::TakeRoom() {
  if (file_ == nullptr) return {};
  {
    absl::MutexLock lock(&file_->mutex_);
    file_->space_.FreeIntoPromise(range());
  }
  lease_.Mark(TierPart::kSpare);
  return {std::exchange(file_, nullptr), std::move(lease_)};
}

void NvmeExtent::Leave() {
  if (NvmeFile* const file = file_; file != nullptr) file->KeepAgain(std::move(*this));
}

NvmeFile::~NvmeFile() {
  std::map<uint64_t, NvmeExtent> kept;
  std::vector<NvmeExtent> disputed;
  {
    absl::MutexLock lock(&mutex_);
    kept.swap(kept_);
    disputed.swap(disputed_);
  }
  // Their leases end here, their blocks stay.
  for (auto& [offset, extent] : kept) extent.file_ = nullptr;
  for (NvmeExtent& extent : disputed) extent.file_ = nullptr;
}

NvmeFile::NvmeFile(std::unique_ptr<BlockFile> file, Ledger* ledger, const Options& options)
    : file_(std::move(file)), ledger_(ledger), options_(options), sync_(file_.get()), space_(file_.get()) {
  if (options_.header_bytes == 0) return;
  absl::MutexLock lock(&mutex_);
  space_.Keep({0, options_.header_bytes}, FileSpace::Between::kFree);
}

bool NvmeFile::IsPlace(const ExtentPlace& place, uint64_t file_bytes) const {
  return place.bytes > 0 && (place.offset | place.bytes) % kIoAlignment == 0 && place.offset <= file_bytes &&
         place.bytes <= file_bytes - place.offset && place.offset >= options_.header_bytes;
}

absl::Status NvmeFile::Keep(std::vector<ExtentPlace> kept, bool unnamed_stays) {
  std::sort(kept.begin(), kept.end(), [](const auto& a, const auto& b) { return a.offset < b.offset; });
  BALLAST_ASSIGN_OR_RETURN(const uint64_t file_bytes, file_->Size());
  uint64_t named_to = 0;
  for (const ExtentPlace& place : kept) {
    // What the wrong entry means lies where no entry says.
    unnamed_stays = unnamed_stays || !IsPlace(place, file_bytes) || place.offset < named_to;
    named_to = place.offset + place.bytes;
  }
  const auto before = unnamed_stays ? FileSpace::Between::kUnknown : FileSpace::Between::kFree;
  absl::MutexLock lock(&mutex_);
  for (size_t i = 0; i < kept.size();) {
    const ExtentPlace& place = kept[i++];
    if (!IsPlace(place, file_bytes)) continue;  // TakeKept says so
    // At least one of several overlapping places is wrong, and nothing here tells the wrong place: all bytes stay.
    uint64_t end = place.offset + place.bytes;
    bool alone = true;
    for (; i < kept.size() && kept[i].offset < end; ++i) {
      alone = false;
      const uint64_t other_end = kept[i].offset + std::min(kept[i].bytes, file_bytes - kept[i].offset);
      end = std::max(end, AlignUp(other_end));
    }
    BALLAST_ASSIGN_OR_RETURN(BudgetLease lease,
                             ledger_->Lease(TierKind::kNvme, end - place.offset, "state that an earlier run left",
                                            TierPart::kState, options_.share));
    space_.Keep({place.offset, end}, before);  // the disk has blocks for what was written
    NvmeExtent extent(this, place.offset, std::move(lease));
    if (alone) {
      kept_.emplace(place.offset, std::move(extent));
    } else {
      disputed_.push_back(std::move(extent));
    }
  }
  if (unnamed_stays) space_.KeepUpTo(AlignUp(file_bytes));
  return absl::OkStatus();
}

void NvmeFile::KeepAgain(NvmeExtent extent) {
  absl::MutexLock lock(&mutex_);
  const uint64_t offset = extent.offset();
  extent.Charge(nullptr);
  kept_.emplace(offset, std::move(extent));
}

absl::Status NvmeFile::Trim() {
  absl::MutexLock lock(&mutex_);
  return space_.Trim();
}

absl::Status NvmeFile::Write(uint64_t offset, absl::Span<const std::byte> bytes) {
  BeginWrite(bytes.size());
  return EndWrite(bytes.size(), file_->Write(offset, bytes));
}

absl::Status NvmeFile::Noted(const absl::Status& status) {
  if (!absl::IsInternal(status)) return status;
  failing_ = true;
  return model::Annotate(status,
                         "an nvme device fails, which stops the jobs with new state on it and no others: check "
                         "the disk, then start the server again");
}

absl::Status NvmeFile::EndWrite(uint64_t bytes, const absl::Status& written) {
  writing_bytes_.fetch_sub(bytes, std::memory_order_relaxed);
  return Noted(written);
}

absl::StatusOr<NvmeExtent> NvmeFile::TakeKept(uint64_t offset) {
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

absl::Status NvmeFile::Reserve(uint64_t bytes, FileSpace::Shape shape) {
  Reservation reservation;
  {
    absl::MutexLock lock(&mutex_);
    reservation = space_.StartPromise(bytes, shape, UnusedMax());
  }
  const bool fits = std::all_of(reservation.ranges.begin(), reservation.ranges.end(),
                                [&](const ByteRange& range) { return range.end <= options_.bytes_max; });
  absl::Status reserved =
      fits ? reservation.Run(file_.get()) : IoError(EFBIG, "reservation", file_->path(), options_.bytes_max, bytes);
  absl::MutexLock lock(&mutex_);
  return space_.FinishPromise(reservation, std::move(reserved));
}

absl::StatusOr<FileRoom> NvmeFile::Promise(uint64_t bytes, absl::string_view what, FileSpace::Shape shape) {
  BALLAST_ASSIGN_OR_RETURN(BudgetLease lease,
                           ledger_->Lease(TierKind::kNvme, bytes, what, TierPart::kSpare, options_.share));
  absl::Status reserved = Reserve(bytes, shape);
  if (model::ReasonOf(reserved) == model::kDiskFull) {
    {
      absl::MutexLock lock(&mutex_);
      space_.GiveBackUnused();
    }
    reserved = Reserve(bytes, shape);
  }
  if (!reserved.ok()) return model::Annotate(reserved, absl::StrCat("nvme, for ", what));
  return FileRoom(this, std::move(lease));
}

absl::StatusOr<NvmeExtent> NvmeFile::AllocateFrom(FileRoom* room, uint64_t bytes, absl::string_view what) {
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
  given_bytes_.fetch_add(bytes, std::memory_order_relaxed);
  return NvmeExtent(this, *offset, std::move(lease));
}

}  // namespace ballast::storage
