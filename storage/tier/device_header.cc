#include "ballast/storage/tier/device_header.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "ballast/kernels/kernels.h"
#include "ballast/proto/base/status.h"

namespace ballast::storage {
namespace {

constexpr uint64_t kHeaderMagic = 0x45444d56'4e4c4142;
constexpr uint32_t kHeaderFormat = 1;
constexpr size_t kCopies = 2;

// Little-endian, as it lies on disk.
struct HeaderBlock {
  uint64_t magic = kHeaderMagic;
  uint32_t digest = 0;  // CRC32C of the block with this as zero
  uint32_t format = kHeaderFormat;
  uint64_t id = 0;
  char owner[64] = {};
  char unused[kIoAlignment - 88] = {};
};
static_assert(sizeof(HeaderBlock) * kCopies == kDeviceHeaderBytes);

uint32_t DigestOfHeader(HeaderBlock block) {
  block.digest = 0;
  return kernels::Crc32c({reinterpret_cast<const std::byte*>(&block), sizeof(block)});
}

}  // namespace

absl::Status WriteDeviceHeader(const DeviceHeader& header, const BlockFile& file) {
  HeaderBlock block;
  block.id = header.id;
  std::memcpy(block.owner, header.owner.data(), std::min(header.owner.size(), sizeof(block.owner)));
  block.digest = DigestOfHeader(block);
  alignas(kIoAlignment) std::array<HeaderBlock, kCopies> copies;
  copies.fill(block);
  BALLAST_RETURN_IF_ERROR(file.Write(0, {reinterpret_cast<const std::byte*>(copies.data()), sizeof(copies)}));
  return file.Sync();
}

absl::StatusOr<std::optional<DeviceHeader>> ReadDeviceHeader(const BlockFile& file) {
  BALLAST_ASSIGN_OR_RETURN(const uint64_t bytes, file.Size());
  bool empty = true;
  absl::Status unreadable;
  for (uint64_t at = 0; at < kDeviceHeaderBytes && at + sizeof(HeaderBlock) <= bytes; at += sizeof(HeaderBlock)) {
    alignas(kIoAlignment) HeaderBlock block;
    const absl::Span<std::byte> span(reinterpret_cast<std::byte*>(&block), sizeof(block));
    const absl::Status read = file.Read(at, span);
    unreadable.Update(read);
    if (!read.ok()) continue;
    empty = empty && std::all_of(span.begin(), span.end(), [](std::byte b) { return b == std::byte{0}; });
    const bool whole = block.magic == kHeaderMagic && block.id != 0 && block.digest == DigestOfHeader(block);
    if (whole && block.format > kHeaderFormat) {
      return model::Error(absl::StatusCode::kFailedPrecondition, model::kLaterVersion,
                          absl::StrCat(file.path(), " has format ", block.format, "; this version reads ",
                                       kHeaderFormat, ". Nothing was changed. Run the version that used it last"));
    }
    if (whole) return DeviceHeader{block.id, std::string(block.owner, strnlen(block.owner, sizeof(block.owner)))};
  }
  BALLAST_RETURN_IF_ERROR(unreadable);
  if (empty) return std::nullopt;
  return model::Error(absl::StatusCode::kDataLoss, model::kIo,
                      absl::StrCat(file.path(),
                                   " does not begin with the block that names a file of an nvme device; expected a "
                                   "file that this server made. Move the file away if you do not need it"));
}

}  // namespace ballast::storage
