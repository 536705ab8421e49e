// The files of this machine.
#include <fcntl.h>
#include <linux/falloc.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "ballast/proto/base/descriptor.h"
#include "ballast/proto/base/status.h"
#include "ballast/storage/io/block_file.h"
#include "ballast/storage/io/disk.h"
#include "ballast/storage/io/file_lock.h"
#include "ballast/storage/io/piece.h"

namespace ballast::storage {

absl::Status IoError(int error, absl::string_view verb, absl::string_view path, uint64_t offset, uint64_t bytes) {
  const bool full = error == ENOSPC || error == EDQUOT, too_long = error == EFBIG;
  const bool forbidden = error == EACCES || error == EPERM || error == EROFS || error == ENOENT || error == ENOTDIR;
  const std::string what =
      bytes == 0 ? std::string(path) : absl::StrCat(bytes, " bytes at offset ", offset, " of ", path);
  const char* const fix =
      full ? "; free space on that file system"
      : too_long
          ? "; the file system, or a limit of this process (ulimit -f, LimitFSIZE), does not allow a file of this size"
      : forbidden ? "; it must be a path that this user may write"
                  : "";
  return model::Error(full || too_long ? absl::StatusCode::kResourceExhausted : absl::StatusCode::kInternal,
                      full ? model::kDiskFull : model::kIo,
                      absl::StrCat(verb, " of ", what, " failed: ", std::strerror(error), " (errno ", error, ")", fix));
}

bool IsFileTooLong(const absl::Status& status) {
  return absl::IsResourceExhausted(status) && model::ReasonOf(status) == model::kIo;
}

bool Disk::Exists(const std::string& path) const {
  std::error_code error;
  return std::filesystem::exists(path, error);
}

namespace {

class SystemFile : public BlockFile {
 public:
  SystemFile(int fd, std::string path) : BlockFile(std::move(path)), fd_(fd) {}
  int fd() const override { return fd_.get(); }
  const std::string& buffered_because() const override { return buffered_because_; }
  absl::Status ChooseCaching(bool may_write_first_block);

  absl::StatusOr<uint64_t> Size() const override {
    struct stat info;
    if (fstat(fd(), &info) != 0) return IoError(errno, "stat", path(), 0, 0);
    return static_cast<uint64_t>(info.st_size);
  }

  absl::Status Read(uint64_t offset, absl::Span<std::byte> buffer) const override {
    return Transfer({.kind = IoRequest::Kind::kRead,
                     .file = this,
                     .offset = offset,
                     .data = buffer.data(),
                     .bytes = buffer.size()});
  }

  absl::Status Write(uint64_t offset, absl::Span<const std::byte> buffer) const override {
    return Transfer({.kind = IoRequest::Kind::kWrite,
                     .file = this,
                     .offset = offset,
                     .data = const_cast<std::byte*>(buffer.data()),
                     .bytes = buffer.size()});
  }

  absl::Status Sync() const override { return Transfer({.kind = IoRequest::Kind::kSync, .file = this}); }

  absl::Status Reserve(uint64_t offset, uint64_t bytes) override {
    int error = EINTR;
    for (int tries = 0; error == EINTR && tries < kIoRetriesMax; ++tries) {
      error = posix_fallocate(fd(), static_cast<off_t>(offset), static_cast<off_t>(bytes));
    }
    return error == 0 ? absl::OkStatus() : IoError(error, "reservation", path(), offset, bytes);
  }

  void Discard(uint64_t offset, uint64_t bytes) override {
    (void)fallocate(fd(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
                    static_cast<off_t>(bytes));
  }

  absl::Status Truncate(uint64_t bytes) override {
    if (ftruncate(fd(), static_cast<off_t>(bytes)) != 0) return IoError(errno, "truncation", path(), bytes, 0);
    return absl::OkStatus();
  }

 private:
  const model::Descriptor fd_;
  std::string buffered_because_;
};

// Some file systems accept the flag and then refuse the transfers: one block is moved to see.
absl::Status SystemFile::ChooseCaching(bool may_write_first_block) {
  const int flags = fcntl(fd(), F_GETFL);
  if (fcntl(fd(), F_SETFL, flags | O_DIRECT) != 0) {
    buffered_because_ = absl::StrCat("O_DIRECT on ", path(), ": ", std::strerror(errno));
    return absl::OkStatus();
  }
  void* block = std::aligned_alloc(kIoAlignment, kIoAlignment);
  std::memset(block, 0, kIoAlignment);
  const ssize_t moved =
      may_write_first_block ? pwrite(fd(), block, kIoAlignment, 0) : pread(fd(), block, kIoAlignment, 0);
  const int error = errno;
  std::free(block);
  if (moved < 0 && error == EINVAL) {
    if (fcntl(fd(), F_SETFL, flags) != 0) return IoError(errno, "fcntl", path(), 0, 0);
    buffered_because_ = absl::StrCat("direct transfer of ", path(), ": ", std::strerror(error));
  } else if (moved < 0 && may_write_first_block) {
    return IoError(error, "write", path(), 0, kIoAlignment);
  }
  return may_write_first_block ? Truncate(0) : absl::OkStatus();
}

std::string DirectoryOf(const std::string& path) {
  const std::string directory = std::filesystem::path(path).parent_path();
  return directory.empty() ? "." : directory;
}

absl::Status SyncDirectory(const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return IoError(errno, "open", path, 0, 0);
  const int result = fsync(fd);
  const int error = errno;
  close(fd);
  return result == 0 ? absl::OkStatus() : IoError(error, "sync", path, 0, 0);
}

// The opener of a server's file holds the lock of the data directory, so no living process has the file. The transfers
// of a dead process end within milliseconds; seconds allow for a busy disk.
constexpr absl::Duration kLockWait = absl::Seconds(5);

class SystemDiskImpl : public Disk {
 public:
  absl::StatusOr<std::unique_ptr<BlockFile>> Open(const std::string& path, Mode mode) override {
    const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC | (mode == Mode::kShared ? 0 : O_CREAT), 0644);
    if (fd < 0) return IoError(errno, "open", path, 0, 0);
    auto file = std::make_unique<SystemFile>(fd, path);
    if (mode != Mode::kShared) {
      BALLAST_RETURN_IF_ERROR(LockDescriptor(fd, path, kLockWait));
      BALLAST_RETURN_IF_ERROR(SyncDirectory(DirectoryOf(path)));
    }
    if (mode == Mode::kEmptied) BALLAST_RETURN_IF_ERROR(file->Truncate(0));
    BALLAST_ASSIGN_OR_RETURN(const uint64_t bytes, file->Size());
    BALLAST_RETURN_IF_ERROR(file->ChooseCaching(mode != Mode::kShared && bytes == 0));
    return std::unique_ptr<BlockFile>(std::move(file));
  }

  absl::Status Remove(const std::string& path) override {
    if (unlink(path.c_str()) != 0 && errno != ENOENT) return IoError(errno, "removal", path, 0, 0);
    return SyncDirectory(DirectoryOf(path));
  }

  absl::StatusOr<std::unique_ptr<IoQueue>> MakeQueue(const IoQueueOptions& options) override {
    return MakeIoQueue(options);
  }
};

}  // namespace

Disk* SystemDisk() {
  static Disk* const disk = new SystemDiskImpl;
  return disk;
}

}  // namespace ballast::storage
