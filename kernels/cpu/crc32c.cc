#include <isa-l/crc.h>

#include <algorithm>
#include <cstddef>

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

}  // namespace ballast::kernels
