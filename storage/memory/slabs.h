// Cuts many buffers out of few large mappings: page-locking a single buffer takes longer than filling the buffer, and
// the system limits the mappings of a process.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "ballast/storage/memory/arena.h"

namespace ballast::storage {

// Threads: any.
class Slabs {
 public:
  void Add(Arena slab);
  // As Add, then Take from this slab, before another caller can. REQUIRES: the slab has `bytes`.
  absl::Span<std::byte> AddAndTake(Arena slab, uint64_t bytes);
  // Memory in one piece, aligned to 4096; empty if no slab has so much. The content is undefined.
  absl::Span<std::byte> Take(uint64_t bytes);
  // `taken`: a span returned by Take.
  void Return(absl::Span<std::byte> taken);
  // Returns unused slabs to the system until no more than `bytes` are left.
  void Shrink(uint64_t bytes);
  // Gives the memory of all free places to the system; the places stay, and are zero at their next use. REQUIRES: slabs
  // that are not page-locked.
  void DiscardFree();
  uint64_t bytes() const;

 private:
  struct Slab {
    Arena memory;
    std::map<std::byte*, uint64_t> free;  // address -> bytes, neighbours joined
  };
  mutable absl::Mutex mutex_;
  std::vector<Slab> slabs_ ABSL_GUARDED_BY(mutex_);
  uint64_t bytes_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace ballast::storage
