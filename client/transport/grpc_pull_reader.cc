#include "ballast/client/transport/grpc_pull_reader.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "ballast/kernels/kernels.h"
#include "ballast/proto/base/status.h"

namespace ballast::client {
namespace {

constexpr uint8_t kCrcTag = 1 << 3 | 5;  // PullResponse.crc32c: fixed32, field 1

absl::Status WrongLength(uint64_t expected, uint64_t came) {
  return model::Error(absl::StatusCode::kInvalidArgument, model::kBadLength,
                      absl::StrCat("expected ", expected, " bytes, the server sent ", came));
}

}  // namespace

PullReader::PullReader(const grpc::ByteBuffer& buffer) { ok_ = buffer.Length() == 0 || buffer.Dump(&slices_).ok(); }

absl::Status PullReader::ReadInto(absl::Span<std::byte> to, absl::Span<const std::byte> shared) {
  uint32_t crc = 0, got = 0;
  uint64_t length = 0;
  uint8_t tag = 0;
  while (ok_ && Next(&tag, 1)) {
    if (tag == kCrcTag) {
      uint8_t bytes[4];
      ok_ = Next(bytes, 4);
      crc = bytes[0] | bytes[1] << 8 | bytes[2] << 16 | static_cast<uint32_t>(bytes[3]) << 24;
    } else if (tag == kPayloadTag) {
      ok_ = NextVarint(&length);
      const bool fits = length == to.size() || (length == 0 && !shared.empty());
      if (ok_ && !fits) return WrongLength(to.size(), length);
      got = 0;
      ok_ = ok_ && Next(to.data(), length, &got);
    } else {
      ok_ = false;
    }
  }
  if (!ok_) return model::Error(absl::StatusCode::kUnavailable, model::kChecksum, "the answer is not a PullResponse");
  const bool is_shared = length == 0 && !shared.empty();
  if (!is_shared && length != to.size()) return WrongLength(to.size(), length);
  // The copy is checked, since the caller gets the copy.
  if (is_shared) got = kernels::CopyCrc32c(shared, to.data());
  if (got != crc) {
    return model::Error(absl::StatusCode::kUnavailable, model::kChecksum,
                        absl::StrCat("pulled bytes have CRC32C ", got, ", the server sent ", crc));
  }
  return absl::OkStatus();
}

bool PullReader::Next(void* to, uint64_t bytes, uint32_t* crc32c) {
  auto* out = static_cast<std::byte*>(to);
  while (bytes > 0) {
    if (slice_ == slices_.size()) return false;
    const uint64_t n = std::min<uint64_t>(bytes, slices_[slice_].size() - offset_);
    const auto* const from = reinterpret_cast<const std::byte*>(slices_[slice_].begin()) + offset_;
    if (crc32c != nullptr) {
      *crc32c = kernels::CopyCrc32c({from, n}, out, *crc32c);
    } else {
      std::memcpy(out, from, n);
    }
    out += n, bytes -= n, offset_ += n;
    if (offset_ == slices_[slice_].size()) ++slice_, offset_ = 0;
  }
  return true;
}

bool PullReader::NextVarint(uint64_t* value) {
  *value = 0;
  for (int shift = 0; shift < 64; shift += 7) {
    uint8_t byte = 0;
    if (!Next(&byte, 1)) return false;
    *value |= static_cast<uint64_t>(byte & 0x7f) << shift;
    if ((byte & 0x80) == 0) return true;
  }
  return false;
}

}  // namespace ballast::client
