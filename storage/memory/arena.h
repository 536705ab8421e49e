// Large aligned memory. Making it touches all pages, because a first touch later would cost the data path a page fault.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <optional>

#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace ballast::storage {

// Zeroed memory that starts at a 2 MiB boundary, in huge pages if the kernel grants them, on all NUMA nodes in turn.
// Exactly the bytes asked for (rounded to 4096) become resident. Owns the mapping. A forked child does not get it, so a
// child may only destroy its copy of an Arena.
class Arena {
 public:
  // RESOURCE_EXHAUSTED (BUDGET) if the system refuses the memory, or another mapping of this process. kLater: pages
  // become resident with their first use, or in TouchBesideUse.
  enum class Touch { kNow, kLater };
  static absl::StatusOr<Arena> Map(uint64_t bytes, Touch touch = Touch::kNow);
  // Makes all pages resident and changes no content: other threads may use the memory meanwhile.
  void TouchBesideUse() const;
  Arena() = default;
  Arena(Arena&& other) noexcept;
  Arena& operator=(Arena&& other) noexcept;
  ~Arena();

  absl::Span<std::byte> bytes() const { return bytes_; }
  // Page-locks the memory for GPU `device`. After an error the memory is pageable and still usable. Errors:
  // PageLock's.
  absl::Status PageLockFor(int device);
  // Locks the memory against swapping. kLater: each page once it is resident. False: a limit (ulimit -l) forbids
  // locking; the memory is still usable.
  bool Lock(Touch touch = Touch::kNow);
  // Returns the memory of a part to the system, in whole pages of the system's; the part must not be used any more.
  // REQUIRES: aligned to 4096, not page-locked.
  void Discard(absl::Span<std::byte> part);
  bool page_locked() const { return page_locked_for_.has_value(); }

 private:
  void Release();
  absl::Span<std::byte> bytes_;
  pid_t owner_ = 0;                     // the process that mapped it
  std::optional<int> page_locked_for_;  // a GPU
  bool locked_ = false;
};

}  // namespace ballast::storage
