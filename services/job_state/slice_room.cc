#include "ballast/services/job_state/slice_room.h"

#include <algorithm>

#include "ballast/proto/base/status.h"
#include "ballast/services/job_state/job_core.h"
#include "ballast/storage/store/log_reads.h"

namespace ballast::services {

void SliceRoom::SetMemory(std::shared_ptr<SliceMemory> memory) {
  if (memory_ != memory) read_back_ = nullptr;
  memory_ = std::move(memory);
}

bool SliceRoom::HasBuffer(uint64_t bytes) const { return returning_ == 0 || memory_->Fits(bytes); }

void SliceRoom::WaitForBuffer(const std::shared_ptr<HeldChunk>& chunk) {
  if (std::find(short_.begin(), short_.end(), chunk) == short_.end()) short_.push_back(chunk);
}

void SliceRoom::Returned(Replies* replies) {
  --returning_;
  while (!short_.empty()) {
    const std::shared_ptr<HeldChunk> chunk = short_.front();
    short_.pop_front();
    core_->WakePushes(chunk.get(), replies);
    if (short_.empty() || short_.back() != chunk) continue;
    // Room is still short: the chunk stays first.
    short_.pop_back();
    short_.push_front(chunk);
    return;
  }
}

absl::StatusOr<std::shared_ptr<SliceMemory::Buffer>> SliceRoom::PrepareReadBack(
    absl::Span<const storage::ChunkUpdate> updates, absl::Span<const uint64_t> elements) {
  const storage::LogReads::Sizes sizes = storage::LogReads::SizesOf(updates, elements);
  if (sizes.bytes_min() == 0) return nullptr;
  std::shared_ptr<SliceMemory> memory;
  {
    JobMutexLock lock(&core_->mu);
    if (read_back_ != nullptr && read_back_->bytes() >= sizes.bytes_min()) return read_back_;
    memory = memory_;
  }
  // In recovery every job's slices are in the log, and the memory for them is free.
  uint64_t reads = storage::LogReads::kReadsMax;
  const auto bytes = [&] { return sizes.values_bytes + reads * sizes.gradient_bytes; };
  while (reads > 1 && !memory->Fits(bytes())) reads /= 2;
  return SliceMemory::Allocate(memory, bytes());
}

}  // namespace ballast::services
