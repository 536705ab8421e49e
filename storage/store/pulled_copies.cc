#include "ballast/storage/store/pulled_copies.h"

#include <algorithm>

namespace ballast::storage {

void PulledCopies::Take(absl::Span<std::byte> memory, uint64_t slot_bytes) {
  absl::MutexLock lock(&mutex_);
  for (uint64_t at = 0; at + slot_bytes <= memory.size(); at += slot_bytes) slots_.push_back({.memory = &memory[at]});
  slot_bytes_ = slot_bytes;
}

void PulledCopies::Release() {
  absl::MutexLock lock(&mutex_);
  slots_.clear();
  slot_bytes_ = 0;
}

PulledCopies::Slot* PulledCopies::Find(uint64_t chunk, uint64_t version) {
  const auto found = std::find_if(slots_.begin(), slots_.end(), [&](const Slot& slot) {
    return slot.holds != Holds::kNothing && slot.chunk == chunk && slot.version == version;
  });
  return found == slots_.end() ? nullptr : &*found;
}

PulledCopies::Slot* PulledCopies::Unused() {
  Slot* oldest = nullptr;
  for (Slot& slot : slots_) {
    if (slot.users == 0 && (oldest == nullptr || slot.last_used < oldest->last_used)) oldest = &slot;
  }
  return oldest;
}

absl::Status PulledCopies::Read(uint64_t chunk, uint64_t version, uint64_t bytes, uint64_t at, absl::Span<std::byte> to,
                                Fill fill) {
  Slot* slot = nullptr;
  bool fills = false;
  {
    absl::MutexLock lock(&mutex_);
    const auto find = [&]() ABSL_NO_THREAD_SAFETY_ANALYSIS {
      slot = Find(chunk, version);
      fills = slot == nullptr;
      if (fills) slot = Unused();
      return slot != nullptr && (fills || slot->holds == Holds::kCopy);
    };
    mutex_.Await(absl::Condition(&find));
    ++slot->users;
    slot->last_used = ++uses_;
    if (fills) {
      slot->holds = Holds::kPartOfCopy;
      slot->chunk = chunk;
      slot->version = version;
    }
  }
  const absl::Status status = fills ? fill({slot->memory, bytes}) : absl::OkStatus();
  if (status.ok()) std::copy_n(slot->memory + at, to.size(), to.data());
  absl::MutexLock lock(&mutex_);
  if (fills) slot->holds = status.ok() ? Holds::kCopy : Holds::kNothing;
  --slot->users;
  return status;
}

}  // namespace ballast::storage
