#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "ballast/kernels/kernels.h"

namespace ballast::kernels {
namespace {

absl::Span<const std::byte> Bytes(const std::string& s) {
  return absl::MakeConstSpan(reinterpret_cast<const std::byte*>(s.data()), s.size());
}

// Bit by bit, as RFC 3720 defines it.
uint32_t Reference(const std::string& s) {
  uint32_t crc = 0xffffffffu;
  for (const char c : s) {
    crc ^= static_cast<unsigned char>(c);
    for (int i = 0; i < 8; ++i) crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0x82f63b78u : 0);
  }
  return ~crc;
}

TEST(Crc32c, KnownValues) {
  EXPECT_EQ(Crc32c(Bytes("123456789")), 0xe3069283u);
  EXPECT_EQ(Crc32c(Bytes(std::string(32, '\0'))), 0x8a9136aau);
  EXPECT_EQ(Crc32c({}), 0u);
}

TEST(Crc32c, ContinuesFromASeed) {
  std::mt19937_64 random(5);
  std::string s(3001, '\0');
  for (char& c : s) c = static_cast<char>(random());
  const uint32_t expected = Reference(s);
  for (size_t cut = 0; cut <= s.size(); cut += 37) {
    EXPECT_EQ(Crc32c(Bytes(s.substr(cut)), Crc32c(Bytes(s.substr(0, cut)))), expected) << cut;
  }
}

TEST(CopyCrc32c, CopiesAndContinues) {
  std::mt19937_64 random(6);
  for (const size_t n : {0, 1, 8191, 8192, 8193, 100'003}) {
    std::string s(n, '\0'), to(n + 1, 'x');
    for (char& c : s) c = static_cast<char>(random());
    EXPECT_EQ(CopyCrc32c(Bytes(s), reinterpret_cast<std::byte*>(to.data()), 77), Crc32c(Bytes(s), 77));
    EXPECT_EQ(to, s + 'x');
  }
}

}  // namespace
}  // namespace ballast::kernels
