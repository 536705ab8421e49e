#include "ballast/storage/store/log_reads.h"

#include <algorithm>

#include "ballast/proto/base/status.h"
#include "ballast/storage/io/block_file.h"
#include "ballast/storage/log/payload_reader.h"

namespace ballast::storage {

LogReads::Sizes LogReads::SizesOf(absl::Span<const ChunkUpdate> updates, absl::Span<const uint64_t> elements) {
  Sizes sizes;
  for (size_t i = 0; i < updates.size(); ++i) {
    const ChunkUpdate& update = updates[i];
    if (!update.logged_values.empty()) {
      sizes.values_bytes = std::max(sizes.values_bytes, AlignUp(elements[i] * sizeof(float)));
    }
    if (update.logged_gradient.has_value()) {
      sizes.gradient_bytes = std::max(sizes.gradient_bytes, AlignUp(update.logged_gradient->bytes));
    }
  }
  return sizes;
}

LogReads::LogReads(absl::Span<const ChunkUpdate> updates, const Sizes& sizes, const ReadBack& from, IoQueue* queue,
                   Tiers* tiers)
    : updates_(updates),
      from_(from),
      queue_(queue),
      tiers_(tiers),
      values_memory_(from.memory.subspan(0, sizes.values_bytes)) {
  if (sizes.gradient_bytes == 0) {
    End();
    return;
  }
  const absl::Span<std::byte> rest = from.memory.subspan(sizes.values_bytes);
  slots_.resize(std::min(rest.size() / sizes.gradient_bytes, kReadsMax));
  for (size_t i = 0; i < slots_.size(); ++i) slots_[i].data = rest.data() + i * sizes.gradient_bytes;
}

void LogReads::Start() {
  for (Slot& slot : slots_) {
    if (slot.phase != Phase::kFree) continue;
    while (next_ < updates_.size() && !updates_[next_].logged_gradient.has_value()) ++next_;
    if (next_ == updates_.size()) return;
    slot.update = next_++;
    const PayloadPlace& place = *updates_[slot.update].logged_gradient;
    const uint64_t bytes = AlignUp(place.bytes);
    slot.status = queue_->Submit({.kind = IoRequest::Kind::kRead,
                                  .file = from_.log,
                                  .offset = place.offset,
                                  .buffer = {slot.data, bytes},
                                  .tag = kTag | static_cast<uint64_t>(&slot - slots_.data())});
    slot.phase = slot.status.ok() ? Phase::kLoading : Phase::kLoaded;
    tiers_->CountTraffic(TierKind::kNvme, bytes, 0);
    tiers_->CountMove(TierKind::kNvme, TierKind::kDram, MoveReason::kReadBack, bytes);
  }
}

void LogReads::Complete(const IoCompletion& completion) {
  Slot& slot = slots_[completion.tag & ~kTag];
  slot.status = completion.status;
  slot.phase = Phase::kLoaded;
}

const LogReads::Slot* LogReads::Find(size_t update) const {
  const auto found = std::find_if(slots_.begin(), slots_.end(), [&](const Slot& slot) {
    return slot.phase != Phase::kFree && slot.update == update;
  });
  return found == slots_.end() ? nullptr : &*found;
}

bool LogReads::Arrived(size_t i) const {
  const Slot* slot = Find(i);
  return slot != nullptr && slot->phase == Phase::kLoaded;
}

absl::StatusOr<absl::Span<const std::byte>> LogReads::Bytes(size_t i) {
  const Slot& slot = *Find(i);
  if (!slot.status.ok()) BALLAST_RETURN_IF_ERROR(ReadAgain(i));
  return absl::Span<const std::byte>(slot.data, updates_[i].logged_gradient->bytes);
}

absl::Status LogReads::ReadAgain(size_t i) {
  const PayloadPlace& place = *updates_[i].logged_gradient;
  return ReadPayload(*from_.log, place, {Find(i)->data, place.bytes});
}

void LogReads::Release(size_t i) { Find(i)->phase = Phase::kFree; }

}  // namespace ballast::storage
