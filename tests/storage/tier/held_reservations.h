// A simulated disk whose reservations wait for a test, as those of a busy disk wait for its transfers.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "ballast/tests/sim_disk/sim_disk.h"

namespace ballast::storage {

class HeldReservations : public Disk {
 public:
  // Borrows `disk`.
  explicit HeldReservations(SimDisk* disk) : disk_(disk) {}

  // From now on reservations wait, beginning with the reservation after `passing` others.
  void Hold(int passing = 0) {
    absl::MutexLock lock(&mu_);
    held_ = true;
    passing_ = passing;
  }
  void Release() {
    absl::MutexLock lock(&mu_);
    held_ = false;
  }
  void AwaitWaiting(int count) {
    absl::MutexLock lock(&mu_);
    const auto enough = [&] {
      mu_.AssertHeld();
      return waiting_ >= count;
    };
    mu_.Await(absl::Condition(&enough));
  }

  // Called whenever blocks have gone back to the disk, before the tier's next call of the disk.
  void set_discarded(std::function<void()> discarded) { discarded_ = std::move(discarded); }

  absl::StatusOr<std::unique_ptr<BlockFile>> Open(const std::string& path, Mode mode) override {
    auto file = disk_->Open(path, mode);
    if (!file.ok()) return file.status();
    return std::make_unique<File>(*std::move(file), this);
  }
  bool Exists(const std::string& path) const override { return disk_->Exists(path); }
  absl::Status Remove(const std::string& path) override { return disk_->Remove(path); }
  absl::StatusOr<std::unique_ptr<IoQueue>> MakeQueue(const IoQueueOptions& options) override {
    return disk_->MakeQueue(options);
  }

 private:
  class File : public BlockFile {
   public:
    File(std::unique_ptr<BlockFile> file, HeldReservations* gate)
        : BlockFile(file->path()), file_(std::move(file)), gate_(gate) {}
    int fd() const override { return file_->fd(); }
    const std::string& buffered_because() const override { return file_->buffered_because(); }
    absl::StatusOr<uint64_t> Size() const override { return file_->Size(); }
    absl::Status Read(uint64_t offset, absl::Span<std::byte> buffer) const override {
      return file_->Read(offset, buffer);
    }
    absl::Status Write(uint64_t offset, absl::Span<const std::byte> buffer) const override {
      return file_->Write(offset, buffer);
    }
    absl::Status Sync() const override { return file_->Sync(); }
    absl::Status Reserve(uint64_t offset, uint64_t bytes) override {
      gate_->Pass();
      return file_->Reserve(offset, bytes);
    }
    void Discard(uint64_t offset, uint64_t bytes) override {
      file_->Discard(offset, bytes);
      if (gate_->discarded_) gate_->discarded_();
    }
    absl::Status Truncate(uint64_t bytes) override { return file_->Truncate(bytes); }

   private:
    const std::unique_ptr<BlockFile> file_;
    HeldReservations* const gate_;
  };

  void Pass() {
    absl::MutexLock lock(&mu_);
    if (held_ && passing_-- > 0) return;
    const auto open = [&] {
      mu_.AssertHeld();
      return !held_;
    };
    ++waiting_;
    mu_.Await(absl::Condition(&open));
    --waiting_;
  }

  SimDisk* const disk_;
  std::function<void()> discarded_;
  absl::Mutex mu_;
  bool held_ ABSL_GUARDED_BY(mu_) = false;
  int passing_ ABSL_GUARDED_BY(mu_) = 0;
  int waiting_ ABSL_GUARDED_BY(mu_) = 0;
};

}  // namespace ballast::storage
