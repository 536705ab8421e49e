// A chunk's state on the disk: its extent, what the extent must read as, and what memory still has to give it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "ballast/storage/store/extent_label.h"
#include "ballast/storage/tier/nvme_tier.h"

namespace ballast::storage {

// A place on the disk, and the digests of the state there: all that a read needs once it has let go of the chunk's
// lock.
struct WrittenState {
  const BlockFile* file = nullptr;  // null: there is no extent
  uint64_t offset = 0;
  ArrayDigests digests = {};
};
inline WrittenState WrittenIn(const NvmeExtent& extent, const ArrayDigests& digests) {
  return {extent.bytes() > 0 ? &extent.file() : nullptr, extent.offset(), digests};
}

// The place of NVMe state; in a durable store also of the last flushed version of state in memory.
// Threads: whoever holds the chunk's `mutex`.
class StateOnDisk {
 public:
  explicit StateOnDisk(NvmeExtent extent) : extent_(std::move(extent)) {}

  const NvmeExtent& extent() const { return extent_; }
  const ArrayDigests& digests() const { return digests_; }
  WrittenState written() const { return WrittenIn(extent_, digests_); }
  // The newest state, in memory, while the extent does not hold it yet; null: the extent does.
  std::byte* staged() const { return staged_; }
  // State in DRAM, since a restart took back its master alone: the extent holds the moments, and nobody reads or writes
  // them in memory until StateRestore::Moments has read them. The digests are the extent's.
  bool moments_unread() const { return moments_unread_; }

  // The state has these digests now, or will have them once it is written.
  void SetDigests(const ArrayDigests& digests) { digests_ = digests; }
  // Moves on to another extent, which may be empty. Returns the one before.
  NvmeExtent MoveTo(NvmeExtent extent) { return std::exchange(extent_, std::move(extent)); }
  // At the store's end: the content stays for the next run of the server.
  void Leave() { extent_.Leave(); }
  // `state` is on its way to the extent.
  void Stage(std::byte* state) { staged_ = state; }
  void EndStage() { staged_ = nullptr; }
  void LeaveMoments() { moments_unread_ = true; }
  // Memory has the moments, or needs them no more.
  void EndMoments() { moments_unread_ = false; }

 private:
  NvmeExtent extent_;
  ArrayDigests digests_ = {};
  std::byte* staged_ = nullptr;
  bool moments_unread_ = false;
};

}  // namespace ballast::storage
