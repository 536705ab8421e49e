#include "ballast/storage/log/scan_reader.h"

#include <algorithm>

#include "ballast/proto/base/status.h"

namespace ballast::storage {

absl::StatusOr<uint64_t> ScanReader::Begin() {
  BALLAST_ASSIGN_OR_RETURN(file_bytes_, file_.Size());
  return file_bytes_;
}

void ScanReader::Count(uint64_t bytes) {
  const uint64_t counted = std::min(bytes, file_bytes_ - read_bytes_);
  read_bytes_ += counted;
  if (told_ != nullptr) *told_ += counted;
}

absl::StatusOr<absl::Span<const std::byte>> ScanReader::Read(uint64_t offset, uint64_t bytes) {
  if (bytes > buffer_.bytes().size()) {
    BALLAST_ASSIGN_OR_RETURN(buffer_, Arena::Map(bytes));
  }
  const absl::Span<std::byte> to = buffer_.bytes().subspan(0, bytes);
  BALLAST_RETURN_IF_ERROR(file_.Read(offset, to));
  Count(bytes);
  return absl::Span<const std::byte>(to);
}

absl::StatusOr<absl::Span<const std::byte>> ScanReader::ReadCopy(uint64_t offset, uint64_t bytes, uint64_t limit) {
  absl::StatusOr<absl::Span<const std::byte>> read = metas_.Read(offset, bytes, limit);
  if (!absl::IsInternal(read.status())) return read;
  unreadable_.emplace(offset, read.status());
  return absl::Span<const std::byte>();
}

absl::StatusOr<std::optional<ReadBatch>> ScanReader::ReadBatchAt(uint64_t offset, uint64_t limit,
                                                                 const SegmentHead& segment) {
  if (limit - offset < kLogBlock) return std::nullopt;
  BALLAST_ASSIGN_OR_RETURN(auto meta, ReadCopy(offset, kLogBlock, limit));
  ReadBatch batch;
  if (meta.empty() || !DecodeBatchHead(meta, offset, limit, &batch.head)) return std::nullopt;
  if (batch.head.incarnation != segment.incarnation || batch.head.salt != segment.salt) return std::nullopt;
  const uint64_t bytes = batch.head.meta_bytes;
  if (bytes > kLogBlock) {
    BALLAST_ASSIGN_OR_RETURN(meta, ReadCopy(offset, bytes, limit));
  }
  if (meta.empty() || !DecodeMeta(meta, &batch)) return std::nullopt;
  return batch;
}

absl::Status ScanReader::UnreadFrom(uint64_t offset) const {
  const auto unread = unreadable_.lower_bound(offset);
  return unread == unreadable_.end() ? absl::OkStatus() : unread->second;
}

absl::Status ScanReader::UnreadAt(uint64_t offset) const {
  const auto unread = unreadable_.find(offset);
  return unread == unreadable_.end() ? absl::OkStatus() : unread->second;
}

}  // namespace ballast::storage
