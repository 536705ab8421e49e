#include "ballast/tests/bench/disk_alone.h"

#include <algorithm>

#include "ballast/proto/base/status.h"

namespace ballast::bench {
namespace {

using storage::IoRequest;

constexpr uint64_t kDepth = 8;
constexpr uint64_t kBlockBytes = storage::kIoPieceBytesMax;

}  // namespace

absl::StatusOr<DiskAlone> DiskAlone::Make() {
  DiskAlone alone;
  BALLAST_ASSIGN_OR_RETURN(alone.buffers_, storage::Arena::Map(kDepth * kBlockBytes));
  BALLAST_ASSIGN_OR_RETURN(alone.queue_, storage::MakeIoQueue({.registered = alone.buffers_.bytes()}));
  return alone;
}

absl::Status DiskAlone::Transfer(IoRequest::Kind kind, absl::Span<const FileExtent> extents) {
  size_t extent = 0;
  uint64_t at = 0;
  // The next block, if there is one, through the buffer that the tag names.
  const auto submit = [&](uint64_t buffer) {
    while (extent < extents.size() && at == extents[extent].bytes) {
      ++extent;
      at = 0;
    }
    if (extent == extents.size()) return absl::OkStatus();
    const uint64_t bytes = std::min(kBlockBytes, extents[extent].bytes - at);
    const IoRequest request = {.kind = kind,
                               .file = extents[extent].file,
                               .offset = extents[extent].offset + at,
                               .buffer = buffers_.bytes().subspan(buffer * kBlockBytes, bytes),
                               .tag = buffer};
    at += bytes;
    return queue_->Submit(request);
  };
  for (uint64_t i = 0; i < kDepth; ++i) BALLAST_RETURN_IF_ERROR(submit(i));
  std::vector<storage::IoCompletion> completions;
  while (queue_->in_flight() > 0) {
    completions.clear();
    queue_->Reap(/*wait=*/true, &completions);
    for (const storage::IoCompletion& completion : completions) {
      BALLAST_RETURN_IF_ERROR(completion.status);
      BALLAST_RETURN_IF_ERROR(submit(completion.tag));
    }
  }
  return absl::OkStatus();
}

absl::Status DiskAlone::WriteAndSync(const storage::BlockFile& file, uint64_t bytes) {
  const FileExtent all = {&file, 0, bytes};
  BALLAST_RETURN_IF_ERROR(Transfer(IoRequest::Kind::kWrite, {&all, 1}));
  return file.Sync();
}

}  // namespace ballast::bench
