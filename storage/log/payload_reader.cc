#include "ballast/storage/log/payload_reader.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "ballast/kernels/kernels.h"
#include "ballast/proto/base/status.h"
#include "ballast/storage/io/disk_counters.h"
#include "ballast/storage/log/block_parity.h"
#include "ballast/storage/memory/arena.h"

namespace ballast::storage {

absl::Status RottenLog(const BlockFile& file, absl::string_view what) {
  return model::Error(
      absl::StatusCode::kDataLoss, model::kChecksum,
      absl::StrCat("gradient log ", file.path(), ": ", what,
                   "; it was durable and can no longer be read, and nothing is made up for it. Check the disk; bring "
                   "the file back from a copy of this very state, or drop the job"));
}

namespace {

// `to`: any memory, any number of bytes.
absl::Status ReadAt(const BlockFile& file, uint64_t offset, absl::Span<std::byte> to) {
  const bool direct = (reinterpret_cast<uintptr_t>(to.data()) | to.size()) % kIoAlignment == 0;
  if (direct) return file.Read(offset, to);
  BALLAST_ASSIGN_OR_RETURN(Arena blocks, Arena::Map(AlignUp(to.size())));
  BALLAST_RETURN_IF_ERROR(file.Read(offset, blocks.bytes().subspan(0, AlignUp(to.size()))));
  std::memcpy(to.data(), blocks.bytes().data(), to.size());
  return absl::OkStatus();
}

// Rebuilds the payload that was read into `to`, and returns the offset of the damaged block in the file. `readable`:
// the payload could be read as a whole; else blocks that cannot be read count as zero, and one is rebuilt like a rotten
// one.
std::optional<uint64_t> RebuildPayload(const BlockFile& file, const PayloadPlace& place, bool readable,
                                       absl::Span<std::byte> to) {
  const absl::StatusOr<Arena> memory = Arena::Map(kLogBlock);
  if (!memory.ok()) return std::nullopt;
  const absl::Span<std::byte> block = memory->bytes().subspan(0, kLogBlock);
  uint64_t unreadable = place.offset;
  for (uint64_t at = 0; !readable && at < to.size(); at += kLogBlock) {
    const absl::Span<std::byte> piece = to.subspan(at, kLogBlock);
    if (!file.Read(place.offset + at, block).ok()) {
      std::fill(block.begin(), block.end(), std::byte{0});
      unreadable = place.offset + at;
    }
    std::copy_n(block.begin(), piece.size(), piece.begin());
  }
  // The block was zero, or could be read this time.
  if (!readable && kernels::Crc32c(to) == place.crc32c) return unreadable;
  if (!file.Read(place.parity_offset(), block).ok()) return std::nullopt;
  const std::optional<uint64_t> index = RebuildBlock(block, place.parity_sum, place.crc32c, to);
  if (!index.has_value()) return std::nullopt;
  return place.offset + *index * kLogBlock;
}

}  // namespace

absl::Status ReadPayload(const BlockFile& file, const PayloadPlace& place, absl::Span<std::byte> to,
                         std::optional<uint64_t>* rebuilt) {
  const absl::Status read = ReadAt(file, place.offset, to);
  const uint32_t crc32c = read.ok() ? kernels::Crc32c(to) : 0;
  if (read.ok() && crc32c == place.crc32c) return absl::OkStatus();
  std::optional<uint64_t> block;
  if (place.parity_sum != 0) block = RebuildPayload(file, place, read.ok(), to);
  if (!block.has_value() && !read.ok()) return read;
  if (!block.has_value()) {
    ++ProcessDiskCounters().wrong_payloads;
    return RottenLog(file, absl::StrFormat("the %d bytes at offset %d have CRC32C %08x, expected %08x", place.bytes,
                                           place.offset, crc32c, place.crc32c));
  }
  ++ProcessDiskCounters().repaired_payloads;
  if (rebuilt != nullptr) {
    *rebuilt = block;
  } else {
    spdlog::warn(
        "gradient log {}: the disk did not return the {} bytes at offset {} as they were written; they were "
        "rebuilt from their slice's parity, and nothing is lost. Check the disk",
        file.path(), kLogBlock, *block);
  }
  return absl::OkStatus();
}

}  // namespace ballast::storage
