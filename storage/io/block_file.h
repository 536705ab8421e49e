// A file read and written in aligned blocks, past the page cache where its file system allows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"

namespace ballast::storage {

// Alignment of offsets, sizes and addresses: the largest logical block of disks.
inline constexpr uint64_t kIoAlignment = 4096;

inline constexpr uint64_t AlignUp(uint64_t bytes) { return (bytes + kIoAlignment - 1) / kIoAlignment * kIoAlignment; }

// Turns errno of a file into a status, here and nowhere else: RESOURCE_EXHAUSTED (DISK_FULL) for a full disk or quota,
// RESOURCE_EXHAUSTED (IO) for a file longer than its file system allows, else INTERNAL (IO). The message names the
// file, offset and size (if `bytes` > 0) and the system's text.
absl::Status IoError(int error, absl::string_view verb, absl::string_view path, uint64_t offset, uint64_t bytes);

// Is it IoError's of a file that would become longer than its file system allows?
bool IsFileTooLong(const absl::Status& status);

// A file of a Disk. Threads: any. Transfers and ranges are aligned to kIoAlignment.
// Durability: written bytes are volatile until a Sync that began after the write is OK.
class BlockFile {
 public:
  virtual ~BlockFile() = default;
  BlockFile(const BlockFile&) = delete;
  BlockFile& operator=(const BlockFile&) = delete;

  const std::string& path() const { return path_; }
  // The system's descriptor; -1 for a simulated file, whose disk has queues of its own.
  virtual int fd() const = 0;
  // Empty if transfers bypass the page cache, else the reason why not.
  virtual const std::string& buffered_because() const = 0;
  virtual absl::StatusOr<uint64_t> Size() const = 0;

  // All of `buffer`, on the caller's thread. DATA_LOSS (IO) at the end of the file.
  virtual absl::Status Read(uint64_t offset, absl::Span<std::byte> buffer) const = 0;
  virtual absl::Status Write(uint64_t offset, absl::Span<const std::byte> buffer) const = 0;
  // fdatasync. After an error the content of the disk is unknown, so callers never retry.
  virtual absl::Status Sync() const = 0;

  // Makes sure that writes to [offset, offset + bytes) will find space. RESOURCE_EXHAUSTED (DISK_FULL).
  virtual absl::Status Reserve(uint64_t offset, uint64_t bytes) = 0;
  // Returns the space of a range to the file system; afterwards the range reads as zero. Best effort: some file systems
  // cannot.
  virtual void Discard(uint64_t offset, uint64_t bytes) = 0;
  virtual absl::Status Truncate(uint64_t bytes) = 0;

 protected:
  explicit BlockFile(std::string path) : path_(std::move(path)) {}

 private:
  const std::string path_;
};

// One file's fdatasync for several callers. Threads: any.
class SharedSync {
 public:
  // Borrows `file`.
  explicit SharedSync(const BlockFile* file) : file_(file) {}

  // Returns once an fdatasync that began after the call has ended. Only one runs at a time, because of two only one
  // would get the error; callers that wait for it share the next one. The system reports a lost write once, and the
  // write may be another caller's. So after an error every later call returns this error.
  absl::Status Sync() ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    const uint64_t next = begun_ + 1;
    const auto ready = [this, next]()
                           ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return ended_ >= next || begun_ == ended_; };
    mutex_.Await(absl::Condition(&ready));
    if (ended_ >= next || !failed_.ok()) return failed_;
    ++begun_;
    mutex_.Unlock();
    const absl::Status synced = file_->Sync();
    mutex_.Lock();
    ++ended_;
    failed_.Update(synced);
    return failed_;
  }

 private:
  const BlockFile* const file_;
  absl::Mutex mutex_;
  uint64_t begun_ ABSL_GUARDED_BY(mutex_) = 0;  // calls of the file's Sync
  uint64_t ended_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::Status failed_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ballast::storage
