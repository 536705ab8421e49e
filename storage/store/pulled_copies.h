// Working parameters of chunks that have no working copy: made when a pull asks, served to all pulls of the same chunk.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"

namespace ballast::storage {

// A digest covers the whole master of a chunk, and each rank pulls a part of the chunk: without slots each part would
// read the whole master again. A slot keeps its copy until another chunk needs the slot, the longest unused slot first.
// Threads: any.
class PulledCopies {
 public:
  // Cuts `memory` into slots, once, before any Read. Borrows `memory`.
  void Take(absl::Span<std::byte> memory, uint64_t slot_bytes);
  // Gives `memory` back; Take may be called again. REQUIRES: no Read is under way.
  void Release();
  uint64_t slot_bytes() const { return slot_bytes_; }  // 0 before Take

  // Makes the whole copy.
  using Fill = absl::FunctionRef<absl::Status(absl::Span<std::byte> copy)>;
  // Copies bytes [at, at + to.size()) of the chunk's copy into `to`. `version` differs between states of a chunk.
  // `fill` is called where no slot has this copy of `bytes`; its error is the answer, and no slot keeps anything then.
  // Waits while another call fills, and for a slot where all are in use.
  // REQUIRES: bytes <= slot_bytes().
  absl::Status Read(uint64_t chunk, uint64_t version, uint64_t bytes, uint64_t at, absl::Span<std::byte> to, Fill fill)
      ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  enum class Holds { kNothing, kPartOfCopy, kCopy };
  struct Slot {
    std::byte* memory = nullptr;
    Holds holds = Holds::kNothing;
    uint64_t chunk = 0;
    uint64_t version = 0;
    int users = 0;  // calls that fill the slot or copy from it: it keeps its chunk until they end
    uint64_t last_used = 0;
  };
  // The slot of this copy, ready or being filled; null if there is none.
  Slot* Find(uint64_t chunk, uint64_t version) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The longest unused slot that no call uses; null if there is none.
  Slot* Unused() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  std::atomic<uint64_t> slot_bytes_{0};
  absl::Mutex mutex_;
  std::vector<Slot> slots_ ABSL_GUARDED_BY(mutex_);
  uint64_t uses_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace ballast::storage
