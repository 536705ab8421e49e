#include "ballast/storage/store/store_buffers.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "ballast/proto/base/status.h"
#include "ballast/storage/store/update_checks.h"

namespace ballast::storage {

// Takes the pipeline's slots and the readers' buffer: together staging_bytes().
absl::Status StoreBuffers::TakeStaging(uint64_t state_bytes, DramTier::Limit limit) {
  const uint64_t slot_bytes = std::max(staging.slot_bytes, state_bytes);
  if (slot_bytes == 0) return absl::OkStatus();
  if (tiers_->staging_bytes() < slot_bytes + ChunkReader::kStagingBytes) {
    return Bad(model::kBadConfig,
               absl::StrCat("staging of ", tiers_->staging_bytes(), " bytes; one chunk's state and a read ",
                            "buffer need ", slot_bytes + ChunkReader::kStagingBytes,
                            ", and three times that lets reads, kernels and writes overlap"));
  }
  BALLAST_RETURN_IF_ERROR(reader.Prepare(limit));
  if (staging.memory.bytes().empty()) {
    BALLAST_ASSIGN_OR_RETURN(
        DramBlock memory,
        tiers_->dram()->Allocate(slot_memory_bytes(), "buffers for moving nvme state", limit, TierPart::kStaging));
    memory.Charge(account_);
    staging.Take(std::move(memory));
  }
  staging.slot_bytes = slot_bytes;
  return absl::OkStatus();
}

absl::Status StoreBuffers::TakePullMemory(const PullMemory& wanted, DramTier::Limit limit) {
  if (wanted.bytes() == 0 || pulled.slot_bytes() > 0) return absl::OkStatus();
  BALLAST_RETURN_IF_ERROR(reader.Prepare(limit));
  BALLAST_ASSIGN_OR_RETURN(
      pull_memory_, tiers_->dram()->Allocate(wanted.bytes(), "memory for pulls of chunks without a working copy", limit,
                                             TierPart::kStaging));
  pull_memory_.Charge(account_);
  reader.AddBuffers(pull_memory_.bytes().subspan(0, wanted.buffer_bytes));
  pulled.Take(pull_memory_.bytes().subspan(wanted.buffer_bytes), wanted.slot_bytes);
  return absl::OkStatus();
}

void StoreBuffers::Release() {
  staging.Release();
  pulled.Release();
  reader.Release();
  pull_memory_ = DramBlock();
}

uint64_t StoreBuffers::slot_memory_bytes() const {
  const uint64_t bytes = tiers_->staging_bytes();
  return bytes - std::min(bytes, ChunkReader::kStagingBytes);
}

uint64_t StoreBuffers::staging_bytes_missing() const {
  return flush_buffer_bytes_missing() + (staging.memory.bytes().empty() ? slot_memory_bytes() : 0);
}

uint64_t StoreBuffers::flush_buffer_bytes_missing() const {
  return reader.prepared() ? 0 : std::min(tiers_->staging_bytes(), ChunkReader::kStagingBytes);
}

PullMemory StoreBuffers::pull_memory_missing(uint64_t copy_bytes, uint64_t chunks) const {
  if (pulled.slot_bytes() > 0) return {};
  // Sixteen chunks ahead keep a disk busy; a quarter of a small job leaves it something to gain.
  constexpr uint64_t kSlotsMax = 16, kSlotsPerBuffer = 5;
  const uint64_t slots = std::clamp<uint64_t>(chunks / 4, 1, kSlotsMax);
  return {
      .slots = slots, .slot_bytes = copy_bytes, .buffer_bytes = slots / kSlotsPerBuffer * ChunkReader::kStagingBytes};
}

}  // namespace ballast::storage
