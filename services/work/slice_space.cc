#include "ballast/services/work/slice_space.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "ballast/proto/model/status.h"
#include "ballast/storage/update/log_reads.h"

namespace ballast::services {

absl::Status SliceSpace::TakeReadBack(const NewChunks& wanted, uint64_t buffer_bytes) {
  std::shared_ptr<SliceMemory> memory;
  {
    JobMutexLock lock(&core_->mu);
    if (room_->read_back() != nullptr) return absl::OkStatus();
    memory = room_->memory();
  }
  // Reads get half of the bytes beyond the minimum.
  const LargestSlices largest(wanted.spec, wanted.optimizer);
  const uint64_t more = buffer_bytes - wanted.read_back().buffer_bytes_min;
  const uint64_t reads = std::min(1 + more / 2 / largest.gradient_bytes, storage::LogReads::kReadsMax);
  BALLAST_ASSIGN_OR_RETURN(auto buffer,
                           SliceMemory::Allocate(memory, largest.values_bytes + reads * largest.gradient_bytes));
  JobMutexLock lock(&core_->mu);
  room_->SetReadBack(std::move(buffer));
  return absl::OkStatus();
}

uint64_t SliceSpace::NeededBytes(const model::EpochPlan& plan, absl::Span<const std::shared_ptr<HeldChunk>> chunks,
                                 absl::Span<const std::shared_ptr<HeldChunk>> spares) const {
  if (room_->read_back() == nullptr) return 0;
  const storage::StateLayout& layout = core_->store->layout();
  const uint64_t unlogged_bytes = SliceBytesPerElement(layout.optimizer());
  uint64_t needed = room_->read_back()->bytes() + LargestSlices(plan.open().spec(), layout.optimizer()).values_bytes;
  for (const auto& spare : spares) {
    if (!spare->logged && !spare->is_frozen()) needed += spare->elements * unlogged_bytes;
  }
  for (const auto& chunk : chunks) {
    if (chunk->is_frozen()) continue;
    if (!chunk->logged) {
      needed += chunk->elements * unlogged_bytes;
    } else if (plan.slices_of_chunk(chunk->id).size() > 1) {
      // Several slices share the chunk's gradient, which stays in memory.
      needed += chunk->elements * layout.gradient_element_bytes();
    }
  }
  return needed;
}

absl::Status SliceSpace::Reserve(uint64_t needed_bytes) {
  std::shared_ptr<storage::ChunkStore> store;
  std::shared_ptr<SliceMemory> memory;
  {
    JobMutexLock lock(&core_->mu);
    store = core_->store;
    memory = room_->memory();
  }
  while (needed_bytes > 0 && memory->reserved_bytes() < needed_bytes) {
    const absl::Status reserved = memory->Reserve(needed_bytes - memory->reserved_bytes());
    if (reserved.ok()) break;
    BALLAST_ASSIGN_OR_RETURN(const bool moved, MoveOneDown(store.get()));
    if (moved) continue;
    BALLAST_ASSIGN_OR_RETURN(const bool dropped, store->DropWorkingCopies());
    if (!dropped) return reserved;
    spdlog::info("job '{}': dropped working copies, its ranks now share more chunks", core_->name);
  }
  return absl::OkStatus();
}

absl::StatusOr<bool> SliceSpace::MoveOneDown(storage::ChunkStore* store) {
  const std::vector<storage::PlacedChunk> placed = store->placed();
  const auto last = std::find_if(placed.rbegin(), placed.rend(), [](const storage::PlacedChunk& chunk) {
    return chunk.placement.state == storage::TierKind::kDram;
  });
  if (last == placed.rend()) return false;
  const auto chunk = static_cast<uint64_t>(placed.rend() - last) - 1;
  if (store->dirty(chunk)) BALLAST_RETURN_IF_ERROR(flushes_->Run(store, {&chunk, 1}));
  core_->around.moving->Begin();
  const absl::Status moved = store->Move(chunk, storage::TierKind::kNvme);
  core_->around.moving->End();
  BALLAST_RETURN_IF_ERROR(moved);
  spdlog::info("job '{}': chunk {} of its store moved to nvme, its ranks now share more chunks", core_->name, chunk);
  return true;
}

}  // namespace ballast::services
