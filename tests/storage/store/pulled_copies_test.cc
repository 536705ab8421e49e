#include "ballast/storage/store/pulled_copies.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <thread>
#include <vector>

#include "absl/synchronization/notification.h"
#include "gtest/gtest.h"

namespace ballast::storage {
namespace {

constexpr uint64_t kBytes = 64, kSlots = 16;

class PulledCopiesTest : public ::testing::Test {
 protected:
  PulledCopiesTest() : memory_(kSlots * kBytes) { copies_.Take(absl::MakeSpan(memory_), kBytes); }

  // The value that every byte of the read part has; 0 on an error.
  int Read(uint64_t chunk, uint64_t version, uint64_t at = 0, uint64_t count = kBytes) {
    std::vector<std::byte> to(count);
    const absl::Status status = copies_.Read(chunk, version, kBytes, at, absl::MakeSpan(to), [&](auto copy) {
      ++fills_;
      if (fails_) return absl::DataLossError("rotten");
      std::memset(copy.data(), Value(chunk, version), copy.size());
      return absl::OkStatus();
    });
    if (!status.ok()) return 0;
    EXPECT_EQ(std::count(to.begin(), to.end(), to[0]), count);
    return static_cast<int>(to[0]);
  }
  static int Value(uint64_t chunk, uint64_t version) { return static_cast<int>(1 + (chunk * 16 + version) % 255); }

  std::vector<std::byte> memory_;
  PulledCopies copies_;
  std::atomic<int> fills_{0};
  bool fails_ = false;
};

TEST_F(PulledCopiesTest, PartsOfAChunkAreOneRead) {
  for (uint64_t at = 0; at < kBytes; at += 16) EXPECT_EQ(Read(3, 1, at, 16), Value(3, 1));
  EXPECT_EQ(fills_, 1);
  EXPECT_EQ(Read(3, 2), Value(3, 2)) << "another version of the chunk";
  EXPECT_EQ(Read(3, 1), Value(3, 1));
  EXPECT_EQ(fills_, 2);
}

TEST_F(PulledCopiesTest, TheLongestUnusedSlotIsTakenFirst) {
  for (uint64_t chunk = 0; chunk < kSlots; ++chunk) EXPECT_EQ(Read(chunk, 1), Value(chunk, 1));
  EXPECT_EQ(Read(0, 1), Value(0, 1));
  EXPECT_EQ(Read(100, 1), Value(100, 1));  // takes the slot of chunk 1
  const int before = fills_;
  EXPECT_EQ(Read(0, 1), Value(0, 1));
  EXPECT_EQ(fills_, before);
  EXPECT_EQ(Read(1, 1), Value(1, 1));
  EXPECT_EQ(fills_, before + 1);
}

TEST_F(PulledCopiesTest, AnErrorIsAnsweredAndNotKept) {
  fails_ = true;
  EXPECT_EQ(Read(3, 1), 0);
  EXPECT_EQ(Read(3, 1), 0);
  EXPECT_EQ(fills_, 2);
  fails_ = false;
  EXPECT_EQ(Read(3, 1), Value(3, 1));
}

// The second call waits for the fill of the first; if that fails, the second fills.
TEST_F(PulledCopiesTest, ACallWaitsForTheFillOfAnother) {
  for (const bool fails : {false, true}) {
    absl::Notification filling, go_on;
    std::vector<std::byte> first(kBytes), second(kBytes);
    absl::Status status_of_first;
    std::thread thread([&] {
      status_of_first = copies_.Read(7, fails, kBytes, 0, absl::MakeSpan(first), [&](auto copy) {
        filling.Notify();
        go_on.WaitForNotification();
        std::memset(copy.data(), 1, copy.size());
        return fails ? absl::DataLossError("rotten") : absl::OkStatus();
      });
    });
    filling.WaitForNotification();
    std::atomic<bool> filled{false};
    std::thread other([&] {
      EXPECT_TRUE(copies_
                      .Read(7, fails, kBytes, 0, absl::MakeSpan(second),
                            [&](auto copy) {
                              filled = true;
                              std::memset(copy.data(), 2, copy.size());
                              return absl::OkStatus();
                            })
                      .ok());
    });
    go_on.Notify();
    thread.join();
    other.join();
    EXPECT_EQ(status_of_first.ok(), !fails);
    EXPECT_EQ(filled, fails);
    EXPECT_EQ(second[0], fails ? std::byte{2} : std::byte{1});
  }
}

TEST_F(PulledCopiesTest, ManyThreadsReadRightValues) {
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (uint64_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (uint64_t i = 0; i < 2000; ++i) {
        const uint64_t chunk = (i * 7 + t) % 40, version = i % 3;
        wrong += Read(chunk, version, 16 * (i % 4), 16) != Value(chunk, version);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

}  // namespace
}  // namespace ballast::storage
