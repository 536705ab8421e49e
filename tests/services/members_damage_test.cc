// Bytes of states rot on the disk of a server whose job has two copies of each chunk: the server copies what it has
// lost from the other one, beside training, and ends with the bits of an undisturbed run. Where both lose a chunk, the
// job ends and names it.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <string>
#include <vector>

#include "ballast/proto/base/status.h"
#include "ballast/services/job_state/job_entry.h"
#include "ballast/tests/services/members_fixture.h"

namespace ballast::services {
namespace {

using ::testing::HasSubstr;

constexpr size_t kBlock = 4096;

constexpr uint64_t kMiB = uint64_t{1} << 20;

class MembersDamageTest : public MembersFixture {
 protected:
  MembersDamageTest() {
    for (auto& [name, server] : servers_) {
      server->options().staging_bytes = 2 * kMiB;
      Restart(name);
    }
  }
  int OpenTier(const std::string& name) {
    const int fd = ::open((servers_.at(name)->directory() + "/nvme.tier").c_str(), O_RDWR);
    EXPECT_GE(fd, 0);
    return fd;
  }
  // Flips a bit in each block of states that is not all zero, labels among them.
  void RotEverything(const std::string& name) {
    const int fd = OpenTier(name);
    std::vector<char> block(kBlock);
    for (off_t at = 0; ::pread(fd, block.data(), kBlock, at) == static_cast<ssize_t>(kBlock); at += kBlock) {
      if (std::all_of(block.begin(), block.end(), [](char c) { return c == 0; })) continue;
      block[100] ^= 1;
      EXPECT_EQ(::pwrite(fd, block.data(), kBlock, at), static_cast<ssize_t>(kBlock));
    }
    EXPECT_EQ(::fsync(fd), 0);
    ::close(fd);
  }
  // ... in the first moment of each chunk of a server that has ended.
  void RotMoments(const std::string& name) {
    const auto catalog = storage::Catalog::Open(servers_.at(name)->directory());
    ASSERT_TRUE(catalog.ok()) << catalog.status();
    const absl::StatusOr<JobEntry> entry = ReadJobEntry(**catalog, "job");
    ASSERT_TRUE(entry.ok()) << entry.status();
    EXPECT_FALSE(entry->chunks.empty());
    const int fd = OpenTier(name);
    for (const storage::DurableChunk& chunk : entry->chunks) {
      const auto at = static_cast<off_t>(chunk.offset +
                                         storage::StateLayout().ArrayAt(storage::StateArray::kMoment1, chunk.elements));
      char byte = 0;
      EXPECT_EQ(::pread(fd, &byte, 1, at), 1);
      byte ^= 1;
      EXPECT_EQ(::pwrite(fd, &byte, 1, at), 1);
    }
    ::close(fd);
  }
  void Scrub(const std::string& name) {
    const uint64_t passes = StatusOf(name).scrub().passes();
    for (const absl::Time end = absl::Now() + absl::Minutes(1);
         StatusOf(name).scrub().passes() < passes + 2 && absl::Now() < end;) {
      (*servers_.at(name))->ScrubNext();
    }
    EXPECT_GE(StatusOf(name).scrub().passes(), passes + 2);
  }
  void FlushAll(const std::string& name) {
    ASSERT_EQ(PinDurably(servers_.at(name)->get(), "job", group_->epoch(), step_), absl::OkStatus());
    ASSERT_EQ(UnpinDurably(servers_.at(name)->get(), "job", group_->epoch(), step_), absl::OkStatus());
  }
  std::string AwaitFailure(const std::string& name) {
    for (const absl::Time end = absl::Now() + absl::Minutes(1); absl::Now() < end;) {
      if (const std::string failure = StatusOf(name).failure(); !failure.empty()) return failure;
      absl::SleepFor(absl::Milliseconds(2));
    }
    return "";
  }
  // Each server alone has the bits of the undisturbed run.
  void ExpectSameOnBoth() {
    ASSERT_EQ(Reconfigure({"a", "b"}, 2), absl::OkStatus());
    AwaitFilled("a");
    AwaitFilled("b");
    ASSERT_EQ(Reconfigure({"a", "b"}, 2), absl::OkStatus());
    ASSERT_EQ(Reconfigure({"b"}, 2, {"a"}), absl::OkStatus());
    ExpectSameBits();
  }
};

// The newest states of some chunks are on the disk alone.
class RottenNvmeTest : public MembersDamageTest {};

// No state is on NVMe, or some are.
constexpr MembersCase kCases[] = {{"dram", {0, 64 * kMiB, 64 * kMiB}, v1::DURABILITY_STEP},
                                  {"nvme", {0, 7 * kMiB / 2, 64 * kMiB}, v1::DURABILITY_STEP}};

TEST_P(MembersDamageTest, ARestartCopiesWhatIsDamaged) {
  Begin({"a", "b"}, 2);
  Steps(30);
  FlushAll("b");
  Steps(1);
  End("b");
  RotEverything("b");
  source_.opens = false;
  Restart("b");
  const v1::JobStatus status = StatusOf("b");
  EXPECT_FALSE(status.state_lost());
  EXPECT_EQ(status.failure(), "");
  EXPECT_EQ(status.unfilled_chunks(), status.chunks());
  EXPECT_GT(status.chunks(), 0);
  // Another restart finds the same: what was given up does not come back.
  Restart("b");
  EXPECT_EQ(StatusOf("b").unfilled_chunks(), status.chunks());
  ASSERT_EQ(Reconfigure({"a", "b"}, 2), absl::OkStatus());
  Steps(2);
  source_.opens = true;
  AwaitFilled("b");
  Steps(1);
  ExpectSameOnBoth();
}

// The group goes on in its epoch: no server is a filler, and no Open tells anybody.
TEST_P(RottenNvmeTest, TheScrubGivesUpWhatIsDamaged) {
  Begin({"a", "b"}, 2);
  Steps(3);
  AwaitIdle(servers_["b"]->get(), "job");
  RotEverything("b");
  source_.opens = false;
  Scrub("b");
  const uint64_t unfilled = StatusOf("b").unfilled_chunks();
  EXPECT_GT(unfilled, 0);
  EXPECT_LT(unfilled, StatusOf("b").chunks()) << "what memory has is mended";
  EXPECT_EQ(StatusOf("b").scrub().damaged(), 0);
  Steps(2);
  // Rank 0 pulls from the other server.
  v1::PullRequest pull;
  pull.set_job("job");
  pull.set_version(step_);
  pull.set_content(v1::CONTENT_WORKING);
  uint64_t refused = 0;
  for (const model::Chunk& chunk : layout_.chunks()) {
    pull.set_unit(chunk.unit);
    pull.set_begin(chunk.range.begin);
    pull.set_end(chunk.range.end);
    std::string to;
    const auto pulled = group_->Pull(servers_["b"]->get(), pull, absl::InfiniteFuture(), &to).Wait();
    if (pulled.ok()) continue;
    ++refused;
    EXPECT_EQ(model::ReasonOf(pulled.status()), model::kNotFilled) << pulled.status();
  }
  EXPECT_EQ(refused, unfilled);
  source_.opens = true;
  Steps(1);
  AwaitFilled("b");
  Steps(1);
  ExpectSameOnBoth();
}

// What the scrub gave up stays given up over a crash, though the log says that the server has it.
TEST_P(RottenNvmeTest, ACrashBeforeTheCopyComes) {
  Begin({"a", "b"}, 2);
  Steps(20);
  AwaitIdle(servers_["b"]->get(), "job");
  RotEverything("b");
  source_.opens = false;
  Scrub("b");
  const uint64_t unfilled = StatusOf("b").unfilled_chunks();
  EXPECT_GT(unfilled, 0);
  Steps(2);
  Restart("b");
  EXPECT_EQ(StatusOf("b").failure(), "");
  EXPECT_GE(StatusOf("b").unfilled_chunks(), unfilled);
  ASSERT_EQ(Reconfigure({"a", "b"}, 2), absl::OkStatus());
  Steps(1);
  source_.opens = true;
  AwaitFilled("b");
  Steps(1);
  ExpectSameOnBoth();
}

TEST_P(RottenNvmeTest, AnUpdateGivesUpTheStateThatItFindsDamaged) {
  Begin({"a", "b"}, 2);
  Steps(3);
  AwaitIdle(servers_["b"]->get(), "job");
  RotEverything("b");
  source_.opens = false;
  Steps(2);
  AwaitIdle(servers_["b"]->get(), "job");
  EXPECT_EQ(StatusOf("b").failure(), "");
  EXPECT_GT(StatusOf("b").unfilled_chunks(), 0);
  source_.opens = true;
  Steps(1);
  AwaitFilled("b");
  Steps(1);
  ExpectSameOnBoth();
}

TEST_P(MembersDamageTest, AnUpdateGivesUpAChunkWhoseMomentsARestartLeftOnTheDisk) {
  Begin({"a", "b"}, 2);
  Steps(3);
  FlushAll("b");
  Steps(1);  // which the replay applies
  End("b");
  RotMoments("b");
  Restart("b");
  EXPECT_EQ(StatusOf("b").failure(), "");
  ASSERT_EQ(Reconfigure({"a", "b"}, 2), absl::OkStatus());
  Steps(2);
  AwaitFilled("b");
  FlushAll("b");
  End("b");
  RotMoments("b");
  Restart("b");  // nothing is replayed: the next step finds it
  ASSERT_EQ(Reconfigure({"a", "b"}, 2), absl::OkStatus());
  Steps(2);
  EXPECT_EQ(StatusOf("b").failure(), "");
  ExpectSameOnBoth();
}

TEST_P(MembersDamageTest, BothCopiesAreDamaged) {
  Begin({"a", "b"}, 2);
  Steps(30);
  for (const char* name : {"a", "b"}) FlushAll(name);
  for (const char* name : {"a", "b"}) End(name);
  for (const char* name : {"a", "b"}) RotEverything(name);
  source_.opens = false;  // until both are there
  for (const char* name : {"a", "b"}) Restart(name);
  source_.opens = true;
  const std::string failure = AwaitFailure("a");
  EXPECT_THAT(failure, HasSubstr("is damaged on all servers that hold it, here and on 'b'"));
  EXPECT_THAT(failure, HasSubstr("chunk "));
  const absl::Status refused = Reconfigure({"a", "b"}, 2);
  EXPECT_TRUE(absl::IsDataLoss(refused)) << refused;
}

// Nobody else has the chunk: refused, as a job without a table is.
TEST_P(MembersDamageTest, TheOnlyCopyIsDamaged) {
  Begin({"a", "b"}, 1);
  Steps(30);
  FlushAll("b");
  End("b");
  RotEverything("b");
  Restart("b");
  EXPECT_TRUE(StatusOf("b").state_lost());
  EXPECT_THAT(StatusOf("b").failure(), HasSubstr("chunk "));
}

// A version that was kept has the rotten extent of a chunk that was copied since: its restore is refused by name. One
// that is kept afterwards is whole.
TEST_P(MembersDamageTest, KeptVersionsAfterACopy) {
  Begin({"a", "b"}, 2);
  Steps(2);
  for (const char* name : {"a", "b"}) {
    ASSERT_EQ(PinDurably(servers_[name]->get(), "job", group_->epoch(), step_), absl::OkStatus());
  }
  const int64_t kept = step_;
  End("b");
  RotEverything("b");
  Restart("b");
  ASSERT_EQ(Reconfigure({"a", "b"}, 2), absl::OkStatus());
  AwaitFilled("b");
  v1::StepHeader restore;
  restore.set_kind(v1::STEP_KIND_RESTORE);
  restore.set_restored_version(kept);
  restore.set_gradient_presence(model::MakeBitmap(Tensors(), {}));
  restore.set_value_presence(model::MakeBitmap(Tensors(), {}));
  const auto refused = group_->Finish(restore);
  EXPECT_TRUE(absl::IsDataLoss(refused.status())) << refused.status();
  EXPECT_THAT(std::string(refused.status().message()), HasSubstr("chunk "));
  EXPECT_EQ(StatusOf("b").failure(), "");
  ASSERT_EQ(Reconfigure({"a", "b"}, 2), absl::OkStatus());
  Steps(1);
  for (const char* name : {"a", "b"}) {
    ASSERT_EQ(PinDurably(servers_[name]->get(), "job", group_->epoch(), step_), absl::OkStatus());
  }
  ExpectSameOnBoth();
}

INSTANTIATE_TEST_SUITE_P(Tiers, RottenNvmeTest, ::testing::Values(kCases[1]),
                         [](const auto& info) { return info.param.name; });
INSTANTIATE_TEST_SUITE_P(Tiers, MembersDamageTest, ::testing::ValuesIn(kCases),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace ballast::services
