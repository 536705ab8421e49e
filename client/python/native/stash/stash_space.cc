#include "ballast/client/python/native/stash/stash_space.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "ballast/proto/base/status.h"

namespace ballast::stash {

using storage::NvmeExtent;
using storage::NvmeRoom;
using storage::TierKind;

namespace {

// DRAM and the file grow by this: page-locking and reserving are slow for small pieces.
constexpr uint64_t kDramSlabBytes = uint64_t{64} << 20;
constexpr uint64_t kRoomBytes = uint64_t{256} << 20;
constexpr char kWhat[] = "what autograd saves";

// Whole blocks.
uint64_t FreeOf(const storage::Ledger& ledger, TierKind tier) {
  const storage::TierUsage usage = ledger.usage();
  const uint64_t free = usage.budget[tier] - std::min(usage.budget[tier], usage.used[tier]);
  return free / storage::kIoAlignment * storage::kIoAlignment;
}

}  // namespace

absl::Span<std::byte> StashSpace::TakeDram(uint64_t bytes) {
  if (const auto taken = dram_.Take(bytes); !taken.empty()) return taken;
  const uint64_t slab = std::min(kDramSlabBytes, FreeOf(ledger_, TierKind::kDram));
  if (slab < bytes) return {};
  // Another caller may have taken the budget meanwhile, or the system has no such memory: the part goes to the file.
  auto lease = ledger_.Lease(TierKind::kDram, slab, kWhat);
  if (!lease.ok()) return {};
  auto memory = dram_tier_.Map(slab);
  if (!memory.ok()) return {};
  {
    absl::MutexLock lock(&mutex_);
    dram_leases_.push_back(*std::move(lease));
  }
  return dram_.AddAndTake(*std::move(memory), bytes);
}

absl::StatusOr<NvmeExtent> StashSpace::TakeExtent(uint64_t bytes) {
  absl::MutexLock turn(&turns_);
  while (true) {
    uint64_t seen = 0;
    {
      absl::MutexLock lock(&mutex_);
      seen = returned_;
    }
    absl::StatusOr<NvmeExtent> extent = TryExtent(bytes);
    if (extent.ok() || !absl::IsResourceExhausted(extent.status())) return extent;
    absl::MutexLock lock(&mutex_);
    const absl::Time began = absl::Now();
    while (returned_ == seen && leaving_ > 0) changed_.Wait(&mutex_);
    waited_ += absl::Now() - began;
    if (returned_ == seen) return extent;
  }
}

absl::StatusOr<NvmeExtent> StashSpace::TryExtent(uint64_t bytes) {
  if (nvme_ == nullptr) {
    const absl::Status status = ledger_.Lease(TierKind::kDram, bytes, kWhat).status();
    if (!status.ok()) return status;
    return model::Error(absl::StatusCode::kResourceExhausted, model::kBudget,
                        absl::StrCat("the system has no ", bytes, " bytes of memory for ", kWhat,
                                     " within the dram budget: lower dram, and give nvme"));
  }
  NvmeRoom room;
  {
    absl::MutexLock lock(&mutex_);
    room = room_.Split(std::min(bytes, room_.bytes()));
  }
  const auto extent_from_room = [&]() -> absl::StatusOr<NvmeExtent> {
    if (room.bytes() < bytes) {
      BALLAST_ASSIGN_OR_RETURN(NvmeRoom more, MoreRoom(bytes - room.bytes()));
      room.Join(std::move(more));
    }
    return nvme_->AllocateFrom(&room, bytes, kWhat);
  };
  absl::StatusOr<NvmeExtent> extent = extent_from_room();
  absl::MutexLock lock(&mutex_);
  room_.Join(std::move(room));
  return extent;
}

absl::StatusOr<NvmeRoom> StashSpace::MoreRoom(uint64_t bytes) {
  const uint64_t ahead = std::min(kRoomBytes, FreeOf(ledger_, TierKind::kNvme));
  absl::StatusOr<NvmeRoom> room = nvme_->Promise(std::max(bytes, ahead), kWhat);
  if (!room.ok() && ahead > bytes) room = nvme_->Promise(bytes, kWhat);
  if (room.ok()) return room;
  const storage::TierUsage usage = ledger_.usage();
  return model::Annotate(
      room.status(), absl::StrCat("the stash has ", usage.used.dram, " of ", usage.budget.dram, " bytes of dram and ",
                                  usage.used.nvme, " of ", usage.budget.nvme, " bytes of nvme in use"));
}

void StashSpace::Leaves() {
  absl::MutexLock lock(&mutex_);
  ++leaving_;
}

void StashSpace::Return(NvmeExtent extent) {
  if (extent.bytes() == 0) return;
  NvmeRoom room = extent.TakeRoom();
  absl::MutexLock lock(&mutex_);
  room_.Join(std::move(room));
  --leaving_;
  ++returned_;
  changed_.SignalAll();
}

double StashSpace::waited_seconds() const {
  absl::MutexLock lock(&mutex_);
  return absl::ToDoubleSeconds(waited_);
}

}  // namespace ballast::stash
