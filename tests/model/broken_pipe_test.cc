// A write to a lost peer is an error, and ends nothing.
#include "ballast/proto/base/broken_pipe.h"

#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <optional>
#include <thread>

#include "ballast/proto/base/descriptor.h"
#include "gtest/gtest.h"

namespace ballast::model {
namespace {

int signals = 0;

class BrokenPipeTest : public ::testing::Test {
 protected:
  BrokenPipeTest() {
    signals = 0;
    struct sigaction count = {};
    count.sa_handler = [](int) { ++signals; };
    sigaction(SIGPIPE, &count, &before_);
    int pair[2] = {};
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair), 0);
    mine_ = Descriptor(pair[0]);
    ::close(pair[1]);
  }
  ~BrokenPipeTest() override { sigaction(SIGPIPE, &before_, nullptr); }
  void ExpectWriteFails() const {
    EXPECT_LT(::write(mine_.get(), "x", 1), 0);
    EXPECT_EQ(errno, EPIPE);
  }
  static bool Blocked() {
    sigset_t mask;
    pthread_sigmask(SIG_BLOCK, nullptr, &mask);
    return sigismember(&mask, SIGPIPE) != 0;
  }

  struct sigaction before_ = {};
  Descriptor mine_;
};

TEST_F(BrokenPipeTest, TheSignalIsTakenOffWithTheBlock) {
  {
    const BrokenPipeBlock block;
    ExpectWriteFails();
    ExpectWriteFails();
  }
  EXPECT_EQ(signals, 0);
  EXPECT_FALSE(Blocked());
  ExpectWriteFails();
  EXPECT_EQ(signals, 1) << "as without a block";
}

TEST_F(BrokenPipeTest, ThreadsStartedMeanwhileHaveTheBlockForGood) {
  std::optional<std::thread> thread;
  {
    const BrokenPipeBlock block;
    thread.emplace([this] {
      EXPECT_TRUE(Blocked());
      ExpectWriteFails();
    });
  }
  thread->join();
  EXPECT_EQ(signals, 0);
}

TEST_F(BrokenPipeTest, AnOuterBlockStays) {
  const BrokenPipeBlock outer;
  {
    const BrokenPipeBlock inner;
    ExpectWriteFails();
  }
  EXPECT_TRUE(Blocked());
  EXPECT_EQ(signals, 0);
}

}  // namespace
}  // namespace ballast::model
