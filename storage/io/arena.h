// Large aligned memory, touched when it is made: first touches later would cost the data path a page fault each.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace ballast::storage {

// Zeroed, starts at a 2 MiB boundary, in huge pages where the kernel grants them, on all NUMA nodes in turn; exactly
// the bytes asked for (rounded to 4096) become resident. Owns the mapping, which a forked child does not get: a child
// may destroy its copy of an Arena, and do nothing else with it.
class Arena {
 public:
  // `pin`: page-locked for the GPU as well; where that is refused the memory is used pageable, and a line is logged.
  // RESOURCE_EXHAUSTED (BUDGET) if the system has no such memory.
  static absl::StatusOr<Arena> Map(uint64_t bytes, bool pin);
  Arena() = default;
  Arena(Arena&& other) noexcept;
  Arena& operator=(Arena&& other) noexcept;
  ~Arena();

  absl::Span<std::byte> bytes() const { return bytes_; }
  // Asks the system not to swap the memory out. False: a limit (ulimit -l) forbids it; the memory is used all the same.
  bool Lock();
  // Gives the system the memory of a part back, which must not be used any more. REQUIRES: aligned to 4096, not pinned.
  void Discard(absl::Span<std::byte> part);
  bool pinned() const { return pinned_; }

 private:
  void Release();
  absl::Span<std::byte> bytes_;
  pid_t owner_ = 0;  // the process that mapped it
  bool pinned_ = false;
  bool locked_ = false;
};

}  // namespace ballast::storage
