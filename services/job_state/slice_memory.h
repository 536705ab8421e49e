// Memory for the bytes of slices between their arrival and the update that uses them up.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "ballast/proto/base/lent_memory.h"
#include "ballast/storage/memory/arena.h"
#include "ballast/storage/memory/slabs.h"
#include "ballast/storage/tier/tiers.h"

namespace ballast::services {

// DRAM for a job's slices. The reserved bytes are always available; further bytes are taken from the tier while they
// are needed. Large buffers are cut out of few large slabs, which the reservation consists of: a process may have some
// 65,000 mappings, which one mapping per buffer of 2 MiB would use up at 128 GiB. Beside a GPU the slabs are
// page-locked, and all buffers lie in slabs: a GPU copies from and to other memory at half the speed. Threads: any.
class SliceMemory {
 public:
  // Borrows `tiers`. The destructor returns the reservation.
  explicit SliceMemory(storage::Tiers* tiers, std::shared_ptr<storage::Account> account = nullptr)
      : tiers_(tiers), account_(std::move(account)) {}
  ~SliceMemory();

  // RESOURCE_EXHAUSTED (BUDGET).
  absl::Status Reserve(uint64_t bytes);
  void Unreserve(uint64_t bytes);
  uint64_t reserved_bytes() const;
  // Are so many bytes of the reservation free?
  bool Fits(uint64_t bytes) const;

  // Uninitialised memory, aligned to 4096 bytes so that the log can write straight from it. A buffer of 2 MiB or more
  // lies in huge pages, which make such writes cheap. Returns its bytes when destroyed.
  class Buffer {
   public:
    // `cut`: from the slabs, or empty. `pages`: empty, or of `bytes` bytes.
    Buffer(std::shared_ptr<SliceMemory> memory, uint64_t bytes, absl::Span<std::byte> cut, storage::Arena pages);
    // The trainer's memory, of which no SliceMemory has anything. Nobody writes to it, and it has any alignment.
    Buffer(absl::Span<const std::byte> bytes, std::shared_ptr<model::LentGradients> lent);
    ~Buffer();
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    std::byte* data() const { return data_; }
    uint64_t bytes() const { return bytes_; }
    // Null for the server's own memory.
    model::LentGradients* lent() const { return lent_.get(); }
    // Of lent bytes as they came: set before the buffer is held.
    uint32_t crc32c() const { return crc32c_; }
    void SetCrc32c(uint32_t crc32c) { crc32c_ = crc32c; }

   private:
    std::shared_ptr<SliceMemory> memory_;
    uint64_t bytes_;
    absl::Span<std::byte> cut_;
    storage::Arena pages_;
    const std::shared_ptr<model::LentGradients> lent_;
    uint32_t crc32c_ = 0;
    std::byte* data_;
  };
  static absl::StatusOr<std::shared_ptr<Buffer>> Allocate(const std::shared_ptr<SliceMemory>& memory, uint64_t bytes);

 private:
  absl::Status Acquire(uint64_t bytes);
  void Release(uint64_t bytes, bool apart);
  // From the slabs, of which one more is mapped if the reservation allows that. Empty: the buffer lies apart from
  // slabs.
  absl::StatusOr<absl::Span<std::byte>> Cut(uint64_t bytes);
  // Memory for a buffer outside of the slabs, whose free memory goes back to the system if both together were too much.
  absl::StatusOr<storage::Arena> MapApart(uint64_t bytes);

  storage::Tiers* const tiers_;
  const std::shared_ptr<storage::Account> account_;  // whose the reservation is
  storage::Slabs slabs_;                             // at most the reservation; beside a GPU: all of it, from the start
  absl::Mutex growing_;                              // held while a slab is mapped
  mutable absl::Mutex mu_;
  uint64_t reserved_bytes_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t used_bytes_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t extra_bytes_ ABSL_GUARDED_BY(mu_) = 0;  // taken beyond the reservation
  uint64_t apart_bytes_ ABSL_GUARDED_BY(mu_) = 0;  // of the used ones, in buffers outside of slabs
};

}  // namespace ballast::services
