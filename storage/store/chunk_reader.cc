#include "ballast/storage/store/chunk_reader.h"

#include <algorithm>
#include <cstring>
#include <optional>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "ballast/kernels/kernels.h"
#include "ballast/proto/base/status.h"
#include "ballast/storage/io/disk_counters.h"
#include "ballast/storage/memory/arena.h"
#include "ballast/storage/store/remainder.h"

namespace ballast::storage {
namespace {

constexpr uint64_t kZeroPieceBytes = 16384;
constexpr uint64_t kJoinedElements = 4096;
constexpr const char* kArrayNames[kStateArraysMax] = {"master", "moment1", "moment2", "moment3"};

void ReadZeros(uint64_t count, ChunkReader::Sink sink) {
  static constexpr std::byte kZeros[kZeroPieceBytes] = {};
  for (uint64_t at = 0; at < count; at += kZeroPieceBytes) {
    sink(at, absl::MakeConstSpan(kZeros, std::min(kZeroPieceBytes, count - at)));
  }
}

}  // namespace

absl::Status CompareDigest(const WrittenState& written, const StoredChunk& chunk, const StateLayout& layout,
                           StateArray array, uint32_t found) {
  const uint32_t expected = written.digests[static_cast<size_t>(array)];
  if (found == expected) return absl::OkStatus();
  ++ProcessDiskCounters().wrong_extents;
  return model::Error(
      absl::StatusCode::kDataLoss, model::kChecksum,
      absl::StrFormat(
          "chunk %d: %s in %s at offset %d has CRC32C %08x, expected %08x: the disk did not return what was "
          "written, and Ballast does not use it. Check the disk, then start the job from its newest copy",
          chunk.index, kArrayNames[static_cast<int>(array)], written.file->path(),
          written.offset + layout.ArrayAt(array, chunk.elements), found, expected));
}

absl::Status CompareDigests(const WrittenState& written, const StoredChunk& chunk, const ArrayDigests& found) {
  for (size_t i = 0; i < kStateArraysMax; ++i) {
    BALLAST_RETURN_IF_ERROR(CompareDigest(written, chunk, chunk.layout, static_cast<StateArray>(i), found[i]));
  }
  return absl::OkStatus();
}

absl::Status ChunkReader::Prepare(DramTier::Limit limit) {
  if (prepared()) return absl::OkStatus();
  absl::MutexLock lock(&mutex_);
  BALLAST_ASSIGN_OR_RETURN(staging_, tiers_->dram()->Allocate(kStagingBytes, "the buffer for reads of nvme state",
                                                              limit, TierPart::kStaging));
  staging_.Charge(account_);
  buffers_.push_back(staging_.bytes().data());
  prepared_ = true;
  return absl::OkStatus();
}

void ChunkReader::Release() {
  absl::MutexLock lock(&mutex_);
  buffers_.clear();
  staging_ = DramBlock();
  prepared_ = false;
}

void ChunkReader::AddBuffers(absl::Span<std::byte> memory) {
  absl::MutexLock lock(&mutex_);
  for (uint64_t at = 0; at + kStagingBytes <= memory.size(); at += kStagingBytes) buffers_.push_back(&memory[at]);
}

class ChunkReader::Buffer {
 public:
  explicit Buffer(ChunkReader* reader) : reader_(reader) {
    absl::MutexLock lock(&reader_->mutex_);
    const auto any = [this]() ABSL_NO_THREAD_SAFETY_ANALYSIS { return !reader_->buffers_.empty(); };
    reader_->mutex_.Await(absl::Condition(&any));
    memory_ = reader_->buffers_.back();
    reader_->buffers_.pop_back();
  }
  ~Buffer() {
    absl::MutexLock lock(&reader_->mutex_);
    reader_->buffers_.push_back(memory_);
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  // The first bytes of the buffer.
  absl::Span<std::byte> bytes(uint64_t count) const { return {memory_, std::min(count, kStagingBytes)}; }

 private:
  ChunkReader* const reader_;
  std::byte* memory_ = nullptr;
};

absl::Status ChunkReader::Read(const StoredChunk& chunk, StateArray array, uint64_t begin, uint64_t count, Sink sink) {
  return array == StateArray::kMaster && chunk.layout.keeps_remainder() ? ReadJoined(chunk, begin, count, sink)
                                                                        : ReadStored(chunk, array, begin, count, sink);
}

absl::Status ChunkReader::ReadJoined(const StoredChunk& chunk, uint64_t begin, uint64_t count, Sink sink) {
  std::vector<std::byte> remainder(chunk.layout.UsedBytes(StateArray::kMaster, chunk.elements));
  BALLAST_RETURN_IF_ERROR(
      ReadStored(chunk, StateArray::kMaster, 0, remainder.size(), [&](uint64_t at, absl::Span<const std::byte> bytes) {
        std::memcpy(remainder.data() + at, bytes.data(), bytes.size());
      }));
  // No update comes between: it would wait for `reading`.
  absl::ReaderMutexLock lock(&chunk.mutex);
  tiers_->CountTraffic(TierKind::kDram, count / 2, 0);
  float master[kJoinedElements];
  for (uint64_t at = 0; at < count; at += sizeof(master)) {
    const uint64_t bytes = std::min<uint64_t>(count - at, sizeof(master));
    const absl::Span<float> piece(master, bytes / sizeof(float));
    JoinMaster(chunk.View(remainder.data()), chunk.memory.working(), (begin + at) / sizeof(float), piece);
    sink(at, {reinterpret_cast<const std::byte*>(master), bytes});
  }
  return absl::OkStatus();
}

absl::Status ChunkReader::ReadStored(const StoredChunk& chunk, StateArray array, uint64_t begin, uint64_t count,
                                     Sink sink) {
  WrittenState written;
  {
    absl::ReaderMutexLock lock(&chunk.mutex, chunk.unchanging());
    if (chunk.memory.removed()) {
      return model::Error(absl::StatusCode::kInvalidArgument, model::kBadRange,
                          absl::StrCat("chunk ", chunk.index, " was removed from its store"));
    }
    if (chunk.history.zero()) {
      ReadZeros(count, sink);
      return absl::OkStatus();
    }
    const TierKind tier = chunk.memory.tier();
    if (tier == TierKind::kHbm) {
      return ReadDevice(chunk.View(chunk.memory.state()).array(array) + begin, count, sink);
    }
    std::byte* const memory = tier == TierKind::kDram ? chunk.memory.state() : chunk.on_disk.staged();
    if (memory != nullptr && (array == StateArray::kMaster || !chunk.on_disk.moments_unread())) {
      sink(0, {chunk.View(memory).array(array) + begin, count});
      tiers_->CountTraffic(TierKind::kDram, count, 0);
      return absl::OkStatus();
    }
    written = chunk.on_disk.written();
  }
  return ReadExtent(written, chunk, chunk.layout, array, begin, count, sink);
}

absl::Status ChunkReader::ReadCopy(const StoredChunk& chunk, const PinnedCopy& copy, StateArray array, uint64_t begin,
                                   uint64_t count, Sink sink) {
  BALLAST_RETURN_IF_ERROR(copy.lost);
  if (copy.zero()) {
    ReadZeros(count, sink);
    return absl::OkStatus();
  }
  if (copy.extent.bytes() > 0) {
    return ReadExtent(WrittenIn(copy.extent, copy.digests), chunk, copy.layout, array, begin, count, sink);
  }
  sink(0, {copy.View(chunk.elements).array(array) + begin, count});
  tiers_->CountTraffic(TierKind::kDram, count, 0);
  return absl::OkStatus();
}

absl::Status ChunkReader::ReadExtent(const WrittenState& written, const StoredChunk& chunk, const StateLayout& layout,
                                     StateArray array, uint64_t begin, uint64_t count, Sink sink) {
  const uint64_t bytes = layout.ArrayBytes(array, chunk.elements);
  const uint64_t offset = written.offset + layout.ArrayAt(array, chunk.elements);
  std::optional<Buffer> buffer;
  Arena own;  // a server without state on NVMe has no buffers, and reads moments of state in DRAM after a restart
  if (prepared()) {
    buffer.emplace(this);
  } else {
    BALLAST_ASSIGN_OR_RETURN(own, Arena::Map(kStagingBytes));
  }
  const absl::Span<std::byte> memory = buffer.has_value() ? buffer->bytes(kStagingBytes) : own.bytes();
  uint32_t digest = 0;
  // Reads the whole array, even for a part: the digest covers the array.
  for (uint64_t at = 0; at < bytes; at += kStagingBytes) {
    const absl::Span<std::byte> piece = memory.subspan(0, std::min(kStagingBytes, bytes - at));
    BALLAST_RETURN_IF_ERROR(written.file->Read(offset + at, piece));
    digest = kernels::Crc32c(piece, digest);
    const uint64_t from = std::max(at, begin);
    const uint64_t to = std::min(at + piece.size(), begin + count);
    if (from < to) sink(from - begin, piece.subspan(from - at, to - from));
  }
  tiers_->CountTraffic(TierKind::kNvme, bytes, 0);
  return CompareDigest(written, chunk, layout, array, digest);
}

absl::Status ChunkReader::ReadDevice(const std::byte* from, uint64_t count, Sink sink) {
  // Each piece waits for the device: a small piece would take as long as 100 KiB.
  const uint64_t piece_bytes = std::min(kStagingBytes, count);
  const auto block = std::make_unique_for_overwrite<std::byte[]>(piece_bytes);
  for (uint64_t at = 0; at < count; at += piece_bytes) {
    const auto piece = absl::MakeSpan(block.get(), std::min(piece_bytes, count - at));
    BALLAST_RETURN_IF_ERROR(tiers_->hbm()->CopyOut(from + at, piece));
    sink(at, piece);
  }
  tiers_->CountTraffic(TierKind::kHbm, count, 0);
  return absl::OkStatus();
}

absl::StatusOr<ArrayDigests> ChunkReader::Spill(const StoredChunk& chunk, NvmeFile* to, uint64_t state_at) {
  const Buffer buffer(this);
  ArrayDigests digests = {};
  for (int i = 0; i < chunk.layout.array_count(); ++i) {
    const auto array = static_cast<StateArray>(i);
    const uint64_t begin = chunk.layout.ArrayAt(array, chunk.elements);
    const uint64_t bytes = chunk.layout.ArrayBytes(array, chunk.elements);
    uint32_t& digest = digests[static_cast<size_t>(i)];
    for (uint64_t at = 0; at < bytes; at += kStagingBytes) {
      const absl::Span<std::byte> piece = buffer.bytes(bytes - at);
      BALLAST_RETURN_IF_ERROR(tiers_->hbm()->CopyOut(chunk.memory.state() + begin + at, piece));
      digest = kernels::Crc32c(piece, digest);
      BALLAST_RETURN_IF_ERROR(to->Write(state_at + begin + at, piece));
    }
  }
  tiers_->CountTraffic(TierKind::kHbm, chunk.state_bytes(), 0);
  tiers_->CountTraffic(TierKind::kNvme, 0, chunk.state_bytes());
  tiers_->CountMove(TierKind::kHbm, TierKind::kNvme, MoveReason::kFlush, chunk.state_bytes());
  return digests;
}

}  // namespace ballast::storage
