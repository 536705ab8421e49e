// Bits of states on the disk flip while a server runs: the scrub finds them, mends what memory has, and names the rest.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "ballast/proto/base/status.h"
#include "ballast/services/job_state/job_entry.h"
#include "ballast/tests/services/trainer_group.h"
#include "ballast/tests/services/training_bits.h"

namespace ballast::services {
namespace {

using ::testing::HasSubstr;

constexpr uint64_t kMiB = uint64_t{1} << 20;
constexpr uint64_t kBlock = 4096;
constexpr storage::TierBytes kRoomy{0, 64 * kMiB, 256 * kMiB};
// Some states are on NVMe.
constexpr storage::TierBytes kTight{0, 7 * kMiB / 2, 256 * kMiB};

class ScrubTest : public ::testing::Test {
 protected:
  ScrubTest() : server_("s", kRoomy), spec_(MakeSpec("job", SmallModel())) {
    spec_.set_durability(v1::DURABILITY_STEP);
  }

  void Begin(storage::TierBytes budget, uint64_t log_steps = 0) {
    server_.options().budget = budget;
    server_.options().staging_bytes = 2 * kMiB;
    server_.options().log_steps = log_steps;
    server_.Restart();
    NextGroup();
    ASSERT_EQ(group_->Initialise(Initial), absl::OkStatus());
  }
  static v1::StepHeader RestoreOf(int64_t version) {
    v1::StepHeader restore;
    restore.set_kind(v1::STEP_KIND_RESTORE);
    restore.set_restored_version(version);
    restore.set_gradient_presence(std::string(1, 0));
    restore.set_value_presence(std::string(1, 0));
    return restore;
  }
  void NextGroup() {
    group_ = std::make_unique<TrainerGroup>(std::vector<StateServer*>{server_.get()}, spec_, 1, ++epoch_);
    ASSERT_EQ(group_->Start(), absl::OkStatus());
  }
  absl::Status Step() {
    const auto count = static_cast<uint32_t>(SmallModel().size());
    BALLAST_RETURN_IF_ERROR(group_->PushAll(v1::SLICE_KIND_GRADIENT, AllTensors(count), Initial));
    return group_->Finish(UpdateHeader(count)).status();
  }
  v1::JobStatus Job() { return server_->Status().jobs(0); }
  // Scrubs until another whole pass is over.
  v1::ScrubStatus Scrub() {
    const uint64_t passes = Job().scrub().passes();
    for (const absl::Time end = absl::Now() + absl::Minutes(1);
         Job().scrub().passes() <= passes && absl::Now() < end;) {
      server_->ScrubNext();  // nothing while the worker has not come to the piece before
    }
    EXPECT_GT(Job().scrub().passes(), passes);
    return Job().scrub();
  }
  // A pass that began after this call.
  v1::ScrubStatus ScrubAnew() {
    Scrub();
    return Scrub();
  }
  // Flips a bit in each block of states that is not all zero, labels among them.
  uint64_t RotEverything() {
    Scrub();  // behind every task of the worker
    const std::string path = server_.directory() + "/nvme.tier";
    const int fd = ::open(path.c_str(), O_RDWR);
    EXPECT_GE(fd, 0);
    std::vector<char> block(kBlock);
    uint64_t rotten = 0;
    for (off_t at = 0; ::pread(fd, block.data(), kBlock, at) == static_cast<ssize_t>(kBlock); at += kBlock) {
      if (std::all_of(block.begin(), block.end(), [](char c) { return c == 0; })) continue;
      block[100] ^= 1;
      EXPECT_EQ(::pwrite(fd, block.data(), kBlock, at), static_cast<ssize_t>(kBlock));
      ++rotten;
    }
    EXPECT_EQ(::fsync(fd), 0);
    ::close(fd);
    return rotten;
  }
  // Restarts so that no step is replayed: all moments are on the disk alone. Returns the chunks' extents.
  std::vector<storage::DurableChunk> RestartUnread() {
    const int64_t version = group_->step() - 1;
    EXPECT_EQ(PinDurably(server_.get(), "job", group_->epoch(), version), absl::OkStatus());  // flushes all
    EXPECT_EQ(UnpinDurably(server_.get(), "job", group_->epoch(), version), absl::OkStatus());
    group_.reset();
    server_.End();
    absl::StatusOr<JobEntry> entry;
    {
      const auto catalog = storage::Catalog::Open(server_.directory());
      EXPECT_TRUE(catalog.ok()) << catalog.status();
      entry = ReadJobEntry(**catalog, "job");
      EXPECT_TRUE(entry.ok()) << entry.status();
    }
    server_.Restart();
    NextGroup();
    EXPECT_EQ(group_->step(), version + 1);
    return entry->chunks;
  }
  // Flips a bit of what the extent holds at `at`.
  void Rot(const storage::DurableChunk& extent, uint64_t at) {
    std::fstream tier(server_.directory() + "/nvme.tier", std::ios::in | std::ios::out | std::ios::binary);
    tier.seekg(static_cast<std::streamoff>(extent.offset + at));
    const auto byte = static_cast<char>(tier.peek() ^ 1);
    tier.seekp(static_cast<std::streamoff>(extent.offset + at));
    EXPECT_TRUE(tier.write(&byte, 1).flush().good());
  }
  static uint64_t At(const storage::DurableChunk& extent, storage::StateArray array) {
    return storage::StateLayout().ArrayAt(array, extent.elements);
  }
  std::vector<std::vector<float>> Masters() {
    std::vector<std::vector<float>> masters;
    for (uint32_t tensor = 0; tensor < SmallModel().size(); ++tensor) {
      const auto master = group_->Read(tensor, v1::CONTENT_MASTER, group_->step() - 1);
      EXPECT_TRUE(master.ok()) << master.status();
      masters.push_back(master.value_or(std::vector<float>()));
    }
    return masters;
  }
  uint64_t Chunks() { return group_->plan().layout().chunks().size(); }

