#include "ballast/storage/chunk_reader.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "ballast/proto/model/status.h"

namespace ballast::storage {
namespace {

constexpr uint64_t kBlockElements = 4096;
constexpr const char* kArrayNames[kStateArrays] = {"master", "moment1", "moment2"};

void ReadZeros(uint64_t count, ChunkReader::Sink sink) {
  static constexpr float kZeros[kBlockElements] = {};
  for (uint64_t at = 0; at < count; at += kBlockElements) {
    sink(at, absl::MakeConstSpan(kZeros, std::min(kBlockElements, count - at)));
  }
}

}  // namespace

ArrayDigests DigestState(const std::byte* state, uint64_t elements) {
  const uint64_t bytes = ArrayBytes(elements);
  ArrayDigests digests;
  for (uint64_t i = 0; i < kStateArrays; ++i) digests[i] = kernels::Crc32c({state + i * bytes, bytes});
  return digests;
}

absl::Status ChecksumError(const BlockFile& file, uint64_t chunk, int array, uint64_t offset, uint32_t expected,
                           uint32_t found) {
  return model::Error(
      absl::StatusCode::kDataLoss, model::kChecksum,
      absl::StrFormat(
          "chunk %d: %s in %s at offset %d has CRC32C %08x, expected %08x: the disk did not return what was "
          "written; nothing of it is used. Check the disk, then start the job from its newest copy",
          chunk, kArrayNames[array], file.path(), offset, found, expected));
}

absl::Status ChunkReader::Prepare() {
  absl::MutexLock lock(&mutex_);
  if (!staging_.bytes().empty()) return absl::OkStatus();
  BALLAST_ASSIGN_OR_RETURN(staging_, tiers_->dram()->Allocate(kStagingBytes, "the buffer for reads of nvme state"));
  return absl::OkStatus();
}

absl::Status ChunkReader::Read(const StoredChunk& chunk, StateArray array, uint64_t begin, uint64_t count, Sink sink) {
  if (chunk.updated_in == 0) {
    ReadZeros(count, sink);
    return absl::OkStatus();
  }
  switch (chunk.placement.state) {
    case TierKind::kHbm:
      return ReadDevice(StateView{chunk.state, chunk.elements}.array(array) + begin, count, sink);
    case TierKind::kDram:
      sink(0, {StateView{chunk.state, chunk.elements}.array(array) + begin, count});
      tiers_->CountTraffic(TierKind::kDram, count * sizeof(float), 0);
      return absl::OkStatus();
    case TierKind::kNvme:
      break;
  }
  if (chunk.staged != nullptr) {
    sink(0, {StateView{chunk.staged, chunk.elements}.array(array) + begin, count});
    tiers_->CountTraffic(TierKind::kDram, count * sizeof(float), 0);
    return absl::OkStatus();
  }
  return ReadExtent(chunk.index, chunk.elements, chunk.extent, chunk.digests, array, begin, count, sink);
}

absl::Status ChunkReader::ReadCopy(const StoredChunk& chunk, const PinnedCopy& copy, StateArray array, uint64_t begin,
                                   uint64_t count, Sink sink) {
  if (copy.zero) {
    ReadZeros(count, sink);
    return absl::OkStatus();
  }
  if (copy.extent.bytes() > 0) {
    return ReadExtent(chunk.index, chunk.elements, copy.extent, copy.digests, array, begin, count, sink);
  }
  sink(0, {StateView{copy.dram.bytes().data(), chunk.elements}.array(array) + begin, count});
  tiers_->CountTraffic(TierKind::kDram, count * sizeof(float), 0);
  return absl::OkStatus();
}

absl::Status ChunkReader::ReadExtent(uint64_t chunk, uint64_t elements, const NvmeExtent& extent,
                                     const ArrayDigests& digests, StateArray array, uint64_t begin, uint64_t count,
                                     Sink sink) {
  const BlockFile& file = tiers_->nvme()->file();
  const uint64_t bytes = ArrayBytes(elements);
  const int which = static_cast<int>(array);
  const uint64_t offset = extent.offset() + which * bytes;
  absl::MutexLock lock(&mutex_);
  uint32_t digest = 0;
  for (uint64_t at = 0; at < bytes; at += kStagingBytes) {
    const absl::Span<std::byte> piece = staging_.bytes().subspan(0, std::min(kStagingBytes, bytes - at));
    BALLAST_RETURN_IF_ERROR(file.Read(offset + at, piece));
    digest = kernels::Crc32c(piece, digest);
    const uint64_t first = at / sizeof(float);
    const uint64_t from = std::max(first, begin);
    const uint64_t to = std::min(first + piece.size() / sizeof(float), begin + count);
    if (from < to) sink(from - begin, {reinterpret_cast<const float*>(piece.data()) + (from - first), to - from});
  }
  tiers_->CountTraffic(TierKind::kNvme, bytes, 0);
  if (digest == digests[which]) return absl::OkStatus();
  return ChecksumError(file, chunk, which, offset, digests[which], digest);
}

absl::Status ChunkReader::ReadDevice(const float* from, uint64_t count, Sink sink) {
  float block[kBlockElements];
  for (uint64_t at = 0; at < count; at += kBlockElements) {
    const auto values = absl::MakeSpan(block, std::min(kBlockElements, count - at));
    BALLAST_RETURN_IF_ERROR(
        tiers_->hbm()->CopyOut(reinterpret_cast<const std::byte*>(from + at),
                               {reinterpret_cast<std::byte*>(block), values.size() * sizeof(float)}));
    sink(at, values);
  }
  tiers_->CountTraffic(TierKind::kHbm, count * sizeof(float), 0);
  return absl::OkStatus();
}

absl::StatusOr<ArrayDigests> ChunkReader::Spill(const std::byte* device, uint64_t elements, const NvmeExtent& to) {
  const uint64_t bytes = ArrayBytes(elements);
  absl::MutexLock lock(&mutex_);
  ArrayDigests digests = {};
  for (uint64_t i = 0; i < kStateArrays; ++i) {
    for (uint64_t at = 0; at < bytes; at += kStagingBytes) {
      const absl::Span<std::byte> piece = staging_.bytes().subspan(0, std::min(kStagingBytes, bytes - at));
      BALLAST_RETURN_IF_ERROR(tiers_->hbm()->CopyOut(device + i * bytes + at, piece));
      digests[i] = kernels::Crc32c(piece, digests[i]);
      BALLAST_RETURN_IF_ERROR(tiers_->nvme()->file().Write(to.offset() + i * bytes + at, piece));
    }
  }
  tiers_->CountTraffic(TierKind::kHbm, StateBytes(elements), 0);
  tiers_->CountTraffic(TierKind::kNvme, 0, StateBytes(elements));
  return digests;
}

}  // namespace ballast::storage
