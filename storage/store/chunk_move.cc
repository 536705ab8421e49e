#include "ballast/storage/store/chunk_move.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "ballast/proto/model/status.h"
#include "ballast/storage/update/state_update.h"

namespace ballast::storage {
namespace {

// Allocates the memory that the chunk will own in tier `to`.
absl::StatusOr<ChunkMemory> MemoryIn(Tiers* tiers, const StoredChunk& chunk, TierKind to) {
  const std::string what = absl::StrCat("chunk state that moves to ", TierName(to));
  ChunkMemory memory;
  if (to == TierKind::kHbm) {
    BALLAST_ASSIGN_OR_RETURN(memory.hbm, tiers->hbm()->Allocate(chunk.state_bytes(), what));
    return memory;
  }
  if (to == TierKind::kDram) {
    BALLAST_ASSIGN_OR_RETURN(memory.dram, tiers->dram()->Allocate(chunk.state_bytes(), what));
  }
  if (chunk.placement.working == TierKind::kHbm) {
    BALLAST_ASSIGN_OR_RETURN(
        memory.dram_working,
        tiers->dram()->Allocate(chunk.layout.WorkingBytes(chunk.elements), "a working copy that leaves hbm",
                                DramTier::Limit::kBudget, TierPart::kWorking));
  }
  return memory;
}

absl::Status ReadChecked(const BlockFile& file, const StoredChunk& chunk, uint64_t offset, const ArrayDigests& expected,
                         absl::Span<std::byte> to) {
  BALLAST_RETURN_IF_ERROR(file.Read(offset, to));
  return CompareDigests(file, chunk, offset, expected, DigestState(chunk.View(to.data()), {nullptr, [] {}}));
}

absl::StatusOr<ArrayDigests> WriteExtent(Tiers* tiers, ChunkReader* reader, const StoredChunk& chunk,
                                         const NvmeExtent& extent) {
  if (chunk.placement.state == TierKind::kHbm) return reader->Spill(chunk, extent.home(), extent.offset());
  // Nobody but this thread changes the state.
  const ArrayDigests digests = DigestState(chunk.View(chunk.state), {nullptr, [] {}});
  BALLAST_RETURN_IF_ERROR(extent.home()->Write(extent.offset(), {chunk.state, chunk.state_bytes()}));
  tiers->CountTraffic(TierKind::kDram, chunk.state_bytes(), 0);
  tiers->CountTraffic(TierKind::kNvme, 0, chunk.state_bytes());
  tiers->CountMove(TierKind::kDram, TierKind::kNvme, MoveReason::kMove, chunk.state_bytes());
  return digests;
}

// The extent of the state before it moves, and what it holds.
struct OldExtent {
  const BlockFile* file = nullptr;  // null: there is none
  uint64_t offset = 0;
  ArrayDigests digests = {};
};

// Copies the state into `memory`, from NVMe to HBM by way of `move.buffer`.
absl::Status Fill(Tiers* tiers, const StoredChunk& chunk, const StateMove& move, const OldExtent& old,
                  const ChunkMemory& memory) {
  const TierKind from = chunk.placement.state;
  const uint64_t bytes = chunk.state_bytes();
  absl::Span<std::byte> host = move.to == TierKind::kDram ? memory.dram.bytes() : move.buffer.subspan(0, bytes);
  if (from == TierKind::kDram) host = {chunk.state, bytes};
  if (from == TierKind::kNvme) BALLAST_RETURN_IF_ERROR(ReadChecked(*old.file, chunk, old.offset, old.digests, host));
  if (from == TierKind::kHbm) BALLAST_RETURN_IF_ERROR(tiers->hbm()->CopyOut(chunk.state, host));
  if (move.to == TierKind::kHbm) BALLAST_RETURN_IF_ERROR(tiers->hbm()->CopyIn(host, memory.hbm.data()));
  tiers->CountTraffic(from, bytes, 0);
  tiers->CountTraffic(move.to, 0, bytes);
  tiers->CountMove(from, move.to, MoveReason::kMove, bytes);
  return absl::OkStatus();
}

}  // namespace

absl::Status MoveState(Tiers* tiers, const std::shared_ptr<Account>& account, ChunkReader* reader, StoredChunk& chunk,
                       StateMove& move) {
  const TierKind from = chunk.placement.state;
  bool zero = false;
  OldExtent extent;
  {
    absl::ReaderMutexLock lock(&chunk.mutex);
    zero = chunk.updated_in == 0;
    if (chunk.extent.bytes() > 0) extent.file = &chunk.extent.file();
    extent.offset = chunk.extent.offset();
    extent.digests = chunk.digests;
  }
  ArrayDigests digests = extent.digests;
  BALLAST_ASSIGN_OR_RETURN(ChunkMemory memory, MemoryIn(tiers, chunk, move.to));
  memory.Charge(account);
  if (!zero && move.to != TierKind::kNvme) {
    BALLAST_RETURN_IF_ERROR(Fill(tiers, chunk, move, extent, memory));
  } else if (!zero && move.extent.bytes() > 0) {
    BALLAST_ASSIGN_OR_RETURN(digests, WriteExtent(tiers, reader, chunk, move.extent));
  }
  const absl::Span<std::byte> working = memory.dram_working.bytes();
  if (!working.empty()) BALLAST_RETURN_IF_ERROR(tiers->hbm()->CopyOut(chunk.working, working));

  std::byte* const old = chunk.state;
  {
    absl::MutexLock reading(&chunk.reading);
    absl::MutexLock lock(&chunk.mutex);
    chunk.placement.state = move.to;
    if (move.to == TierKind::kNvme) chunk.moments_unread = false;
    chunk.state = move.to == TierKind::kHbm ? memory.hbm.data() : memory.dram.bytes().data();
    // The chunk's old memory is freed with `memory`.
    std::swap(chunk.own.hbm, memory.hbm);
    std::swap(chunk.own.dram, memory.dram);
    if (!working.empty()) {
      chunk.placement.working = TierKind::kDram;
      chunk.working = working.data();
      std::swap(chunk.own.hbm_working, memory.hbm_working);
      std::swap(chunk.own.dram_working, memory.dram_working);
    }
    if (from != TierKind::kNvme) {
      if (move.extent.bytes() > 0) std::swap(chunk.extent, move.extent);
      chunk.digests = digests;
    } else if (!move.keep_extent) {
      std::swap(chunk.extent, move.extent);
    }
  }
  if (from == TierKind::kDram && memory.dram.bytes().empty()) chunk.shared->GiveBack({old, chunk.state_bytes()});
  return absl::OkStatus();
}

}  // namespace ballast::storage
