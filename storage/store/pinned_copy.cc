#include "ballast/storage/store/pinned_copy.h"

#include <cstring>

#include "absl/strings/str_cat.h"
#include "ballast/proto/base/status.h"
#include "ballast/storage/store/remainder.h"
#include "ballast/storage/store/state_update.h"

namespace ballast::storage {
namespace {
constexpr char kWhat[] = "a pinned copy of a chunk's state";
}  // namespace

CopyOnWrite CopyOnWrite::Lost(const StoredChunk& chunk, const absl::Status& lost) {
  CopyOnWrite copy(chunk);
  copy.copy_.lost = lost;
  return copy;
}

absl::StatusOr<CopyOnWrite> CopyOnWrite::Prepare(Tiers* tiers, const std::shared_ptr<Account>& account,
                                                 ChunkReader* reader, const StoredChunk& chunk, const std::byte* loaded,
                                                 bool extent_is_kept) {
  CopyOnWrite copy(chunk);
  {
    absl::ReaderMutexLock lock(&chunk.mutex);
    if (chunk.history.zero()) return copy;
  }
  // Without room for the read buffer an extent could not be read back.
  absl::Status no_extent;
  if (tiers->nvme() != nullptr && reader->Prepare().ok()) {
    absl::StatusOr<NvmeExtent> extent = tiers->nvme()->Allocate(copy.bytes(chunk), kWhat);
    if (extent.ok()) extent->Charge(account);
    // The working copy of a remainder is about to change, so the chunk's extent is no copy.
    const bool whole = !chunk.layout.keeps_remainder();
    const bool inherits = chunk.memory.tier() == TierKind::kNvme && !extent_is_kept && whole;
    if (extent.ok() && inherits) {
      copy.fresh_ = *std::move(extent);
      return copy;
    }
    if (extent.ok()) {
      copy.copy_.extent = *std::move(extent);
      copy.copy_.extent.Mark(TierPart::kPins);
      BALLAST_RETURN_IF_ERROR(copy.FillExtent(tiers, account, reader, chunk, loaded));
      return copy;
    }
    if (extent.status().code() != absl::StatusCode::kResourceExhausted) return extent.status();
    no_extent = extent.status();
  }
  const absl::Status filled = copy.FillDram(tiers, account, chunk, loaded);
  if (filled.ok()) return copy;
  return no_extent.ok() ? filled : model::Annotate(filled, absl::StrCat(no_extent.message(), "; and in dram instead"));
}

uint64_t CopyOnWrite::bytes(const StoredChunk& chunk) const { return copy_.layout.StateBytes(chunk.elements); }

// Copies the state at `from`, in the host's memory, to `to`, as the copy's layout has it.
void CopyOnWrite::CopyWhole(const StoredChunk& chunk, const std::byte* from, std::byte* to) const {
  if (!chunk.layout.keeps_remainder()) {
    std::memcpy(to, from, bytes(chunk));
    return;
  }
  const StateView state = chunk.View(const_cast<std::byte*>(from)), whole{&copy_.layout, to, chunk.elements};
  absl::ReaderMutexLock lock(&chunk.mutex);
  JoinMaster(state, chunk.memory.working(), 0, {whole.master(), chunk.elements});
  std::byte* const behind = to + copy_.layout.UsedBytes(StateArray::kMaster, chunk.elements);
  std::byte* const moments = whole.array(StateArray::kMoment1);
  std::memset(behind, 0, static_cast<size_t>(moments - behind));
  std::memcpy(moments, state.array(StateArray::kMoment1), static_cast<size_t>(to + bytes(chunk) - moments));
}

absl::Status CopyOnWrite::FillExtent(Tiers* tiers, const std::shared_ptr<Account>& account, ChunkReader* reader,
                                     const StoredChunk& chunk, const std::byte* loaded) {
  if (chunk.memory.tier() == TierKind::kHbm) {
    BALLAST_ASSIGN_OR_RETURN(copy_.digests, reader->Spill(chunk, copy_.extent.home(), copy_.extent.offset()));
    return absl::OkStatus();
  }
  const std::byte* state = loaded != nullptr ? loaded : chunk.memory.state();
  DramBlock whole;  // for as long as it takes to write it
  if (chunk.layout.keeps_remainder()) {
    BALLAST_ASSIGN_OR_RETURN(
        whole, tiers->dram()->Allocate(bytes(chunk), kWhat, DramTier::Limit::kBeyond, TierPart::kStaging));
    whole.Charge(account);
    CopyWhole(chunk, state, whole.bytes().data());
    state = whole.bytes().data();
  }
  copy_.digests = DigestState({&copy_.layout, const_cast<std::byte*>(state), chunk.elements}, {nullptr, [] {}});
  tiers->CountTraffic(TierKind::kDram, bytes(chunk), 0);
  tiers->CountTraffic(TierKind::kNvme, 0, bytes(chunk));
  tiers->CountMove(TierKind::kDram, TierKind::kNvme, MoveReason::kPin, bytes(chunk));
  return copy_.extent.home()->Write(copy_.extent.offset(), {state, bytes(chunk)});
}

absl::Status CopyOnWrite::FillDram(Tiers* tiers, const std::shared_ptr<Account>& account, const StoredChunk& chunk,
                                   const std::byte* loaded) {
  BALLAST_ASSIGN_OR_RETURN(copy_.dram,
                           tiers->dram()->Allocate(bytes(chunk), kWhat, DramTier::Limit::kBudget, TierPart::kPins));
  copy_.dram.Charge(account);
  tiers->CountMove(chunk.memory.tier(), TierKind::kDram, MoveReason::kPin, bytes(chunk));
  tiers->CountTraffic(TierKind::kDram, 0, bytes(chunk));
  if (chunk.memory.tier() == TierKind::kHbm) {
    tiers->CountTraffic(TierKind::kHbm, bytes(chunk), 0);
    return tiers->hbm()->CopyOut(chunk.memory.state(), copy_.dram.bytes());
  }
  CopyWhole(chunk, loaded != nullptr ? loaded : chunk.memory.state(), copy_.dram.bytes().data());
  return absl::OkStatus();
}

void CopyOnWrite::Install(StoredChunk& chunk, uint64_t run) && {
  if (fresh_.has_value()) {
    copy_.extent = chunk.on_disk.MoveTo(*std::move(fresh_));
    copy_.extent.Mark(TierPart::kPins);
    copy_.digests = chunk.on_disk.digests();
  }
  chunk.history.Keep(std::move(copy_), run);
}

}  // namespace ballast::storage
