#include <isa-l/crc.h>

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "ballast/kernels/kernels.h"

namespace ballast::kernels {

uint32_t Crc32c(absl::Span<const std::byte> bytes, uint32_t seed) {
  // ISA-L takes the length as an int.
  constexpr size_t kPieceBytes = size_t{1} << 30;
  uint32_t state = ~seed;
  while (!bytes.empty()) {
    const size_t n = std::min(bytes.size(), kPieceBytes);
    // ISA-L's pointer is not const, but nothing is written.
    auto* data = reinterpret_cast<unsigned char*>(const_cast<std::byte*>(bytes.data()));
    state = crc32_iscsi(data, static_cast<int>(n), state);
    bytes.remove_prefix(n);
  }
  return ~state;
}

uint32_t CopyCrc32c(absl::Span<const std::byte> from, std::byte* to, uint32_t seed) {
  // A piece is read from memory once, by the checksum, and from the first-level cache by the copy.
  constexpr size_t kPieceBytes = 8192;
  while (!from.empty()) {
    const absl::Span<const std::byte> piece = from.first(std::min(from.size(), kPieceBytes));
    seed = Crc32c(piece, seed);
    std::memcpy(to, piece.data(), piece.size());
    to += piece.size();
    from.remove_prefix(piece.size());
  }
  return seed;
}

}  // namespace ballast::kernels
