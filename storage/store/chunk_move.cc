#include "ballast/storage/store/chunk_move.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "ballast/proto/base/status.h"
#include "ballast/storage/store/state_update.h"

namespace ballast::storage {
namespace {

// Allocates the memory that the chunk will own in tier `to`.
absl::StatusOr<OwnMemory> MemoryIn(Tiers* tiers, const StoredChunk& chunk, TierKind to) {
  const std::string what = absl::StrCat("chunk state that moves to ", TierName(to));
  OwnMemory memory;
  if (to == TierKind::kHbm) {
    BALLAST_ASSIGN_OR_RETURN(memory.hbm, tiers->hbm()->Allocate(chunk.state_bytes(), what));
    return memory;
  }
  if (to == TierKind::kDram) {
    BALLAST_ASSIGN_OR_RETURN(memory.dram, tiers->dram()->Allocate(chunk.state_bytes(), what));
  }
  if (chunk.memory.placement().working == TierKind::kHbm) {
    BALLAST_ASSIGN_OR_RETURN(memory.dram_working,
                             tiers->dram()->Allocate(chunk.working_bytes(), "a working copy that leaves hbm",
                                                     DramTier::Limit::kBudget, TierPart::kWorking));
  }
  return memory;
}

absl::Status ReadChecked(const WrittenState& from, const StoredChunk& chunk, absl::Span<std::byte> to) {
  BALLAST_RETURN_IF_ERROR(from.file->Read(from.offset, to));
  return CompareDigests(from, chunk, DigestState(chunk.View(to.data()), {nullptr, [] {}}));
}

absl::StatusOr<ArrayDigests> WriteExtent(Tiers* tiers, ChunkReader* reader, const StoredChunk& chunk,
                                         const NvmeExtent& extent) {
  if (chunk.memory.tier() == TierKind::kHbm) return reader->Spill(chunk, extent.home(), extent.offset());
  // Nobody but this thread changes the state.
  const ArrayDigests digests = DigestState(chunk.View(chunk.memory.state()), {nullptr, [] {}});
  BALLAST_RETURN_IF_ERROR(extent.home()->Write(extent.offset(), {chunk.memory.state(), chunk.state_bytes()}));
  tiers->CountTraffic(TierKind::kDram, chunk.state_bytes(), 0);
  tiers->CountTraffic(TierKind::kNvme, 0, chunk.state_bytes());
  tiers->CountMove(TierKind::kDram, TierKind::kNvme, MoveReason::kMove, chunk.state_bytes());
  return digests;
}

// Copies the state into `memory`, from NVMe, where it is `old`, to HBM by way of `move.buffer`.
absl::Status Fill(Tiers* tiers, const StoredChunk& chunk, const StateMove& move, const WrittenState& old,
                  const OwnMemory& memory) {
  const TierKind from = chunk.memory.tier();
  const uint64_t bytes = chunk.state_bytes();
  absl::Span<std::byte> host = move.to == TierKind::kDram ? memory.dram.bytes() : move.buffer.subspan(0, bytes);
  if (from == TierKind::kDram) host = {chunk.memory.state(), bytes};
  if (from == TierKind::kNvme) BALLAST_RETURN_IF_ERROR(ReadChecked(old, chunk, host));
  if (from == TierKind::kHbm) BALLAST_RETURN_IF_ERROR(tiers->hbm()->CopyOut(chunk.memory.state(), host));
  if (move.to == TierKind::kHbm) BALLAST_RETURN_IF_ERROR(tiers->hbm()->CopyIn(host, memory.hbm.data()));
  tiers->CountTraffic(from, bytes, 0);
  tiers->CountTraffic(move.to, 0, bytes);
  tiers->CountMove(from, move.to, MoveReason::kMove, bytes);
  return absl::OkStatus();
}

}  // namespace

absl::Status MoveState(Tiers* tiers, const std::shared_ptr<Account>& account, ChunkReader* reader, StoredChunk& chunk,
                       StateMove& move) {
  const TierKind from = chunk.memory.tier();
  bool zero = false;
  WrittenState written;
  {
    absl::ReaderMutexLock lock(&chunk.mutex);
    zero = chunk.history.zero() || chunk.history.is_void();  // nothing that counts goes along
    written = chunk.on_disk.written();
  }
  ArrayDigests digests = written.digests;
  BALLAST_ASSIGN_OR_RETURN(OwnMemory memory, MemoryIn(tiers, chunk, move.to));
  memory.Charge(account);
  if (!zero && move.to != TierKind::kNvme) {
    BALLAST_RETURN_IF_ERROR(Fill(tiers, chunk, move, written, memory));
  } else if (!zero && move.extent.bytes() > 0) {
    BALLAST_ASSIGN_OR_RETURN(digests, WriteExtent(tiers, reader, chunk, move.extent));
  }
  const absl::Span<std::byte> working = memory.dram_working.bytes();
  if (!working.empty()) BALLAST_RETURN_IF_ERROR(tiers->hbm()->CopyOut(chunk.memory.working(), working));

  std::byte* const old = chunk.memory.state();
  {
    absl::MutexLock reading(&chunk.reading);
    absl::MutexLock lock(&chunk.mutex);
    chunk.memory.MoveTo(move.to, &memory);  // the chunk's old memory is freed with `memory`
    if (move.to == TierKind::kNvme) chunk.on_disk.EndMoments();
    const bool other_extent = from == TierKind::kNvme ? !move.keep_extent : move.extent.bytes() > 0;
    if (other_extent) move.extent = chunk.on_disk.MoveTo(std::move(move.extent));
    if (from != TierKind::kNvme) chunk.on_disk.SetDigests(digests);
  }
  if (from == TierKind::kDram && memory.dram.bytes().empty())
    chunk.memory.shared()->GiveBack({old, chunk.state_bytes()});
  return absl::OkStatus();
}

}  // namespace ballast::storage
