#include "ballast/storage/io/block_file.h"

#include <fcntl.h>
#include <linux/falloc.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "ballast/proto/model/status.h"
#include "ballast/storage/io/file_lock.h"
#include "ballast/storage/io/piece.h"

namespace ballast::storage {

absl::Status IoError(int error, absl::string_view verb, absl::string_view path, uint64_t offset, uint64_t bytes) {
  const bool full = error == ENOSPC || error == EDQUOT || error == EFBIG;
  const bool forbidden = error == EACCES || error == EPERM || error == EROFS || error == ENOENT || error == ENOTDIR;
  const std::string what =
      bytes == 0 ? std::string(path) : absl::StrCat(bytes, " bytes at offset ", offset, " of ", path);
  return model::Error(full ? absl::StatusCode::kResourceExhausted : absl::StatusCode::kInternal, model::kIo,
                      absl::StrCat(verb, " of ", what, " failed: ", std::strerror(error), " (errno ", error, ")",
                                   full        ? "; free space on that file system"
                                   : forbidden ? "; it must be a path that this user may write"
                                               : ""));
}

absl::StatusOr<std::unique_ptr<BlockFile>> BlockFile::Open(const std::string& path, Mode mode) {
  const int flags = O_RDWR | O_CLOEXEC | (mode == Mode::kExclusive ? O_CREAT : 0);
  const int fd = open(path.c_str(), flags, 0644);
  if (fd < 0) return IoError(errno, "open", path, 0, 0);
  auto file = std::unique_ptr<BlockFile>(new BlockFile(fd, path));
  if (mode == Mode::kExclusive) {
    BALLAST_RETURN_IF_ERROR(LockDescriptor(fd, path));
    BALLAST_RETURN_IF_ERROR(file->Truncate(0));
  }
  BALLAST_RETURN_IF_ERROR(file->ChooseCaching(mode));
  return file;
}

absl::Status BlockFile::ChooseCaching(Mode mode) {
  const int flags = fcntl(fd_, F_GETFL);
  if (fcntl(fd_, F_SETFL, flags | O_DIRECT) != 0) {
    buffered_because_ = absl::StrCat("O_DIRECT on ", path_, ": ", std::strerror(errno));
    return absl::OkStatus();
  }
  if (mode == Mode::kShared) return absl::OkStatus();
  // Some file systems accept the flag and then refuse the transfers.
  void* block = std::aligned_alloc(kIoAlignment, kIoAlignment);
  std::memset(block, 0, kIoAlignment);
  const ssize_t written = pwrite(fd_, block, kIoAlignment, 0);
  const int error = errno;
  std::free(block);
  if (written < 0 && error == EINVAL) {
    if (fcntl(fd_, F_SETFL, flags) != 0) return IoError(errno, "fcntl", path_, 0, 0);
    buffered_because_ = absl::StrCat("direct write to ", path_, ": ", std::strerror(error));
  } else if (written < 0) {
    return IoError(error, "write", path_, 0, kIoAlignment);
  }
  return Truncate(0);
}

BlockFile::~BlockFile() { close(fd_); }

absl::Status BlockFile::Read(uint64_t offset, absl::Span<std::byte> buffer) const {
  return Transfer(
      {.kind = IoRequest::Kind::kRead, .file = this, .offset = offset, .data = buffer.data(), .bytes = buffer.size()});
}

absl::Status BlockFile::Write(uint64_t offset, absl::Span<const std::byte> buffer) const {
  return Transfer({.kind = IoRequest::Kind::kWrite,
                   .file = this,
                   .offset = offset,
                   .data = const_cast<std::byte*>(buffer.data()),
                   .bytes = buffer.size()});
}

absl::Status BlockFile::Reserve(uint64_t offset, uint64_t bytes) {
  int error = EINTR;
  for (int tries = 0; error == EINTR && tries < kIoRetriesMax; ++tries) {
    error = posix_fallocate(fd_, static_cast<off_t>(offset), static_cast<off_t>(bytes));
  }
  return error == 0 ? absl::OkStatus() : IoError(error, "reservation", path_, offset, bytes);
}

void BlockFile::Discard(uint64_t offset, uint64_t bytes) {
  (void)fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
                  static_cast<off_t>(bytes));
}

absl::Status BlockFile::Truncate(uint64_t bytes) {
  if (ftruncate(fd_, static_cast<off_t>(bytes)) != 0) return IoError(errno, "truncation", path_, bytes, 0);
  return absl::OkStatus();
}

}  // namespace ballast::storage
