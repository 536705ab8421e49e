#include "ballast/storage/store/pinned_copy.h"

#include <cstring>

#include "absl/strings/str_cat.h"
#include "ballast/proto/model/status.h"
#include "ballast/storage/update/state_update.h"

namespace ballast::storage {
namespace {
constexpr char kWhat[] = "a pinned copy of a chunk's state";
}  // namespace

absl::StatusOr<CopyOnWrite> CopyOnWrite::Prepare(Tiers* tiers, ChunkReader* reader, const StoredChunk& chunk,
                                                 uint64_t run, const std::byte* loaded, bool extent_is_kept) {
  CopyOnWrite copy;
  {
    absl::ReaderMutexLock lock(&chunk.mutex);
    copy.copy_.from = chunk.updated_in;
  }
  copy.copy_.to = run;
  if (copy.copy_.from == 0) {
    copy.copy_.zero = true;
    return copy;
  }
  // Without room for the read buffer an extent could not be read back.
  absl::Status no_extent;
  if (tiers->nvme() != nullptr && reader->Prepare().ok()) {
    absl::StatusOr<NvmeExtent> extent = tiers->nvme()->Allocate(chunk.state_bytes(), kWhat);
    if (extent.ok() && chunk.placement.state == TierKind::kNvme && !extent_is_kept) {
      copy.fresh_ = *std::move(extent);
      return copy;
    }
    if (extent.ok()) {
      copy.copy_.extent = *std::move(extent);
      copy.copy_.extent.Mark(TierPart::kPins);
      BALLAST_RETURN_IF_ERROR(copy.FillExtent(tiers, reader, chunk, loaded));
      return copy;
    }
    if (extent.status().code() != absl::StatusCode::kResourceExhausted) return extent.status();
    no_extent = extent.status();
  }
  const absl::Status filled = copy.FillDram(tiers, chunk, loaded);
  if (filled.ok()) return copy;
  return no_extent.ok() ? filled : model::Annotate(filled, absl::StrCat(no_extent.message(), "; and in dram instead"));
}

absl::Status CopyOnWrite::FillExtent(Tiers* tiers, ChunkReader* reader, const StoredChunk& chunk,
                                     const std::byte* loaded) {
  if (chunk.placement.state == TierKind::kHbm) {
    BALLAST_ASSIGN_OR_RETURN(copy_.digests, reader->Spill(chunk, copy_.extent.home(), copy_.extent.offset()));
    return absl::OkStatus();
  }
  const uint64_t bytes = chunk.state_bytes();
  const std::byte* const state = loaded != nullptr ? loaded : chunk.state;
  copy_.digests = DigestState(chunk.View(const_cast<std::byte*>(state)), {nullptr, [] {}});
  tiers->CountTraffic(TierKind::kDram, bytes, 0);
  tiers->CountTraffic(TierKind::kNvme, 0, bytes);
  tiers->CountMove(TierKind::kDram, TierKind::kNvme, MoveReason::kPin, bytes);
  return copy_.extent.home()->Write(copy_.extent.offset(), {state, bytes});
}

absl::Status CopyOnWrite::FillDram(Tiers* tiers, const StoredChunk& chunk, const std::byte* loaded) {
  const uint64_t bytes = chunk.state_bytes();
  BALLAST_ASSIGN_OR_RETURN(copy_.dram,
                           tiers->dram()->Allocate(bytes, kWhat, DramTier::Limit::kBudget, TierPart::kPins));
  tiers->CountMove(chunk.placement.state, TierKind::kDram, MoveReason::kPin, bytes);
  tiers->CountTraffic(TierKind::kDram, 0, bytes);
  if (chunk.placement.state == TierKind::kHbm) {
    tiers->CountTraffic(TierKind::kHbm, bytes, 0);
    return tiers->hbm()->CopyOut(chunk.state, copy_.dram.bytes());
  }
  std::memcpy(copy_.dram.bytes().data(), loaded != nullptr ? loaded : chunk.state, bytes);
  return absl::OkStatus();
}

void CopyOnWrite::Install(StoredChunk& chunk) && {
  if (fresh_.has_value()) {
    copy_.extent = std::move(chunk.extent);
    copy_.extent.Mark(TierPart::kPins);
    copy_.digests = chunk.digests;
    chunk.extent = *std::move(fresh_);
  }
  chunk.copies.push_back(std::move(copy_));
}

}  // namespace ballast::storage
