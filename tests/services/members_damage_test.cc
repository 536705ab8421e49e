// Bytes of states rot on the disk of a server whose job has two copies of each chunk: the server copies what it has
// lost from the other one, beside training, and ends with the bits of an undisturbed run. Where both lose a chunk, the
// job ends and names it.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "ballast/proto/base/status.h"
#include "ballast/services/job_state/job_entry.h"
#include "ballast/services/tools/verify/verify.h"
#include "ballast/services/tools/verify/verify_command.h"
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
  // Chunks that nobody can pull from the server.
  std::set<uint64_t> RefusedBy(const std::string& name) {
    v1::PullRequest pull;
    pull.set_job("job");
    pull.set_version(step_);
    pull.set_content(v1::CONTENT_WORKING);
    std::set<uint64_t> refused;
    for (const model::Chunk& chunk : layout_.chunks()) {
      pull.set_unit(chunk.unit);
      pull.set_begin(chunk.range.begin);
      pull.set_end(chunk.range.end);
      std::string to;
      const auto pulled = group_->Pull(servers_[name]->get(), pull, absl::InfiniteFuture(), &to).Wait();
      if (pulled.ok()) continue;
      refused.insert(chunk.index);
      EXPECT_EQ(model::ReasonOf(pulled.status()), model::kNotFilled) << pulled.status();
    }
    return refused;
  }
  std::string AwaitFailure(const std::string& name) {
    for (const absl::Time end = absl::Now() + absl::Minutes(1); absl::Now() < end;) {
      if (const std::string failure = StatusOf(name).failure(); !failure.empty()) return failure;
      absl::SleepFor(absl::Milliseconds(2));
    }
    return "";
  }
  // Both servers keep a version, whose bits are in `at_kept_`, and have a later one on the disk.
  void BeginAndKeep() {
    Begin({"a", "b"}, 2);
    Steps(2);
    for (const char* name : {"a", "b"}) {
      ASSERT_EQ(PinDurably(servers_[name]->get(), "job", group_->epoch(), step_), absl::OkStatus());
    }
    kept_ = step_;
    at_kept_ = BitsOf(&reference_, kept_);
    Steps(2);
    for (const char* name : {"a", "b"}) FlushAll(name);
  }
  // Flips a bit of each state that versions alone keep, and restarts the server. The bytes as they were, by place.
  std::map<off_t, char> RotKept(const std::string& name) {
    End(name);
    std::map<off_t, char> whole;
    {
      const auto catalog = storage::Catalog::Open(servers_.at(name)->directory());
      EXPECT_TRUE(catalog.ok()) << catalog.status();
      const absl::StatusOr<JobEntry> entry = ReadJobEntry(**catalog, "job");
      EXPECT_TRUE(entry.ok()) << entry.status();
      for (const v1::PinnedVersion& pin : entry->pins) {
        for (const storage::DurableChunk& chunk : PinnedChunks(pin)) whole[static_cast<off_t>(chunk.offset + 100)] = 0;
      }
      for (const storage::DurableChunk& chunk : entry->chunks) whole.erase(static_cast<off_t>(chunk.offset + 100));
    }
    const int fd = OpenTier(name);
    for (auto& [at, byte] : whole) {
      EXPECT_EQ(::pread(fd, &byte, 1, at), 1);
      const char rotten = static_cast<char>(byte ^ 1);
      EXPECT_EQ(::pwrite(fd, &rotten, 1, at), 1);
    }
    ::close(fd);
    Restart(name);
    return whole;
  }
  static std::vector<std::vector<float>> BitsOf(TrainerGroup* group, int64_t version) {
    std::vector<std::vector<float>> bits;
    for (uint32_t tensor = 0; tensor < Tensors(); ++tensor) {
      for (const v1::Content content : {v1::CONTENT_MASTER, v1::CONTENT_MOMENT1, v1::CONTENT_MOMENT2}) {
        const auto read = group->Read(tensor, content, version);
        EXPECT_TRUE(read.ok()) << read.status();
        if (read.ok()) bits.push_back(*read);
      }
    }
    return bits;
  }
  static v1::StepHeader RestoreOf(int64_t version) {
    v1::StepHeader restore;
    restore.set_kind(v1::STEP_KIND_RESTORE);
    restore.set_restored_version(version);
    restore.set_gradient_presence(model::MakeBitmap(Tensors(), {}));
    restore.set_value_presence(model::MakeBitmap(Tensors(), {}));
    return restore;
  }
  // The kept version can be restored, and b alone then has its bits.
  void ExpectRestored() {
    const auto restored = group_->Finish(RestoreOf(kept_));
    ASSERT_TRUE(restored.ok()) << restored.status();
    AwaitFilled("b");
    ASSERT_EQ(Reconfigure({"a", "b"}, 2), absl::OkStatus());  // by whose table b holds its chunks
    ASSERT_EQ(Reconfigure({"b"}, 2, {"a"}), absl::OkStatus());
    EXPECT_EQ(BitsOf(group_.get(), step_ + 1), at_kept_);
    EXPECT_EQ(StatusOf("b").failure(), "");
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

  int64_t kept_ = 0;
  std::vector<std::vector<float>> at_kept_;
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
  const auto report = Verify(servers_.at("b")->directory(), nullptr);
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_FALSE(report->findings.empty());
  EXPECT_EQ(report->worst(), Harm::kRepaired) << ShowText(*report);
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
  EXPECT_EQ(RefusedBy("b").size(), unfilled);
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

// The log alone makes up the chunks again, as of the last decided step. But the next one was prepared without them.
TEST_P(RottenNvmeTest, ACrashBehindAPreparedStepWithoutTheChunk) {
  Begin({"a", "b"}, 2);
  Steps(3);
  AwaitIdle(servers_["b"]->get(), "job");
  RotEverything("b");
  source_.opens = false;
  Scrub("b");
  const std::set<uint64_t> lacks = RefusedBy("b");
  EXPECT_FALSE(lacks.empty());
  ++step_;
  for (uint32_t i = 0; i < group_->plan().slices().size(); ++i) {
    for (const char* name : {"a", "b"}) {
      if (name == std::string("b") && lacks.contains(group_->plan().slices()[i].chunk)) continue;
      const auto pushed =
          group_->BeginPushSlice(i, v1::SLICE_KIND_GRADIENT, GradientOf(step_), servers_[name]->get()).Wait();
      ASSERT_TRUE(pushed.ok()) << pushed.status();
    }
  }
  const auto prepared = group_->SealAll(UpdateHeader(Tensors()));
  ASSERT_TRUE(prepared.ok()) << prepared.status();
  Restart("b");
  EXPECT_EQ(StatusOf("b").failure(), "");
  EXPECT_EQ(StatusOf("b").unfilled_chunks(), lacks.size());
  ASSERT_EQ(Reconfigure({"a", "b"}, 2), absl::OkStatus());
  ASSERT_EQ(reference_.PushAll(v1::SLICE_KIND_GRADIENT, AllTensors(Tensors()), GradientOf(step_)), absl::OkStatus());
  ASSERT_TRUE(reference_.Finish(UpdateHeader(Tensors())).ok());
  ASSERT_EQ(group_->step(), step_ + 1) << "the prepared step was not adopted";
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

// All that is on the disk rots, what versions keep too: a chunk that is copied takes that along.
TEST_P(MembersDamageTest, KeptVersionsAfterACopy) {
  BeginAndKeep();
  End("b");
  RotEverything("b");
  Restart("b");
  ASSERT_EQ(Reconfigure({"a", "b"}, 2), absl::OkStatus());
  AwaitFilled("b");
  ExpectRestored();
}

// The restore waits for the copies of the chunks, which mend what it needs.
TEST_P(MembersDamageTest, ARestoreWhileChunksAreCopied) {
  BeginAndKeep();
  End("b");
  RotEverything("b");
  Restart("b");
  source_.opens = false;
  ASSERT_EQ(Reconfigure({"a", "b"}, 2), absl::OkStatus());
  std::thread opens([this] {
    absl::SleepFor(absl::Milliseconds(50));
    source_.opens = true;
  });
  ExpectRestored();
  opens.join();
}

// The chunks themselves are whole, and stay.
TEST_P(MembersDamageTest, ARestoreHasDamagedBytesOfItsVersionCopied) {
  BeginAndKeep();
  ASSERT_FALSE(RotKept("b").empty());
  ASSERT_EQ(Reconfigure({"a", "b"}, 2), absl::OkStatus());
  ExpectRestored();
}

TEST_P(MembersDamageTest, TheScrubHasDamagedBytesOfAKeptVersionCopied) {
  BeginAndKeep();
  const std::map<off_t, char> whole = RotKept("b");
  ASSERT_EQ(Reconfigure({"a", "b"}, 2), absl::OkStatus());
  Scrub("b");
  EXPECT_EQ(StatusOf("b").unfilled_chunks(), 0);
  EXPECT_EQ(StatusOf("b").scrub().damaged(), 0) << StatusOf("b").scrub().ShortDebugString();
  const int fd = OpenTier("b");
  const auto mended = [&] {
    return std::all_of(whole.begin(), whole.end(), [&](const auto& byte) {
      char now = 0;
      return ::pread(fd, &now, 1, byte.first) == 1 && now == byte.second;
    });
  };
  for (const absl::Time end = absl::Now() + absl::Minutes(1); !mended() && absl::Now() < end;) {
    absl::SleepFor(absl::Milliseconds(2));
  }
  EXPECT_TRUE(mended());
  ::close(fd);
  source_.opens = false;
  ExpectRestored();
}

// Nobody has the version whole: its restore is refused by name, as without copies, and the job goes on.
TEST_P(MembersDamageTest, AKeptVersionIsDamagedOnBothServers) {
  BeginAndKeep();
  for (const char* name : {"a", "b"}) ASSERT_FALSE(RotKept(name).empty());
  ASSERT_EQ(Reconfigure({"a", "b"}, 2), absl::OkStatus());
  const auto refused = group_->Finish(RestoreOf(kept_));
  EXPECT_TRUE(absl::IsDataLoss(refused.status())) << refused.status();
  EXPECT_THAT(std::string(refused.status().message()), HasSubstr("chunk "));
  EXPECT_EQ(StatusOf("b").failure(), "");
  Scrub("b");
  EXPECT_GT(StatusOf("b").scrub().damaged(), 0);
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
