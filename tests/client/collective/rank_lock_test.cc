// A rank's lock lasts as long as its process, and no longer.
#include "ballast/client/collective/rank_lock.h"

#include <sys/wait.h>
#include <unistd.h>

#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ballast/proto/base/status.h"
#include "ballast/tests/scratch_directory.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ballast::client {
namespace {

class RankLockTest : public ::testing::Test {
 protected:
  // The exit code of a child that runs `body`.
  template <typename Body>
  static int InChild(Body body) {
    const pid_t child = fork();
    if (child == 0) _exit(body());
    int status = 0;
    EXPECT_EQ(waitpid(child, &status, 0), child);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }

  ScratchDirectory directory_;
  const std::string path_ = directory_ / "rank-0";
};

TEST_F(RankLockTest, OneHolderAtATime) {
  EXPECT_EQ(RankLock::Holder(path_), std::nullopt);
  {
    const auto lock = RankLock::Take(path_);
    ASSERT_TRUE(lock.ok()) << lock.status();
    EXPECT_EQ(RankLock::Holder(path_), getpid());
    const absl::Status taken = RankLock::Take(path_).status();
    EXPECT_EQ(model::ReasonOf(taken), model::kRankTaken) << taken;
    EXPECT_THAT(taken.ToString(), ::testing::HasSubstr(absl::StrCat("held by process ", getpid())));
    EXPECT_EQ(RankLock::Holder(path_), getpid()) << "the refused try dropped it";
  }
  EXPECT_EQ(RankLock::Holder(path_), std::nullopt);
  EXPECT_TRUE(RankLock::Take(path_).ok());
}

TEST_F(RankLockTest, AnotherProcessSeesTheHolder) {
  const auto lock = RankLock::Take(path_);
  ASSERT_TRUE(lock.ok()) << lock.status();
  const pid_t holder = getpid();
  EXPECT_EQ(InChild([&] {
              if (RankLock::Holder(path_) != holder) return 1;
              return model::ReasonOf(RankLock::Take(path_).status()) == model::kRankTaken ? 0 : 2;
            }),
            0);
}

TEST_F(RankLockTest, AForkedChildNeitherKeepsNorDropsTheLock) {
  std::optional<RankLock> lock = *RankLock::Take(path_);
  EXPECT_EQ(InChild([&] {
              lock.reset();  // the child's copy
              return 0;
            }),
            0);
  EXPECT_EQ(InChild([&] { return RankLock::Holder(path_).has_value() ? 0 : 1; }), 0) << "it is the parent's still";
  lock.reset();
  EXPECT_EQ(InChild([&] { return RankLock::Take(path_).ok() ? 0 : 1; }), 0);
}

TEST_F(RankLockTest, ALockMovesWithItsOwner) {
  auto lock = RankLock::Take(path_);
  ASSERT_TRUE(lock.ok()) << lock.status();
  {
    const RankLock moved = *std::move(lock);
    EXPECT_TRUE(RankLock::Holder(path_).has_value());
  }
  EXPECT_FALSE(RankLock::Holder(path_).has_value());
}

TEST_F(RankLockTest, AFileThatCannotBeOpenedIsAnError) {
  EXPECT_EQ(model::ReasonOf(RankLock::Take(directory_ / "nowhere/rank-0").status()), model::kIo);
}

}  // namespace
}  // namespace ballast::client
