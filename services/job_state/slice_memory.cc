#include "ballast/services/job_state/slice_memory.h"

#include <algorithm>
#include <new>
#include <utility>

#include "ballast/proto/base/status.h"
#include "ballast/storage/io/block_file.h"
#include "ballast/storage/tier/dram_tier.h"

namespace ballast::services {
namespace {
constexpr std::align_val_t kAlign{storage::kIoAlignment};
constexpr uint64_t kPagesBytesMin = uint64_t{2} << 20;  // one huge page
// A slab is touched when it is mapped, under the lock of the job whose push needs it: so much takes some 50 ms. With
// slabs of this size 16 TiB take 65,000 mappings.
constexpr uint64_t kSlabBytesMax = uint64_t{256} << 20;
}  // namespace

SliceMemory::~SliceMemory() {
  slabs_.Shrink(0);
  tiers_->Return(storage::TierKind::kDram, reserved_bytes_ + extra_bytes_, storage::TierPart::kSlices, account_.get());
}

absl::Status SliceMemory::Reserve(uint64_t bytes) {
  BALLAST_RETURN_IF_ERROR(tiers_->Take(storage::TierKind::kDram, bytes, "slices of the step in flight",
                                       storage::TierPart::kSlices, account_.get()));
  if (tiers_->dram()->beside_gpu()) {
    absl::StatusOr<storage::Arena> slab = tiers_->dram()->Map(bytes);
    if (!slab.ok()) {
      tiers_->Return(storage::TierKind::kDram, bytes, storage::TierPart::kSlices, account_.get());
      return slab.status();
    }
    slabs_.Add(*std::move(slab));
  }
  absl::MutexLock lock(&mu_);
  reserved_bytes_ += bytes;
  return absl::OkStatus();
}

void SliceMemory::Unreserve(uint64_t bytes) {
  absl::MutexLock lock(&mu_);
  reserved_bytes_ -= bytes;
  slabs_.Shrink(reserved_bytes_);
  tiers_->Return(storage::TierKind::kDram, bytes, storage::TierPart::kSlices, account_.get());
}

uint64_t SliceMemory::reserved_bytes() const {
  absl::MutexLock lock(&mu_);
  return reserved_bytes_;
}

bool SliceMemory::Fits(uint64_t bytes) const {
  absl::MutexLock lock(&mu_);
  return used_bytes_ + bytes <= reserved_bytes_;
}

absl::Status SliceMemory::Acquire(uint64_t bytes) {
  absl::MutexLock lock(&mu_);
  const uint64_t held = reserved_bytes_ + extra_bytes_, needed = used_bytes_ + bytes;
  if (needed > held) {
    BALLAST_RETURN_IF_ERROR(tiers_->Take(storage::TierKind::kDram, needed - held, "value slices beside gradients",
                                         storage::TierPart::kSlices, account_.get()));
    extra_bytes_ += needed - held;
  }
  used_bytes_ = needed;
  return absl::OkStatus();
}

void SliceMemory::Release(uint64_t bytes, bool apart) {
  absl::MutexLock lock(&mu_);
  used_bytes_ -= bytes;
  if (apart) apart_bytes_ -= bytes;
  const uint64_t needed_extra = used_bytes_ > reserved_bytes_ ? used_bytes_ - reserved_bytes_ : 0;
  if (needed_extra < extra_bytes_) {
    tiers_->Return(storage::TierKind::kDram, extra_bytes_ - needed_extra, storage::TierPart::kSlices, account_.get());
    extra_bytes_ = needed_extra;
  }
}

absl::StatusOr<absl::Span<std::byte>> SliceMemory::Cut(uint64_t bytes) {
  if (tiers_->dram()->beside_gpu()) return slabs_.Take(bytes);
  if (bytes < kPagesBytesMin) return absl::Span<std::byte>();
  if (const absl::Span<std::byte> cut = slabs_.Take(bytes); !cut.empty()) return cut;
  absl::MutexLock growing(&growing_);
  if (const absl::Span<std::byte> cut = slabs_.Take(bytes); !cut.empty()) return cut;
  const uint64_t place = storage::AlignUp(bytes), reserved = reserved_bytes(), there = slabs_.bytes();
  if (there + place > reserved) return absl::Span<std::byte>();
  const uint64_t places = std::max<uint64_t>(1, std::min(kSlabBytesMax, reserved - there) / place);
  BALLAST_ASSIGN_OR_RETURN(storage::Arena slab, storage::Arena::Map(places * place));
  return slabs_.AddAndTake(std::move(slab), bytes);
}

absl::StatusOr<storage::Arena> SliceMemory::MapApart(uint64_t bytes) {
  bool too_much = false;
  {
    absl::MutexLock lock(&mu_);
    apart_bytes_ += bytes;
    too_much = slabs_.bytes() + apart_bytes_ > reserved_bytes_ + extra_bytes_;
  }
  if (too_much && !tiers_->dram()->beside_gpu()) slabs_.DiscardFree();
  if (bytes < kPagesBytesMin) return storage::Arena();
  return storage::Arena::Map(bytes);
}

SliceMemory::Buffer::Buffer(std::shared_ptr<SliceMemory> memory, uint64_t bytes, absl::Span<std::byte> cut,
                            storage::Arena pages)
    : memory_(std::move(memory)), bytes_(bytes), cut_(cut), pages_(std::move(pages)) {
  data_ = cut_.empty() ? pages_.bytes().data() : cut_.data();
  if (data_ == nullptr) data_ = static_cast<std::byte*>(::operator new(bytes, kAlign));
}

SliceMemory::Buffer::Buffer(absl::Span<const std::byte> bytes, std::shared_ptr<model::LentGradients> lent)
    : bytes_(bytes.size()), lent_(std::move(lent)), data_(const_cast<std::byte*>(bytes.data())) {}

SliceMemory::Buffer::~Buffer() {
  if (lent_ != nullptr) return;
  const bool apart = cut_.empty();
  if (!apart) {
    memory_->slabs_.Return(cut_);
  } else if (pages_.bytes().empty()) {
    ::operator delete(data_, kAlign);
  }
  pages_ = storage::Arena();
  memory_->Release(bytes_, apart);
}

absl::StatusOr<std::shared_ptr<SliceMemory::Buffer>> SliceMemory::Allocate(const std::shared_ptr<SliceMemory>& memory,
                                                                           uint64_t bytes) {
  BALLAST_RETURN_IF_ERROR(memory->Acquire(bytes));
  absl::StatusOr<absl::Span<std::byte>> cut = memory->Cut(bytes);
  absl::StatusOr<storage::Arena> pages = storage::Arena();
  const bool apart = cut.ok() && cut->empty();
  if (apart) pages = memory->MapApart(bytes);
  if (!cut.ok() || !pages.ok()) {
    memory->Release(bytes, apart);
    return cut.ok() ? pages.status() : cut.status();
  }
  return std::make_shared<Buffer>(memory, bytes, *cut, *std::move(pages));
}

}  // namespace ballast::services
