// A file with unreadable bytes.
#pragma once

#include <cerrno>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "ballast/storage/io/block_file.h"

namespace ballast::storage {

// Reads that touch this range of a BadFile fail with EIO. The range is empty at first.
struct BadBlocks {
  uint64_t offset = 0, bytes = 0;

  bool Touch(uint64_t at, uint64_t count) const { return at < offset + bytes && offset < at + count; }
};

class BadFile : public BlockFile {
 public:
  // Borrows `bad`; the caller may change the range at any time.
  BadFile(std::unique_ptr<BlockFile> file, const BadBlocks* bad)
      : BlockFile(file->path()), file_(std::move(file)), bad_(*bad) {}
  int fd() const override { return file_->fd(); }
  const std::string& buffered_because() const override { return file_->buffered_because(); }
  absl::StatusOr<uint64_t> Size() const override { return file_->Size(); }
  absl::Status Read(uint64_t offset, absl::Span<std::byte> buffer) const override {
    if (bad_.Touch(offset, buffer.size())) return IoError(EIO, "read", path(), offset, buffer.size());
    return file_->Read(offset, buffer);
  }
  absl::Status Write(uint64_t offset, absl::Span<const std::byte> buffer) const override {
    return file_->Write(offset, buffer);
  }
  absl::Status Sync() const override { return file_->Sync(); }
  absl::Status Reserve(uint64_t offset, uint64_t bytes) override { return file_->Reserve(offset, bytes); }
  void Discard(uint64_t offset, uint64_t bytes) override { file_->Discard(offset, bytes); }
  absl::Status Truncate(uint64_t bytes) override { return file_->Truncate(bytes); }

 private:
  const std::unique_ptr<BlockFile> file_;
  const BadBlocks& bad_;
};

}  // namespace ballast::storage
