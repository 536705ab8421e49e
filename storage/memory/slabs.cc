#include "ballast/storage/memory/slabs.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "ballast/storage/io/block_file.h"

namespace ballast::storage {

void Slabs::Add(Arena slab) {
  const absl::Span<std::byte> memory = slab.bytes();
  if (memory.empty()) return;
  absl::MutexLock lock(&mutex_);
  bytes_ += memory.size();
  slabs_.push_back({std::move(slab), {{memory.data(), memory.size()}}});
}

absl::Span<std::byte> Slabs::AddAndTake(Arena slab, uint64_t bytes) {
  const absl::Span<std::byte> memory = slab.bytes();
  const uint64_t place = AlignUp(bytes);
  absl::MutexLock lock(&mutex_);
  bytes_ += memory.size();
  slabs_.push_back({std::move(slab), {}});
  if (memory.size() > place) slabs_.back().free[memory.data() + place] = memory.size() - place;
  return memory.first(bytes);
}

// First fit: buffers of a job have few sizes, so holes are used again.
absl::Span<std::byte> Slabs::Take(uint64_t bytes) {
  const uint64_t place = AlignUp(bytes);
  absl::MutexLock lock(&mutex_);
  for (Slab& slab : slabs_) {
    const auto found =
        std::find_if(slab.free.begin(), slab.free.end(), [&](const auto& f) { return f.second >= place; });
    if (found == slab.free.end()) continue;
    const auto [at, free] = *found;
    slab.free.erase(found);
    if (free > place) slab.free[at + place] = free - place;
    return {at, bytes};
  }
  return {};
}

void Slabs::Return(absl::Span<std::byte> taken) {
  std::byte* at = taken.data();
  uint64_t bytes = AlignUp(taken.size());
  absl::MutexLock lock(&mutex_);
  const auto slab = std::find_if(slabs_.begin(), slabs_.end(), [&](const Slab& s) {
    const absl::Span<std::byte> memory = s.memory.bytes();
    return memory.data() <= at && at < memory.data() + memory.size();
  });
  std::map<std::byte*, uint64_t>& free = slab->free;
  auto next = free.lower_bound(at);
  if (next != free.end() && next->first == at + bytes) {
    bytes += next->second;
    next = free.erase(next);
  }
  if (next != free.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == at) {
      at = before->first;
      bytes += before->second;
    }
  }
  free[at] = bytes;
}

void Slabs::Shrink(uint64_t bytes) {
  std::vector<Slab> gone;  // without the lock: the system takes its time
  absl::MutexLock lock(&mutex_);
  for (auto slab = slabs_.end(); slab != slabs_.begin() && bytes_ > bytes;) {
    --slab;
    const uint64_t all = slab->memory.bytes().size();
    if (slab->free.size() != 1 || slab->free.begin()->second != all) continue;
    bytes_ -= all;
    gone.push_back(std::move(*slab));
    slab = slabs_.erase(slab);
  }
}

void Slabs::DiscardFree() {
  absl::MutexLock lock(&mutex_);
  for (Slab& slab : slabs_) {
    for (const auto& [at, bytes] : slab.free) slab.memory.Discard({at, bytes});
  }
}

uint64_t Slabs::bytes() const {
  absl::MutexLock lock(&mutex_);
  return bytes_;
}

}  // namespace ballast::storage
