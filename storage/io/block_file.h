// A file that is read and written in aligned blocks, past the page cache where its file system allows that.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace ballast::storage {

// Of offsets, sizes and addresses: the largest logical block that disks have.
inline constexpr uint64_t kIoAlignment = 4096;

inline constexpr uint64_t AlignUp(uint64_t bytes) { return (bytes + kIoAlignment - 1) / kIoAlignment * kIoAlignment; }

// The one place that turns errno of a file into a status: RESOURCE_EXHAUSTED (IO) for a full disk or quota, else
// INTERNAL (IO); names the file, offset and size (if `bytes` > 0) and the system's text.
absl::Status IoError(int error, absl::string_view verb, absl::string_view path, uint64_t offset, uint64_t bytes);

// Threads: any. Durability: volatile (no fsync): what is kept here does not outlive the process.
class BlockFile {
 public:
  enum class Mode {
    kExclusive,  // created if missing, locked against other openers, emptied. FAILED_PRECONDITION if another has it
    kShared,     // must exist; its content is left alone
  };
  static absl::StatusOr<std::unique_ptr<BlockFile>> Open(const std::string& path, Mode mode);
  ~BlockFile();
  BlockFile(const BlockFile&) = delete;
  BlockFile& operator=(const BlockFile&) = delete;

  int fd() const { return fd_; }
  const std::string& path() const { return path_; }
  // Empty if transfers bypass the page cache, else why they do not.
  const std::string& buffered_because() const { return buffered_because_; }

  // All of `buffer`, aligned, by pread / pwrite on the caller's thread.
  absl::Status Read(uint64_t offset, absl::Span<std::byte> buffer) const;
  absl::Status Write(uint64_t offset, absl::Span<const std::byte> buffer) const;

  // Makes sure that writes to [offset, offset + bytes) will find space. RESOURCE_EXHAUSTED (IO) if the disk is full.
  absl::Status Reserve(uint64_t offset, uint64_t bytes);
  // Gives the space of a range back, which reads as zero then; best effort: some file systems cannot.
  void Discard(uint64_t offset, uint64_t bytes);
  absl::Status Truncate(uint64_t bytes);

 private:
  BlockFile(int fd, std::string path) : fd_(fd), path_(std::move(path)) {}
  absl::Status ChooseCaching(Mode mode);

  int fd_;
  std::string path_;
  std::string buffered_because_;
};

}  // namespace ballast::storage
