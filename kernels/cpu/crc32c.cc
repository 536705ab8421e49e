#include <isa-l/crc.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>

#include "ballast/kernels/kernels.h"

namespace ballast::kernels {
namespace {

// Polynomials over GF(2) modulo Castagnoli's, bit-reflected: the highest bit is the coefficient of x^0.
constexpr uint32_t kOne = uint32_t{1} << 31;
constexpr uint32_t kReflectedPolynomial = 0x82f63b78;

constexpr uint32_t TimesX(uint32_t a) { return (a >> 1) ^ ((a & 1) != 0 ? kReflectedPolynomial : 0); }

constexpr uint32_t Times(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (uint32_t bit = kOne; bit != 0; bit >>= 1) {
    if ((a & bit) != 0) product ^= b;
    b = TimesX(b);
  }
  return product;
}

// x^(8 * 2^k) for each bit k of a count of bytes.
constexpr std::array<uint32_t, 64> BytePowers() {
  std::array<uint32_t, 64> powers = {};
  uint32_t power = kOne;
  for (int i = 0; i < 8; ++i) power = TimesX(power);
  for (uint32_t& entry : powers) {
    entry = power;
    power = Times(power, power);
  }
  return powers;
}

}  // namespace

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

// Bytes behind a message multiply its remainder by x^8 each; the inversions before and after cancel out. Source: the
// method of zlib's crc32_combine, Mark Adler.
uint32_t Crc32cConcat(uint32_t first, uint32_t second, uint64_t second_bytes) {
  static constexpr std::array<uint32_t, 64> kPowers = BytePowers();
  for (size_t bit = 0; second_bytes != 0; ++bit, second_bytes >>= 1) {
    if ((second_bytes & 1) != 0) first = Times(kPowers[bit], first);
  }
  return first ^ second;
}

uint32_t CopyCrc32c(absl::Span<const std::byte> from, std::byte* to, uint32_t seed) {
  // A piece is read from memory once, by the copy, and from the first-level cache by the checksum.
  constexpr size_t kPieceBytes = 8192;
  while (!from.empty()) {
    const absl::Span<const std::byte> piece = from.first(std::min(from.size(), kPieceBytes));
    std::memcpy(to, piece.data(), piece.size());
    seed = Crc32c({to, piece.size()}, seed);
    to += piece.size();
    from.remove_prefix(piece.size());
  }
  return seed;
}

}  // namespace ballast::kernels
