// The inside of a simulated disk: its files and its queues.
#pragma once

#include <string>
#include <vector>

#include "ballast/storage/io/piece.h"
#include "ballast/tests/sim_disk/sim_disk.h"

namespace ballast::storage {

class SimDisk::File : public BlockFile {
 public:
  File(SimDisk* disk, Target target, bool holds_lock)
      : BlockFile(target.path), disk_(disk), target_(std::move(target)), holds_lock_(holds_lock) {}
  ~File() override ABSL_LOCKS_EXCLUDED(disk_->mutex_);

  const SimDisk* disk() const { return disk_; }
  const Target& target() const { return target_; }
  int fd() const override { return -1; }
  const std::string& buffered_because() const override { return buffered_because_; }
  absl::StatusOr<uint64_t> Size() const override ABSL_LOCKS_EXCLUDED(disk_->mutex_);
  absl::Status Read(uint64_t offset, absl::Span<std::byte> buffer) const override ABSL_LOCKS_EXCLUDED(disk_->mutex_);
  absl::Status Write(uint64_t offset, absl::Span<const std::byte> buffer) const override
      ABSL_LOCKS_EXCLUDED(disk_->mutex_);
  absl::Status Sync() const override ABSL_LOCKS_EXCLUDED(disk_->mutex_);
  absl::Status Reserve(uint64_t offset, uint64_t bytes) override ABSL_LOCKS_EXCLUDED(disk_->mutex_);
  void Discard(uint64_t offset, uint64_t bytes) override ABSL_LOCKS_EXCLUDED(disk_->mutex_);
  absl::Status Truncate(uint64_t bytes) override ABSL_LOCKS_EXCLUDED(disk_->mutex_);

 private:
  SimDisk* const disk_;
  const Target target_;
  const bool holds_lock_;
  const std::string buffered_because_;
};

class SimDisk::Queue : public IoQueue {
 public:
  explicit Queue(SimDisk* disk) ABSL_LOCKS_EXCLUDED(disk->mutex_);
  ~Queue() override ABSL_LOCKS_EXCLUDED(disk_->mutex_);
  absl::Status Submit(const IoRequest& request) override ABSL_LOCKS_EXCLUDED(disk_->mutex_);
  void Reap(bool wait, std::vector<IoCompletion>* completions) override ABSL_LOCKS_EXCLUDED(disk_->mutex_);
  uint64_t in_flight() const override ABSL_LOCKS_EXCLUDED(disk_->mutex_);
  const char* name() const override { return "sim"; }

  // Performs some of the requests in flight on live handles, and ends all with an error. REQUIRES: the disk's lock.
  void LosePower();

 private:
  struct InFlight {
    IoRequest request;
    Target target;
    uint64_t sequence = 0;  // last write before submission: a sync covers no later write
    std::vector<Piece> pieces;
  };
  void PerformOne() ABSL_EXCLUSIVE_LOCKS_REQUIRED(disk_->mutex_);
  void End(const InFlight& ended, const absl::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(disk_->mutex_);

  SimDisk* const disk_;
  // Shares the checks and counts of the real queues. Cuts all pieces at once, because this queue chooses their order.
  RequestTable table_ ABSL_GUARDED_BY(disk_->mutex_);
  std::vector<InFlight> unperformed_ ABSL_GUARDED_BY(disk_->mutex_);
};

}  // namespace ballast::storage
