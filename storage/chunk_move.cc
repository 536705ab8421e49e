#include "ballast/storage/chunk_move.h"

#include <utility>

#include "ballast/proto/model/status.h"
#include "ballast/storage/chunk_reader.h"
#include "ballast/storage/state_update.h"

namespace ballast::storage {

absl::Status MoveToNvme(Tiers* tiers, StoredChunk& chunk, NvmeExtent extent) {
  const uint64_t bytes = chunk.state_bytes();
  bool zero = false;
  {
    absl::ReaderMutexLock lock(&chunk.mutex);
    zero = chunk.updated_in == 0;
  }
  const bool moves_bytes = extent.bytes() > 0 && !zero;
  ArrayDigests digests = {};
  if (moves_bytes) {
    // Nobody but this thread changes the state.
    digests = DigestState(chunk.View(chunk.state), {nullptr, [] {}});
    BALLAST_RETURN_IF_ERROR(tiers->nvme()->file().Write(extent.offset(), {chunk.state, bytes}));
    tiers->CountTraffic(TierKind::kDram, bytes, 0);
    tiers->CountTraffic(TierKind::kNvme, 0, bytes);
  }
  DramBlock own;
  std::byte* state = nullptr;
  {
    absl::MutexLock lock(&chunk.mutex);
    if (extent.bytes() > 0) chunk.extent = std::move(extent);
    if (moves_bytes) chunk.digests = digests;
    chunk.placement.state = TierKind::kNvme;
    state = std::exchange(chunk.state, nullptr);
    own = std::move(chunk.own);
  }
  if (own.bytes().empty()) chunk.shared->GiveBack({state, bytes});
  return absl::OkStatus();
}

absl::Status MoveToDram(Tiers* tiers, StoredChunk& chunk, bool keep_extent) {
  const uint64_t bytes = chunk.state_bytes();
  BALLAST_ASSIGN_OR_RETURN(DramBlock own, tiers->dram()->Allocate(bytes, "chunk state that moves up from nvme"));
  bool zero = false;
  uint64_t offset = 0;
  ArrayDigests expected;
  {
    absl::ReaderMutexLock lock(&chunk.mutex);
    zero = chunk.updated_in == 0;
    offset = chunk.extent.offset();
    expected = chunk.digests;
  }
  if (!zero) {
    const BlockFile& file = tiers->nvme()->file();
    BALLAST_RETURN_IF_ERROR(file.Read(offset, own.bytes()));
    tiers->CountTraffic(TierKind::kNvme, bytes, 0);
    tiers->CountTraffic(TierKind::kDram, 0, bytes);
    const ArrayDigests found = DigestState(chunk.View(own.bytes().data()), {nullptr, [] {}});
    BALLAST_RETURN_IF_ERROR(CompareDigests(file, chunk, offset, expected, found));
  }
  NvmeExtent old;
  absl::MutexLock lock(&chunk.mutex);
  chunk.own = std::move(own);
  chunk.state = chunk.own.bytes().data();
  chunk.placement.state = TierKind::kDram;
  if (!keep_extent) old = std::move(chunk.extent);
  return absl::OkStatus();
}

}  // namespace ballast::storage
