// Room in a job's log or spill for slices on their way: reserved once, when a push is admitted, and kept until the
// slice's record is appended or the push has failed. So a slice whose bytes were received finds room.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>

namespace ballast::services {

// Threads: any, as for its leases.
class ReservedRoom {
 public:
  // Room for a slice. Gives it back when it ends, and may outlive the account.
  class Lease {
   public:
    Lease() = default;  // of nothing
    Lease(std::shared_ptr<std::atomic<uint64_t>> of, uint64_t bytes) : of_(std::move(of)), bytes_(bytes) {
      *of_ += bytes_;
    }
    Lease(Lease&& other) noexcept : of_(std::move(other.of_)), bytes_(std::exchange(other.bytes_, 0)) {}
    Lease& operator=(Lease&& other) noexcept {
      std::swap(of_, other.of_);
      std::swap(bytes_, other.bytes_);
      return *this;
    }
    ~Lease() {
      if (of_ != nullptr) *of_ -= bytes_;
    }
    uint64_t bytes() const { return bytes_; }

   private:
    std::shared_ptr<std::atomic<uint64_t>> of_;
    uint64_t bytes_ = 0;
  };

  Lease Take(uint64_t bytes) const { return {bytes_, bytes}; }
  // Of all leases.
  uint64_t bytes() const { return *bytes_; }

 private:
  const std::shared_ptr<std::atomic<uint64_t>> bytes_ = std::make_shared<std::atomic<uint64_t>>(0);
};

}  // namespace ballast::services
