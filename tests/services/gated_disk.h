// This machine's disk with a gate in it: operations on chosen files wait until a test lets them go on, as if the disk
// hung.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "ballast/tests/services/machine_with_disk.h"

namespace ballast::services {

enum class GatedOperation { kRead, kWrite, kSync, kReserve };

class GatedDisk : public MachineWithDisk {
 public:
  using Choice = std::function<bool(const std::string& path, GatedOperation operation, uint64_t offset)>;

  // From now on the chosen operations wait.
  void Hold(Choice choice) ABSL_LOCKS_EXCLUDED(mu_) {
    absl::MutexLock lock(&mu_);
    choice_ = std::move(choice);
  }
  void Release() ABSL_LOCKS_EXCLUDED(mu_) {
    absl::MutexLock lock(&mu_);
    choice_ = nullptr;
  }
  // Blocks until so many operations wait.
  void AwaitWaiting(int count = 1) ABSL_LOCKS_EXCLUDED(mu_) {
    absl::MutexLock lock(&mu_);
    const auto enough = [&] {
      mu_.AssertHeld();
      return waiting_ >= count;
    };
    mu_.Await(absl::Condition(&enough));
  }
  void Pass(const std::string& path, GatedOperation operation, uint64_t offset) ABSL_LOCKS_EXCLUDED(mu_) {
    absl::MutexLock lock(&mu_);
    const auto open = [&] {
      mu_.AssertHeld();
      return choice_ == nullptr || !choice_(path, operation, offset);
    };
    if (!open()) {
      ++waiting_;
      mu_.Await(absl::Condition(&open));
      --waiting_;
    }
    ++passed_[{path, operation}];
  }
  // Operations that went through to the disk.
  int passed(const std::string& path, GatedOperation operation) const ABSL_LOCKS_EXCLUDED(mu_) {
    absl::MutexLock lock(&mu_);
    const auto found = passed_.find({path, operation});
    return found == passed_.end() ? 0 : found->second;
  }

 private:
  class File;
  class Queue;
  absl::StatusOr<std::unique_ptr<storage::BlockFile>> Open(const std::string& path, Mode mode) override;
  absl::StatusOr<std::unique_ptr<storage::IoQueue>> MakeQueue(const storage::IoQueueOptions& options) override;

  mutable absl::Mutex mu_;
  Choice choice_ ABSL_GUARDED_BY(mu_);
  int waiting_ ABSL_GUARDED_BY(mu_) = 0;
  std::map<std::pair<std::string, GatedOperation>, int> passed_ ABSL_GUARDED_BY(mu_);
};

class GatedDisk::File : public storage::BlockFile {
 public:
  File(std::unique_ptr<storage::BlockFile> file, GatedDisk* disk)
      : BlockFile(file->path()), file_(std::move(file)), disk_(disk) {}
  int fd() const override { return file_->fd(); }
  const std::string& buffered_because() const override { return file_->buffered_because(); }
  absl::StatusOr<uint64_t> Size() const override { return file_->Size(); }
  absl::Status Read(uint64_t offset, absl::Span<std::byte> buffer) const override {
    disk_->Pass(path(), GatedOperation::kRead, offset);
    return file_->Read(offset, buffer);
  }
  absl::Status Write(uint64_t offset, absl::Span<const std::byte> buffer) const override {
    disk_->Pass(path(), GatedOperation::kWrite, offset);
    return file_->Write(offset, buffer);
  }
  absl::Status Sync() const override {
    disk_->Pass(path(), GatedOperation::kSync, 0);
    return file_->Sync();
  }
  absl::Status Reserve(uint64_t offset, uint64_t bytes) override {
    disk_->Pass(path(), GatedOperation::kReserve, offset);
    return file_->Reserve(offset, bytes);
  }
  void Discard(uint64_t offset, uint64_t bytes) override { file_->Discard(offset, bytes); }
  absl::Status Truncate(uint64_t bytes) override { return file_->Truncate(bytes); }

 private:
  const std::unique_ptr<storage::BlockFile> file_;
  GatedDisk* const disk_;
};

// The thread that submits a request waits at the gate, as one that reaps would.
class GatedDisk::Queue : public storage::IoQueue {
 public:
  Queue(std::unique_ptr<storage::IoQueue> queue, GatedDisk* disk) : queue_(std::move(queue)), disk_(disk) {}
  absl::Status Submit(const storage::IoRequest& request) override {
    disk_->Pass(request.file->path(), OperationOf(request), request.offset);
    return queue_->Submit(request);
  }
  void Reap(bool wait, std::vector<storage::IoCompletion>* completions) override { queue_->Reap(wait, completions); }
  uint64_t in_flight() const override { return queue_->in_flight(); }
  const char* name() const override { return queue_->name(); }

 private:
  static GatedOperation OperationOf(const storage::IoRequest& request) {
    using Kind = storage::IoRequest::Kind;
    return request.kind == Kind::kRead    ? GatedOperation::kRead
           : request.kind == Kind::kWrite ? GatedOperation::kWrite
                                          : GatedOperation::kSync;
  }

  const std::unique_ptr<storage::IoQueue> queue_;
  GatedDisk* const disk_;
};

inline absl::StatusOr<std::unique_ptr<storage::BlockFile>> GatedDisk::Open(const std::string& path, Mode mode) {
  auto file = storage::SystemDisk()->Open(path, mode);
  if (!file.ok()) return file;
  return std::make_unique<File>(*std::move(file), this);
}

inline absl::StatusOr<std::unique_ptr<storage::IoQueue>> GatedDisk::MakeQueue(const storage::IoQueueOptions& options) {
  auto queue = storage::SystemDisk()->MakeQueue(options);
  if (!queue.ok()) return queue;
  return std::make_unique<Queue>(*std::move(queue), this);
}

}  // namespace ballast::services
