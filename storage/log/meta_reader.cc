#include "ballast/storage/log/meta_reader.h"

#include <algorithm>
#include <utility>

#include "ballast/proto/base/status.h"

namespace ballast::storage {

absl::StatusOr<absl::Span<const std::byte>> MetaReader::Read(uint64_t offset, uint64_t bytes, uint64_t limit) {
  const uint64_t last = std::exchange(last_, offset);
  const bool there = offset >= at_ && offset + bytes <= at_ + held_;
  if (!there) {
    const bool close = held_ > 0 && offset > last && offset - last <= kCloseBytes;
    const uint64_t wanted = std::max(bytes, close ? kWindowBytes : 2 * kLogBlock);
    const uint64_t ahead = std::max(bytes, std::min(wanted, limit - std::min(limit, offset)));
    absl::Status filled = Fill(offset, ahead);
    // A block that nobody asked for may be what the disk cannot read.
    if (!filled.ok() && ahead > bytes) filled = Fill(offset, bytes);
    BALLAST_RETURN_IF_ERROR(filled);
  }
  return absl::Span<const std::byte>(window_.get() + (offset - at_), bytes);
}

absl::Status MetaReader::Fill(uint64_t offset, uint64_t bytes) {
  held_ = 0;
  if (bytes > window_bytes_) {
    window_ = MakeLogMemory(bytes);
    window_bytes_ = bytes;
  }
  BALLAST_RETURN_IF_ERROR(file_->Read(offset, {window_.get(), bytes}));
  at_ = offset;
  held_ = bytes;
  if (count_) count_(bytes);
  return absl::OkStatus();
}

absl::StatusOr<std::optional<ReadBatch>> ReadBatchOf(MetaReader* reader, const BatchHead& which, uint64_t limit) {
  absl::Status unreadable;
  for (uint64_t copy = 0; copy < 2; ++copy) {
    const uint64_t at = which.offset + copy * which.meta_bytes;
    const absl::StatusOr<absl::Span<const std::byte>> meta = reader->Read(at, which.meta_bytes, limit);
    if (!meta.ok()) {
      unreadable.Update(meta.status());
      continue;
    }
    ReadBatch batch;
    BatchHead& head = batch.head;
    if (!DecodeBatchHead(*meta, at, limit, &head) || head.meta_bytes != which.meta_bytes) continue;
    if (head.batch != which.batch || head.incarnation != which.incarnation || head.salt != which.salt) continue;
    if (DecodeMeta(*meta, &batch)) return batch;
  }
  BALLAST_RETURN_IF_ERROR(unreadable);
  return std::nullopt;
}

}  // namespace ballast::storage
