// Memory of parsed messages, from their bytes' arrival to the end of their calls: bounded over all callers.
#pragma once

#include <cstdint>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"

namespace ballast::services {

// Threads: any. Outlives its leases.
class ParseRoom {
 public:
  // A job's Open of 16 MiB takes five times its bytes at most; all that come at a time share this.
  static constexpr uint64_t kBytesMax = uint64_t{88} << 20;
  // Smaller ones need no room, so that no Opens keep steps and status out; calls are bounded elsewhere.
  static constexpr uint64_t kSmallBytesMax = uint64_t{64} << 10;

  class Lease {
   public:
    Lease() = default;
    Lease(ParseRoom* room, uint64_t bytes) : room_(room), bytes_(bytes) {}
    Lease(Lease&& other) noexcept : room_(std::exchange(other.room_, nullptr)), bytes_(other.bytes_) {}
    Lease& operator=(Lease&& other) noexcept {
      std::swap(room_, other.room_);
      std::swap(bytes_, other.bytes_);
      return *this;
    }
    ~Lease() {
      if (room_ != nullptr) room_->Return(bytes_);
    }

   private:
    ParseRoom* room_ = nullptr;
    uint64_t bytes_ = 0;
  };

  // UNAVAILABLE (BUSY) if a message of so many bytes on the wire cannot fit now.
  absl::Status CheckFree(uint64_t bytes);
  // RESOURCE_EXHAUSTED (BAD_REQUEST) for a message larger than the room, UNAVAILABLE (BUSY) while others take the room.
  absl::StatusOr<Lease> Take(uint64_t bytes);
  // True once after messages that are worth giving their memory back to the system.
  bool TakeReturned();

 private:
  absl::Status Busy(uint64_t bytes) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Return(uint64_t bytes);

  absl::Mutex mu_;
  uint64_t used_ ABSL_GUARDED_BY(mu_) = 0;
  bool returned_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace ballast::services
