#include "ballast/services/threads/log_queue.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <spdlog/sinks/basic_file_sink.h>
#include <spdlog/spdlog.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <string>
#include <thread>

#include "ballast/tests/scratch_directory.h"

namespace ballast::services {
namespace {

// A pipe whose reader does not read.
TEST(LogQueue, AStuckReaderHoldsNobodyUpAndLostLinesAreCounted) {
  ScratchDirectory directory;
  const std::string path = directory.path() + "/pipe";
  ASSERT_EQ(::mkfifo(path.c_str(), 0600), 0);
  const int reader = ::open(path.c_str(), O_RDONLY | O_NONBLOCK);
  ASSERT_GE(reader, 0);
  const uint64_t before = OfProcess().DroppedLines(LogKind::kAudit);
  {
    LogQueue queue(LogKind::kAudit);
    const auto logger = queue.MakeLogger("test", std::make_shared<spdlog::sinks::basic_file_sink_mt>(path));
    logger->flush_on(spdlog::level::info);
    const std::string line(200, 'x');
    constexpr size_t kLines = 3 * LogQueue::kLinesMax;
    for (size_t i = 0; i < kLines; ++i) logger->info(line);
    EXPECT_FALSE(queue.Drain(absl::Milliseconds(100)));
    const uint64_t dropped = OfProcess().DroppedLines(LogKind::kAudit) - before;
    EXPECT_GT(dropped, LogQueue::kLinesMax);
    EXPECT_LT(dropped, kLines);
    // Once somebody reads, the rest is written.
    std::atomic<bool> drained = false;
    std::thread reading([&] {
      std::array<char, 1 << 16> piece;
      while (!drained) {
        if (::read(reader, piece.data(), piece.size()) <= 0) ::usleep(10'000);
      }
    });
    EXPECT_TRUE(queue.Drain(absl::Seconds(60)));
    drained = true;
    reading.join();
  }
  // The count outlives the queue.
  EXPECT_GT(OfProcess().DroppedLines(LogKind::kAudit), before);
  ::close(reader);
}

}  // namespace
}  // namespace ballast::services
