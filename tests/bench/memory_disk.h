// A disk in the process's memory, for rows that count the program's own work: each transfer takes place when it is
// submitted, and nothing survives the process. Blocks that were never written read as zeros.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "ballast/storage/io/disk.h"

namespace ballast::bench {

// Threads: any. Does not lock files; these do not outlive the disk.
class MemoryDisk : public storage::Disk {
 public:
  MemoryDisk();
  ~MemoryDisk() override;
  absl::StatusOr<std::unique_ptr<storage::BlockFile>> Open(const std::string& path, Mode mode) override;
  bool Exists(const std::string& path) const override;
  absl::Status Remove(const std::string& path) override;
  absl::StatusOr<std::unique_ptr<storage::IoQueue>> MakeQueue(const storage::IoQueueOptions& options) override;
  // Reads, writes and discards by all threads: bytes, and nanoseconds in copies and in the kernel's work for new
  // memory.
  struct Totals {
    std::atomic<uint64_t> nanoseconds{0}, bytes{0};
  };
  const Totals& totals() const { return totals_; }

 private:
  class Content;
  class File;
  class Queue;
  Totals totals_;
  mutable absl::Mutex mutex_;
  std::map<std::string, std::shared_ptr<Content>> files_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ballast::bench
