#include "ballast/client/collective/file_rendezvous.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>

#include "absl/time/clock.h"
#include "ballast/proto/base/status.h"
#include "ballast/tests/client/collective/group.h"

namespace ballast::client {
namespace {

using testing::HasSubstr;

constexpr absl::Duration kShort = absl::Milliseconds(300);

FileRendezvousOptions Seat(const std::string& directory, int rank, int world_size,
                           absl::Duration timeout = absl::Seconds(60)) {
  return {.directory = directory, .rank = rank, .world_size = world_size, .timeout = timeout};
}

TEST(FileRendezvous, RanksSeeEachOthersValues) {
  const ScratchDirectory directory;
  OnEveryRank(4, [&](int r) {
    auto joined = FileRendezvous::Join(Seat(directory.path() + "/made/on/demand", r, 4));
    ASSERT_TRUE(joined.ok()) << joined.status();
    const std::string value(static_cast<size_t>(r) * 100000, static_cast<char>('0' + r));
    ASSERT_TRUE((*joined)->Set(absl::StrCat("a/key with ", r), value).ok());
    for (int peer = 0; peer < 4; ++peer) {
      const auto got = (*joined)->Get(absl::StrCat("a/key with ", peer), absl::Now() + absl::Seconds(60));
      ASSERT_TRUE(got.ok()) << got.status();
      EXPECT_EQ(*got, std::string(static_cast<size_t>(peer) * 100000, static_cast<char>('0' + peer)));
    }
  });
}

// Many starts in one directory, of different sizes: no value of an earlier one is seen, and old values do not pile up.
TEST(FileRendezvous, AUsedDirectoryCanBeUsedAgain) {
  const ScratchDirectory directory;
  int start = 0;
  for (const int world_size : {2, 3, 1, 4, 2}) {
    ++start;
    OnEveryRank(world_size, [&](int r) {
      auto joined = FileRendezvous::Join(Seat(directory.path(), r, world_size));
      ASSERT_TRUE(joined.ok()) << joined.status();
      const auto stale = (*joined)->Get(absl::StrCat("only in ", start - 1), absl::Now());
      EXPECT_EQ(stale.status().code(), absl::StatusCode::kDeadlineExceeded);
      ASSERT_TRUE((*joined)->Set(absl::StrCat("only in ", start), "x").ok());
      ASSERT_TRUE((*joined)->Set(absl::StrCat("rank ", r), absl::StrCat("start ", start)).ok());
      for (int peer = 0; peer < world_size; ++peer) {
        const auto got = (*joined)->Get(absl::StrCat("rank ", peer), absl::Now() + absl::Seconds(60));
        ASSERT_TRUE(got.ok()) << got.status();
        EXPECT_EQ(*got, absl::StrCat("start ", start));
      }
    });
  }
  int values = 0;
  for (const auto& entry : std::filesystem::directory_iterator(directory.path())) {
    values += entry.path().filename().string().rfind("value-", 0) == 0;
  }
  EXPECT_EQ(values, 3);  // of the last start: one shared key, one per rank
}

// Files of a start that died half-way, and plain rubbish, are not taken for answers.
TEST(FileRendezvous, StaleFilesAreNotTakenForAnswers) {
  const ScratchDirectory directory;
  OnEveryRank(3, [&](int r) { ASSERT_TRUE(FileRendezvous::Join(Seat(directory.path(), r, 3)).ok()); });
  std::ofstream(directory.path() + "/answer-1") << "rubbish";
  const auto alone = FileRendezvous::Join(Seat(directory.path(), 0, 3, kShort));
  EXPECT_EQ(model::ReasonOf(alone.status()), model::kRankMissing) << alone.status();
  EXPECT_THAT(std::string(alone.status().message()), HasSubstr("ranks 1, 2 of 3 did not come to "));
  EXPECT_THAT(std::string(alone.status().message()), HasSubstr("within 300ms"));
}

TEST(FileRendezvous, ARankWithoutRankZeroNamesIt) {
  const ScratchDirectory directory;
  OnEveryRank(2, [&](int r) { ASSERT_TRUE(FileRendezvous::Join(Seat(directory.path(), r, 2)).ok()); });
  // The stale invitation and start are still there.
  const auto alone = FileRendezvous::Join(Seat(directory.path(), 1, 2, kShort));
  EXPECT_EQ(alone.status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(model::ReasonOf(alone.status()), model::kRankMissing);
  EXPECT_THAT(std::string(alone.status().message()), HasSubstr("rank 1 waited for the group's start"));
  EXPECT_THAT(std::string(alone.status().message()), HasSubstr("rank 0 of 2 does not run"));
}

TEST(FileRendezvous, ALostRankCannotRejoin) {
  const ScratchDirectory directory;
  std::vector<std::unique_ptr<FileRendezvous>> group(2);
  OnEveryRank(2, [&](int r) { group[r] = *FileRendezvous::Join(Seat(directory.path(), r, 2)); });
  group[1] = nullptr;
  const auto again = FileRendezvous::Join(Seat(directory.path(), 1, 2, kShort));
  EXPECT_EQ(model::ReasonOf(again.status()), model::kRankMissing);
  EXPECT_THAT(std::string(again.status().message()), HasSubstr("a lost rank cannot rejoin"));
}

// A process that joins as rank 0 of 1, says so through a pipe, and stays until it is killed.
class Holder {
 public:
  explicit Holder(const std::string& directory, bool with_child = false) {
    int ends[2];
    if (pipe(ends) != 0) std::abort();
    pid_ = fork();
    if (pid_ == 0) {
      const auto joined = FileRendezvous::Join(Seat(directory, 0, 1));
      pid_t grandchild = 0;
      if (with_child && (grandchild = fork()) == 0) {
        for (;;) pause();
      }
      if (!joined.ok() || write(ends[1], &grandchild, sizeof(grandchild)) != sizeof(grandchild)) _exit(1);
      for (;;) pause();
    }
    close(ends[1]);
    if (read(ends[0], &grandchild_, sizeof(grandchild_)) != sizeof(grandchild_)) std::abort();
    close(ends[0]);
  }
  ~Holder() {
    Kill();
    if (grandchild_ > 0) kill(grandchild_, SIGKILL);
  }
  void Kill() {
    if (pid_ <= 0) return;
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
    pid_ = 0;
  }
  pid_t pid() const { return pid_; }
  pid_t grandchild() const { return grandchild_; }

 private:
  pid_t pid_;
  pid_t grandchild_ = 0;
};

TEST(FileRendezvous, ATakenRankNamesTheProcess) {
  const ScratchDirectory directory;
  Holder holder(directory.path());
  const auto second = FileRendezvous::Join(Seat(directory.path(), 0, 1));
  EXPECT_EQ(second.status().code(), absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(model::ReasonOf(second.status()), model::kRankTaken);
  EXPECT_THAT(std::string(second.status().message()), HasSubstr(absl::StrCat("held by process ", holder.pid(), ";")));
  EXPECT_THAT(std::string(second.status().message()), HasSubstr("rank 0: "));
  // Its death, however sudden, frees the rank.
  holder.Kill();
  const auto third = FileRendezvous::Join(Seat(directory.path(), 0, 1));
  EXPECT_TRUE(third.ok()) << third.status();
}

// As a data loader does that outlives its trainer.
TEST(FileRendezvous, AForkedChildDoesNotKeepTheRank) {
  const ScratchDirectory directory;
  Holder holder(directory.path(), /*with_child=*/true);
  ASSERT_GT(holder.grandchild(), 0);
  holder.Kill();
  ASSERT_EQ(kill(holder.grandchild(), 0), 0);
  const auto next = FileRendezvous::Join(Seat(directory.path(), 0, 1));
  EXPECT_TRUE(next.ok()) << next.status();
}

TEST(FileRendezvous, ARankTakenInThisProcessIsRefusedToo) {
  const ScratchDirectory directory;
  auto first = FileRendezvous::Join(Seat(directory.path(), 0, 1));
  ASSERT_TRUE(first.ok()) << first.status();
  // Under another spelling of the directory.
  const auto second = FileRendezvous::Join(Seat(directory.path() + "/.", 0, 1));
  EXPECT_EQ(model::ReasonOf(second.status()), model::kRankTaken);
  EXPECT_THAT(std::string(second.status().message()), HasSubstr(absl::StrCat("process ", getpid())));
  first->reset();
  EXPECT_TRUE(FileRendezvous::Join(Seat(directory.path(), 0, 1)).ok());
}

TEST(FileRendezvous, WorldSizesMustAgree) {
  const ScratchDirectory directory;
  OnEveryRank(2, [&](int r) {
    const auto joined = FileRendezvous::Join(Seat(directory.path(), r, r == 0 ? 2 : 4));
    EXPECT_EQ(joined.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(model::ReasonOf(joined.status()), model::kBadConfig);
    EXPECT_THAT(std::string(joined.status().message()),
                HasSubstr("rank 0 was started with world size 2, rank 1 with 4; start all ranks with the same"));
  });
}

TEST(FileRendezvous, BadInputIsRefused) {
  const ScratchDirectory directory;
  const auto outside = FileRendezvous::Join(Seat(directory.path(), 2, 2));
  EXPECT_EQ(model::ReasonOf(outside.status()), model::kBadConfig);
  EXPECT_THAT(std::string(outside.status().message()), HasSubstr("rank 2 of 2: expected 0 <= rank < world size"));

  std::ofstream(directory.path() + "/file") << "not a directory";
  const auto file = FileRendezvous::Join(Seat(directory.path() + "/file/below", 0, 1));
  EXPECT_EQ(model::ReasonOf(file.status()), model::kIo);
  EXPECT_THAT(std::string(file.status().message()), HasSubstr("/file/below' cannot be used: "));

  auto joined = FileRendezvous::Join(Seat(directory.path(), 0, 1));
  ASSERT_TRUE(joined.ok());
  EXPECT_EQ(model::ReasonOf((*joined)->Set("", "x")), model::kBadRequest);
  EXPECT_EQ(model::ReasonOf((*joined)->Set(std::string(65, 'k'), "x")), model::kBadRequest);
  EXPECT_EQ(model::ReasonOf((*joined)->Set("k", std::string((1 << 20) + 1, 'x'))), model::kBadRequest);
  EXPECT_TRUE((*joined)->Set(std::string(64, '\xff'), "x").ok());
  // An empty value is a value.
  EXPECT_TRUE((*joined)->Set("empty", {}).ok());
  EXPECT_EQ(*(*joined)->Get("empty", absl::Now()), "");
}

}  // namespace
}  // namespace ballast::client