  TestServer server_;
  v1::JobSpec spec_;
  std::unique_ptr<TrainerGroup> group_;
  uint64_t epoch_ = 0;
};

TEST_F(ScrubTest, ReadsEverythingAndFindsNothingWhereNothingIs) {
  Begin(kRoomy, /*log_steps=*/3);
  for (int i = 0; i < 6; ++i) {
    ASSERT_EQ(Step(), absl::OkStatus());
    server_->ScrubNext();
  }
  const v1::ScrubStatus scrub = ScrubAnew();
  EXPECT_EQ(scrub.damaged(), 0u);
  EXPECT_EQ(scrub.mended(), 0u);
  EXPECT_GT(scrub.last_pass_seconds(), 0);
  EXPECT_GE(scrub.read_bytes(), scrub.total_bytes());
  EXPECT_GT(scrub.total_bytes(), 0u);
}

// A log of three steps: nearly every chunk is flushed with each step.
TEST_F(ScrubTest, MendsFromMemoryWhatARestartWouldNotFind) {
  Begin(kRoomy, /*log_steps=*/3);
  for (int i = 0; i < 6; ++i) ASSERT_EQ(Step(), absl::OkStatus());
  const std::vector<std::vector<float>> before = Masters();
  ASSERT_GT(RotEverything(), Chunks());
  const v1::ScrubStatus scrub = ScrubAnew();
  EXPECT_GT(scrub.mended(), 0u);
  EXPECT_EQ(scrub.damaged(), 0u) << scrub.ShortDebugString();
  EXPECT_EQ(Job().failure(), "");
  const uint64_t mended = scrub.mended();
  EXPECT_EQ(ScrubAnew().mended(), mended) << "mended for good";
  group_.reset();
  server_.Restart();
  NextGroup();
  EXPECT_EQ(group_->step(), 7);
  EXPECT_EQ(Masters(), before);
  EXPECT_EQ(Step(), absl::OkStatus());
}

TEST_F(ScrubTest, WithoutAScrubARestartRefusesTheJob) {
  Begin(kRoomy, /*log_steps=*/3);
  for (int i = 0; i < 6; ++i) ASSERT_EQ(Step(), absl::OkStatus());
  RotEverything();
  group_.reset();
  server_.Restart();
  EXPECT_NE(Job().failure(), "");
}

TEST_F(ScrubTest, NamesWhatOnlyTheDiskHasAndStopsNobody) {
  Begin(kTight);
  for (int i = 0; i < 3; ++i) ASSERT_EQ(Step(), absl::OkStatus());
  ASSERT_GT(Job().tiers(2).state_bytes(), 0u);
  RotEverything();
  const v1::ScrubStatus scrub = ScrubAnew();
  ASSERT_GT(scrub.damaged(), 0u);
  EXPECT_EQ(static_cast<uint64_t>(scrub.damage_size()), std::min<uint64_t>(scrub.damaged(), 16));
  EXPECT_THAT(scrub.damage(0), HasSubstr("of job 'job', version 3: "));
  EXPECT_THAT(scrub.damage(0), HasSubstr("nvme.tier"));
  EXPECT_THAT(scrub.damage(0), HasSubstr("the only copy"));
  EXPECT_EQ(Job().failure(), "") << "a warning, while the job still answers";
  EXPECT_EQ(ScrubAnew().damaged(), scrub.damaged()) << "told once, not added up";
}

// Not durable: an extent without a label, written in place.
TEST_F(ScrubTest, FindsRotOfAJobWithoutALogToo) {
  spec_.set_durability(v1::DURABILITY_NONE);
  Begin(kTight);
  for (int i = 0; i < 2; ++i) {
    ASSERT_EQ(Step(), absl::OkStatus());
    EXPECT_EQ(ScrubAnew().damaged(), 0u);
  }
  RotEverything();
  EXPECT_GT(ScrubAnew().damaged(), 0u);
}

TEST_F(ScrubTest, KeptVersionsAreReadTooUntilTheyAreGivenUp) {
  Begin(kRoomy, /*log_steps=*/3);
  ASSERT_EQ(Step(), absl::OkStatus());
  ASSERT_EQ(PinDurably(server_.get(), "job", group_->epoch(), 1), absl::OkStatus());
  for (int i = 0; i < 6; ++i) ASSERT_EQ(Step(), absl::OkStatus());
  EXPECT_EQ(ScrubAnew().damaged(), 0u);
  RotEverything();
  const v1::ScrubStatus scrub = ScrubAnew();
  EXPECT_GT(scrub.mended(), 0u);
  ASSERT_GT(scrub.damaged(), 0u);
  EXPECT_THAT(scrub.damage(0), HasSubstr("version 1, which is kept for restores"));
  EXPECT_EQ(Step(), absl::OkStatus());
  ASSERT_EQ(UnpinDurably(server_.get(), "job", group_->epoch(), 1), absl::OkStatus());
  EXPECT_EQ(ScrubAnew().damaged(), 0u);
}

// A kept version whose chunks have not moved on: memory still has its bits.
TEST_F(ScrubTest, AKeptVersionIsMendedAsLongAsMemoryHasIt) {
  Begin(kRoomy);
  ASSERT_EQ(Step(), absl::OkStatus());
  ASSERT_EQ(PinDurably(server_.get(), "job", group_->epoch(), 1), absl::OkStatus());
  RotEverything();
  const v1::ScrubStatus scrub = ScrubAnew();
  EXPECT_GE(scrub.mended(), Chunks());
  EXPECT_EQ(scrub.damaged(), 0u);
  for (int i = 0; i < 3; ++i) ASSERT_EQ(Step(), absl::OkStatus());
  NextGroup();
  EXPECT_EQ(group_->Finish(RestoreOf(1)).status(), absl::OkStatus());
}

// After a restart memory has the masters alone. The moments that complete them are whole on the disk.
TEST_F(ScrubTest, AMasterIsMendedWhoseMomentsNobodyHasReadYet) {
  Begin(kRoomy);
  for (int i = 0; i < 2; ++i) ASSERT_EQ(Step(), absl::OkStatus());
  const std::vector<std::vector<float>> before = Masters();
  const std::vector<storage::DurableChunk> extents = RestartUnread();
  ASSERT_EQ(extents.size(), Chunks());
  for (const storage::DurableChunk& extent : extents) Rot(extent, At(extent, storage::StateArray::kMaster));
  Rot(extents[0], storage::StateLayout().LabelAt(extents[0].elements));
  const v1::ScrubStatus scrub = ScrubAnew();
  EXPECT_EQ(scrub.mended(), Chunks());
  ASSERT_EQ(scrub.damaged(), 0u) << scrub.ShortDebugString();
  group_.reset();
  server_.Restart();
  NextGroup();
  EXPECT_EQ(Masters(), before);
  EXPECT_EQ(Step(), absl::OkStatus());
}

TEST_F(ScrubTest, MomentsThatOnlyTheDiskHadAreNamedWhileTheMasterIsServed) {
  Begin(kRoomy);
  ASSERT_EQ(Step(), absl::OkStatus());
  ASSERT_EQ(PinDurably(server_.get(), "job", group_->epoch(), 1), absl::OkStatus());
  ASSERT_EQ(Step(), absl::OkStatus());
  const std::vector<std::vector<float>> before = Masters();
  const std::vector<storage::DurableChunk> extents = RestartUnread();
  Rot(extents[1], At(extents[1], storage::StateArray::kMaster));
  Rot(extents[1], At(extents[1], storage::StateArray::kMoment2));
  const v1::ScrubStatus scrub = ScrubAnew();
  EXPECT_EQ(scrub.mended(), 0u);
  ASSERT_EQ(scrub.damaged(), 1u);
  EXPECT_THAT(scrub.damage(0), HasSubstr("chunk 1 of job 'job', version 2: "));
  EXPECT_THAT(scrub.damage(0),
              HasSubstr("cannot be repaired: its moments, which only the disk has since the restart, "));
  EXPECT_THAT(scrub.damage(0), HasSubstr("chunk 1: moment2 in"));
  EXPECT_THAT(scrub.damage(0), HasSubstr("which stops the job: restore a kept version"));
  EXPECT_EQ(Masters(), before);
  EXPECT_EQ(Job().failure(), "");
  ASSERT_EQ(group_->Finish(RestoreOf(1)).status(), absl::OkStatus());
  EXPECT_EQ(ScrubAnew().damaged(), 0u);
  EXPECT_EQ(Step(), absl::OkStatus());
}

// The restore needs nothing of what it replaces. A pin of that wants it, and is told.
TEST_F(ScrubTest, ARestoreReplacesAStateThatCannotBeReadUnderAPin) {
  Begin(kRoomy);
  ASSERT_EQ(Step(), absl::OkStatus());
  ASSERT_EQ(PinDurably(server_.get(), "job", group_->epoch(), 1), absl::OkStatus());
  const std::vector<std::vector<float>> at_one = Masters();
  ASSERT_EQ(Step(), absl::OkStatus());
  const std::vector<std::vector<float>> at_two = Masters();
  const std::vector<storage::DurableChunk> extents = RestartUnread();
  Answer<v1::PinResponse> pinned;
  v1::PinRequest pin;
  pin.set_job("job");
  pin.set_version(2);
  server_->Pin(pin, absl::InfiniteFuture(), pinned.reply());
  ASSERT_EQ(pinned.Wait().status(), absl::OkStatus());
  Rot(extents.back(), At(extents.back(), storage::StateArray::kMoment1));
  ASSERT_EQ(group_->Finish(RestoreOf(1)).status(), absl::OkStatus());
  EXPECT_EQ(Masters(), at_one);
  int lost = 0;
  for (uint32_t tensor = 0; tensor < SmallModel().size(); ++tensor) {
    const auto master = group_->Read(tensor, v1::CONTENT_MASTER, 2);
    if (master.ok()) {
      EXPECT_EQ(*master, at_two[tensor]);
      continue;
    }
    ++lost;
    EXPECT_EQ(master.status().code(), absl::StatusCode::kDataLoss) << master.status();
    EXPECT_THAT(std::string(master.status().message()), HasSubstr("of pinned version 2 is lost"));
  }
  EXPECT_GT(lost, 0);
  EXPECT_LT(lost, static_cast<int>(SmallModel().size()));
  EXPECT_EQ(Step(), absl::OkStatus());
  EXPECT_EQ(Job().failure(), "");
}

// The server's own thread, at a rate.
TEST_F(ScrubTest, GoesOnByItself) {
  server_.options().scrub_bytes_per_s = 256 * kMiB;
  Begin(kRoomy, /*log_steps=*/3);
  for (int i = 0; i < 6; ++i) ASSERT_EQ(Step(), absl::OkStatus());
  for (int i = 0; i < 12000 && Job().scrub().passes() == 0; ++i) absl::SleepFor(absl::Milliseconds(10));
  EXPECT_GT(Job().scrub().passes(), 0u);
}

}  // namespace
}  // namespace ballast::services
