#include "ballast/storage/store/chunk_memory.h"

namespace ballast::storage {

ChunkMemory::ChunkMemory(ChunkPlacement placement, OwnMemory own, const SharedMemory& shared)
    : placement_(placement),
      own_(std::move(own)),
      shared_(shared.block),
      state_(shared.state != nullptr ? shared.state : OwnState()),
      working_(shared.working != nullptr ? shared.working : own_.hbm_working.data()) {}

std::byte* ChunkMemory::OwnState() const {
  return placement_.state == TierKind::kHbm ? own_.hbm.data() : own_.dram.bytes().data();
}

HbmWorking ChunkMemory::WorkingOfDevice(uint64_t at) const {
  if (placement_.working == TierKind::kHbm) return {.device = working_ + at};
  return {.host = working_ + at};
}

void ChunkMemory::MoveTo(TierKind to, OwnMemory* memory) {
  placement_.state = to;
  std::swap(own_.hbm, memory->hbm);
  std::swap(own_.dram, memory->dram);
  state_ = OwnState();
  if (memory->dram_working.bytes().empty()) return;
  placement_.working = TierKind::kDram;
  std::swap(own_.hbm_working, memory->hbm_working);
  std::swap(own_.dram_working, memory->dram_working);
  working_ = own_.dram_working.bytes().data();
}

std::byte* ChunkMemory::DropWorking() {
  placement_.working = std::nullopt;
  return std::exchange(working_, nullptr);
}

OwnMemory ChunkMemory::Remove(SharedMemory* shared) {
  const bool own_state = state_ == OwnState();
  const bool own_working = working_ == own_.hbm_working.data() || working_ == own_.dram_working.bytes().data();
  *shared = {.block = shared_,
             .state = own_state ? nullptr : std::exchange(state_, nullptr),
             .working = own_working ? nullptr : std::exchange(working_, nullptr)};
  placement_ = PlacedChunk::Gap().placement;
  state_ = working_ = nullptr;
  shared_ = nullptr;
  removed_ = true;
  return std::move(own_);
}

}  // namespace ballast::storage
