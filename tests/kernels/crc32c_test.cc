#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <random>
#include <string>
#include <thread>
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

TEST(Crc32cConcat, IsTheChecksumOfBoth) {
  std::string s;
  for (int i = 0; i < 100000; ++i) s.push_back(static_cast<char>(i * 2654435761u >> 24));
  const uint32_t expected = Crc32c(Bytes(s));
  for (const size_t cut : {0u, 1u, 7u, 64u, 4096u, 65535u, 99999u, 100000u}) {
    const uint32_t first = Crc32c(Bytes(s.substr(0, cut))), second = Crc32c(Bytes(s.substr(cut)));
    EXPECT_EQ(Crc32cConcat(first, second, s.size() - cut), expected) << cut;
  }
  // A size whose highest bits count: zeros do not need to be there to be counted, 2^40 of them twice are 2^41.
  const uint64_t half = uint64_t{1} << 40;
  const uint32_t zeros = Crc32cConcat(0, 0, half);
  EXPECT_EQ(zeros, 0u);
  const uint32_t once = Crc32cConcat(expected, 0, half);
  EXPECT_EQ(Crc32cConcat(once, 0, half), Crc32cConcat(expected, 0, 2 * half));
  EXPECT_NE(once, expected);
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

// `from` may be memory that another process writes to at this moment.
TEST(CopyCrc32c, IsOfTheCopyWhateverHappensToTheSource) {
#ifdef _GLIBCXX_TSAN  // as the tsan preset sets it
  GTEST_SKIP() << "ThreadSanitizer reports the race that is meant here";
#endif
  std::string from(1 << 16, 'a'), to(from.size(), '\0');
  std::atomic<bool> stop{false};
  std::thread writer([&] {
    volatile char* const bytes = from.data();
    for (char value = 0; !stop.load(std::memory_order_relaxed); ++value) {
      for (size_t i = 0; i < from.size(); i += 64) bytes[i] = value;
    }
  });
  int wrong = 0;
  for (int i = 0; i < 2000; ++i) {
    const uint32_t crc = CopyCrc32c(Bytes(from), reinterpret_cast<std::byte*>(to.data()));
    if (crc != Crc32c(Bytes(to))) ++wrong;
  }
  stop = true;
  writer.join();
  EXPECT_EQ(wrong, 0);
}

}  // namespace
}  // namespace ballast::kernels
