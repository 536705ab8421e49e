// Jobs with durability every-K at the servers' interface: pins made and released, the knowledge after a restart, and
// the requests refused until the state is restored.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <limits>

#include "absl/time/clock.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/model/verdict.h"
#include "ballast/services/job_state/job_entry.h"
#include "ballast/services/tools/verify/verify.h"
#include "ballast/tests/services/machine_with_catalog.h"
#include "ballast/tests/services/trainer_group.h"

namespace ballast::services {
namespace {

using absl::StatusCode;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

constexpr storage::TierBytes kBudget{0, uint64_t{64} << 20, uint64_t{256} << 20};

float Initial(uint32_t tensor, uint64_t element) {
  return static_cast<float>(tensor + 1) + 1e-3f * static_cast<float>(element % 1000);
}

class EveryKJobTest : public ::testing::Test {
 protected:
  EveryKJobTest() : a_("a", kBudget), b_("b", kBudget), spec_(MakeSpec("job", SmallModel())) {
    spec_.set_durability(v1::DURABILITY_EVERY_K);
    spec_.set_pin_interval(2);
  }
  absl::Status NextGroup() {
    group_ = std::make_unique<TrainerGroup>(std::vector<StateServer*>{a_.get(), b_.get()}, spec_, 1, ++epoch_);
    return group_->Start();
  }
  absl::Status Step() {
    BALLAST_RETURN_IF_ERROR(group_->PushAll(v1::SLICE_KIND_GRADIENT, AllTensors(count_), Initial));
    return group_->Finish(UpdateHeader(count_)).status();
  }
  void Begin(int steps) {
    ASSERT_EQ(NextGroup(), absl::OkStatus());
    ASSERT_EQ(group_->Initialise(Initial), absl::OkStatus());
    for (int i = 0; i < steps; ++i) ASSERT_EQ(Step(), absl::OkStatus());
  }
  static v1::StepHeader RestoreOf(int64_t version) {
    v1::StepHeader header;
    header.set_kind(v1::STEP_KIND_RESTORE);
    header.set_restored_version(version);
    header.set_gradient_presence(std::string(1, 0));
    header.set_value_presence(std::string(1, 0));
    return header;
  }
  v1::GetJobResponse Job(TestServer& server) {
    v1::GetJobRequest request;
    request.set_job("job");
    Answer<v1::GetJobResponse> answer;
    server->GetJob(request, answer.reply());
    return answer.Wait().value_or(v1::GetJobResponse());
  }
  absl::Status Pin(TestServer& server, int64_t version, bool durable) {
    v1::PinRequest pin;
    pin.set_job("job");
    pin.set_version(version);
    pin.set_durable(durable);
    *pin.mutable_epoch() = group_->epoch();
    Answer<v1::PinResponse> pinned;
    server->Pin(pin, absl::InfiniteFuture(), pinned.reply());
    return pinned.Wait().status();
  }
  // The other server does not hear of it.
  static absl::Status CommitOn(TestServer& server, absl::Span<const v1::PreparedRecord> prepared) {
    BALLAST_ASSIGN_OR_RETURN(const v1::Decision decision, model::Decide(prepared));
    v1::CommitRequest commit;
    commit.set_job("job");
    *commit.mutable_decision() = decision;
    Answer<v1::CommitResponse> committed;
    server->Commit(commit, committed.reply());
    return committed.Wait().status();
  }
  absl::Status Unpin(TestServer& server, int64_t version) {
    return UnpinDurably(server.get(), "job", group_->epoch(), version);
  }
  static void ExpectRefused(const absl::Status& status, const char* reason, const std::string& text) {
    EXPECT_EQ(model::ReasonOf(status), reason) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(text));
  }

  TestServer a_, b_;
  v1::JobSpec spec_;
  const uint32_t count_ = static_cast<uint32_t>(SmallModel().size());
  std::unique_ptr<TrainerGroup> group_;
  uint64_t epoch_ = 0;
};

TEST_F(EveryKJobTest, AStepBehindAPinLetsTheOneBeforeGo) {
  Begin(2);
  // Step 3 says that all have version 2.
  EXPECT_EQ(Job(a_).durable_versions(0), 0);
  ASSERT_EQ(Step(), absl::OkStatus());
  EXPECT_THAT(Job(a_).durable_versions(), ElementsAre(2));
  EXPECT_THAT(Job(a_).automatic_versions(), ElementsAre(2));
  const v1::JobStatus status = a_->Status().jobs(0);
  EXPECT_EQ(status.durability(), v1::DURABILITY_EVERY_K);
  EXPECT_EQ(status.pin_interval(), 2u);
}

TEST_F(EveryKJobTest, ARestartedServerRefusesAllButARestore) {
  Begin(3);
  const absl::StatusOr<std::vector<float>> at_two = [&] {
    // Version 2 of an undisturbed twin.
    TestServer twin("t", kBudget), other("u", kBudget);
    TrainerGroup group({twin.get(), other.get()}, spec_, 1);
    EXPECT_EQ(group.Start(), absl::OkStatus());
    EXPECT_EQ(group.Initialise(Initial), absl::OkStatus());
    for (int i = 0; i < 2; ++i) {
      EXPECT_EQ(group.PushAll(v1::SLICE_KIND_GRADIENT, AllTensors(count_), Initial), absl::OkStatus());
      EXPECT_EQ(group.Finish(UpdateHeader(count_)).status(), absl::OkStatus());
    }
    return group.Read(0, v1::CONTENT_MOMENT2, 2);
  }();
  ASSERT_TRUE(at_two.ok()) << at_two.status();
  ASSERT_EQ(Pin(a_, 3, false), absl::OkStatus());  // behind the worker's tasks: version 0 has gone from the catalog
  a_.Restart();
  const v1::GetJobResponse job = Job(a_);
  EXPECT_TRUE(job.state_lost());
  EXPECT_THAT(job.automatic_versions(), ElementsAre(2));
  EXPECT_EQ(job.committed(), 4);  // the next due pin: no later step can have been prepared
  EXPECT_TRUE(a_->Status().jobs(0).state_lost());
  EXPECT_EQ(a_->Status().jobs(0).committed(), 2);
  // The group that is at work, and its requests.
  group_ = std::make_unique<TrainerGroup>(std::vector<StateServer*>{a_.get(), b_.get()}, spec_, 1, epoch_);
  ExpectRefused(group_->Open(3, std::nullopt), model::kStateLost, "resume=auto");
  ExpectRefused(Step(), model::kStateLost, "exit and restart the group with resume=auto");
  ExpectRefused(Pin(a_, 4, true), model::kStateLost, "up to version 2");
  ExpectRefused(Pin(a_, 4, false), model::kStateLost, "up to version 2");
  ExpectRefused(Unpin(a_, 2), model::kStateLost, "up to version 2");

  ASSERT_EQ(NextGroup(), absl::OkStatus());
  EXPECT_EQ(group_->restores(), 2);
  EXPECT_EQ(group_->step(), 4);
  for (TestServer* server : {&a_, &b_}) EXPECT_TRUE(Job(*server).state_lost());
  ExpectRefused(group_->SealAll(UpdateHeader(count_)).status(), model::kStateLost, "must restore version 2");
  EXPECT_EQ(model::ReasonOf(group_->Read(0, v1::CONTENT_WORKING, 3).status()), model::kStateLost);
  ASSERT_EQ(NextGroup(), absl::OkStatus());
  ASSERT_EQ(group_->Finish(RestoreOf(2)).status(), absl::OkStatus());
  EXPECT_FALSE(Job(a_).state_lost());
  const auto restored = group_->Read(0, v1::CONTENT_MOMENT2, 4);
  ASSERT_TRUE(restored.ok()) << restored.status();
  EXPECT_EQ(*restored, *at_two);
  EXPECT_EQ(Step(), absl::OkStatus());
}

// One server's pin is newer than its peer's, and contains chunks that got their first values in between.
TEST_F(EveryKJobTest, AChunkThatTheRestoredPinLacksIsZeroAgain) {
  ASSERT_EQ(NextGroup(), absl::OkStatus());
  const std::string first(1, 1), others(1, static_cast<char>(AllTensors(count_)[0] & ~1));
  const auto values = [&](const std::string& presence) {
    v1::StepHeader header = ValuesHeader(count_);
    header.set_value_presence(presence);
    EXPECT_EQ(group_->PushAll(v1::SLICE_KIND_VALUE, presence, Initial), absl::OkStatus());
    return group_->Finish(header).status();
  };
  // Skipped, so nothing has a state yet.
  v1::StepHeader skipped = UpdateHeader(count_);
  skipped.set_value_presence(AllTensors(count_));
  const auto infinite = [](uint32_t, uint64_t) { return std::numeric_limits<float>::infinity(); };
  ASSERT_EQ(group_->PushAll(v1::SLICE_KIND_VALUE, AllTensors(count_), Initial), absl::OkStatus());
  ASSERT_EQ(group_->PushAll(v1::SLICE_KIND_GRADIENT, AllTensors(count_), infinite), absl::OkStatus());
  ASSERT_EQ(group_->Finish(skipped).status(), absl::OkStatus());
  for (int i = 0; i < 2; ++i) ASSERT_EQ(values(first), absl::OkStatus());  // the pin of version 2
  for (TestServer* server : {&a_, &b_}) {
    while (Job(*server).automatic_versions().empty()) absl::SleepFor(absl::Milliseconds(1));
  }
  ASSERT_EQ(values(others), absl::OkStatus());
  ASSERT_EQ(group_->PushAll(v1::SLICE_KIND_VALUE, first, Initial), absl::OkStatus());
  v1::StepHeader header = ValuesHeader(count_);
  header.set_value_presence(first);
  const auto prepared = group_->SealAll(header);
  ASSERT_TRUE(prepared.ok()) << prepared.status();
  // Only one server learns the decision of version 4, and pins the version.
  ASSERT_EQ(CommitOn(a_, *prepared), absl::OkStatus());
  while (Job(a_).automatic_versions_size() < 2) absl::SleepFor(absl::Milliseconds(1));
  a_.Restart();
  b_.Restart();
  ASSERT_EQ(NextGroup(), absl::OkStatus());
  ASSERT_EQ(group_->restores(), 2);
  ASSERT_EQ(group_->Finish(RestoreOf(2)).status(), absl::OkStatus());
  for (uint32_t tensor = 0; tensor < count_; ++tensor) {
    const auto read = group_->Read(tensor, v1::CONTENT_MASTER, group_->step() - 1);
    ASSERT_TRUE(read.ok()) << read.status();
    for (uint64_t i = 0; i < read->size(); ++i) ASSERT_EQ((*read)[i], tensor == 0 ? Initial(0, i) : 0.0f);
  }
  EXPECT_EQ(Step(), absl::OkStatus());
}

// Each pin records the transaction that last made it wanted. So a restore decided on only one server stands, although
// the second server still has the newer pin given up by the restore.
TEST_F(EveryKJobTest, ADecidedRestoreIsNotUndoneForWhatItGaveUp) {
  Begin(2);
  const auto wait_for = [&](TestServer& server, int64_t version) {
    while (Job(server).automatic_versions_size() != 1 || Job(server).automatic_versions(0) != version) {
      absl::SleepFor(absl::Milliseconds(1));
    }
  };
  for (const int64_t version : {2, 4}) {
    for (TestServer* server : {&a_, &b_}) ASSERT_EQ(Pin(*server, version, true), absl::OkStatus());
    for (int i = 0; i < (version == 2 ? 2 : 1); ++i) ASSERT_EQ(Step(), absl::OkStatus());
  }
  for (TestServer* server : {&a_, &b_}) wait_for(*server, 4);
  ASSERT_EQ(NextGroup(), absl::OkStatus());
  const auto prepared = group_->SealAll(RestoreOf(2));
  ASSERT_TRUE(prepared.ok()) << prepared.status();
  ASSERT_EQ(CommitOn(a_, *prepared), absl::OkStatus());
  wait_for(a_, 2);
  ASSERT_EQ(Pin(a_, group_->step(), false), absl::OkStatus());  // behind the worker's tasks: the catalog knows it
  b_.Restart();
  EXPECT_THAT(Job(b_).automatic_versions(), ElementsAre(4));
  ASSERT_EQ(NextGroup(), absl::OkStatus());
  EXPECT_EQ(group_->restores(), 2);
  // The same after a restart of the first server from its catalog.
  a_.Restart();
  ASSERT_EQ(NextGroup(), absl::OkStatus());
  EXPECT_EQ(group_->restores(), 2);
  ASSERT_EQ(group_->Finish(RestoreOf(2)).status(), absl::OkStatus());
  EXPECT_EQ(Step(), absl::OkStatus());
}

TEST_F(EveryKJobTest, AChangedWantOfAPinDoesNotWriteThePinAgain) {
  MachineWithCatalog machine;
  a_.options().foundation = &machine;
  a_.Restart();
  Begin(3);
  for (TestServer* server : {&a_, &b_}) ASSERT_EQ(Pin(*server, 2, true), absl::OkStatus());
  // Once all have version 4, the servers give up version 2, which then stays for the request alone.
  for (int i = 0; i < 2; ++i) ASSERT_EQ(Step(), absl::OkStatus());
  // The worker writes this pin behind whatever came before.
  for (TestServer* server : {&a_, &b_}) ASSERT_EQ(Pin(*server, 5, true), absl::OkStatus());
  EXPECT_EQ(machine.writes("job/job/" + CatalogPin(2)), 1);
  EXPECT_EQ(machine.writes("job/job/" + CatalogWanted(2)), 2);
  EXPECT_THAT(Job(a_).automatic_versions(), ElementsAre(4));
  b_.Restart();
  EXPECT_THAT(Job(b_).automatic_versions(), ElementsAre(4));
  EXPECT_THAT(Job(b_).durable_versions(), ElementsAre(2, 4, 5));

  ASSERT_EQ(Unpin(a_, 2), absl::OkStatus());
  EXPECT_THAT(machine.Keys("job/job/"), Not(Contains(HasSubstr(CatalogPin(2).substr(4)))));
  a_.End();  // before the machine
}

TEST_F(EveryKJobTest, PinsOfTwoLivesAreRefusedAndVerifySaysSo) {
  Begin(0);
  for (TestServer* server : {&a_, &b_}) ASSERT_EQ(Pin(*server, 0, true), absl::OkStatus());
  for (int i = 0; i < 3; ++i) ASSERT_EQ(Step(), absl::OkStatus());
  a_.End();
  {
    const auto catalog = storage::Catalog::Open(a_.directory());
    ASSERT_TRUE(catalog.ok()) << catalog.status();
    auto entry = ReadJobEntry(**catalog, "job");
    ASSERT_TRUE(entry.ok() && entry->pins.size() == 2);
    std::vector<storage::DurableChunk> chunks = PinnedChunks(entry->pins[0]);
    ++chunks[0].life;
    entry->pins[0].set_chunks(0, chunks[0].Encode());
    const auto [key, value] = PinPair("job", entry->pins[0]);
    ASSERT_EQ((*catalog)->Put(key, value), absl::OkStatus());
  }
  const auto report = Verify(a_.directory(), nullptr);
  ASSERT_TRUE(report.ok()) << report.status();
  std::string found;
  for (const Finding& finding : report->findings) absl::StrAppend(&found, finding.what, "\n");
  EXPECT_THAT(found, HasSubstr("another life"));
  a_.Restart();
  const v1::JobStatus status = a_->Status().jobs(0);
  EXPECT_THAT(status.failure(), HasSubstr("of life"));
}

TEST_F(EveryKJobTest, WithoutACommonPinTheJobIsLost) {
  ASSERT_EQ(NextGroup(), absl::OkStatus());
  ASSERT_EQ(group_->PushAll(v1::SLICE_KIND_VALUE, AllTensors(count_), Initial), absl::OkStatus());
  ASSERT_EQ(group_->SealAll(ValuesHeader(count_)).status(), absl::OkStatus());  // prepared, and nowhere decided
  b_.Restart();
  EXPECT_TRUE(Job(b_).state_lost());
  EXPECT_THAT(Job(b_).durable_versions(), IsEmpty());
  const absl::Status lost = NextGroup();
  EXPECT_EQ(lost.code(), StatusCode::kDataLoss);
  ExpectRefused(lost, model::kStateLost, "there is no version that all servers have pinned");
}

TEST_F(EveryKJobTest, WhatNeverPreparedAStepLostNothing) {
  ASSERT_EQ(NextGroup(), absl::OkStatus());
  a_.Restart();
  EXPECT_FALSE(Job(a_).state_lost());
  Begin(1);
}

TEST_F(EveryKJobTest, ADroppedJobLeavesNoSpaceTaken) {
  const uint64_t before = a_->Status().tiers(2).used_bytes();
  Begin(3);
  a_.Restart();
  for (TestServer* server : {&a_, &b_}) {
    EXPECT_GT((*server)->Status().tiers(2).used_bytes(), before);
    v1::DropJobRequest drop;
    drop.set_job("job");
    *drop.mutable_epoch() = Job(*server).promised();
    Answer<v1::DropJobResponse> dropped;
    (*server)->DropJob(drop, dropped.reply());
    ASSERT_EQ(dropped.Wait().status(), absl::OkStatus());
    EXPECT_EQ((*server)->Status().tiers(2).used_bytes(), before);
    server->Restart();
    EXPECT_EQ((*server)->Status().jobs_size(), 0);
  }
}

// A log left beside an every-K job, or a store without records below a job with a log, would lose the job at the next
// restart.
TEST_F(EveryKJobTest, ARefusedOpenOfAnotherDurabilityLeavesNothing) {
  for (const bool every_k_first : {false, true}) {
    SCOPED_TRACE(every_k_first);
    TestServer a("a", kBudget), b("b", kBudget);
    const std::vector<StateServer*> servers = {a.get(), b.get()};
    v1::JobSpec refused = spec_, made = spec_;
    v1::JobSpec& logged = every_k_first ? made : refused;
    logged.set_durability(v1::DURABILITY_STEP);
    logged.set_pin_interval(0);
    refused.mutable_registrations(0)->set_version(5);  // of a job that these servers do not have
    TrainerGroup before(servers, refused, 1, 1);
    std::vector<v1::GetJobResponse> answers;
    ASSERT_EQ(before.Fence(&answers), absl::OkStatus());
    v1::Decision unknown;
    unknown.set_step(5);
    ExpectRefused(before.Open(5, unknown), model::kDiverged, "cannot start from");

    group_ = std::make_unique<TrainerGroup>(servers, made, 1, 2);
    ASSERT_EQ(group_->Start(), absl::OkStatus());
    ASSERT_EQ(group_->Initialise(Initial), absl::OkStatus());
    for (int i = 0; i < 3; ++i) ASSERT_EQ(Step(), absl::OkStatus());
    a.Restart();
    const v1::GetJobResponse job = Job(a);
    EXPECT_EQ(job.state_lost(), !every_k_first);
    if (every_k_first) {
      EXPECT_EQ(job.committed() + job.has_prepared(), 3);
    } else {
      EXPECT_THAT(job.automatic_versions(), Contains(2));  // the one before may not have gone yet
    }
    group_ = std::make_unique<TrainerGroup>(std::vector<StateServer*>{a.get(), b.get()}, made, 1, 3);
    ASSERT_EQ(group_->Start(), absl::OkStatus());
    if (!every_k_first) {
      ASSERT_EQ(group_->Finish(RestoreOf(2)).status(), absl::OkStatus());
    }
    EXPECT_EQ(Step(), absl::OkStatus());
    group_.reset();
  }
}

TEST_F(EveryKJobTest, ABaseThatThisServerCannotHavePreparedIsRefused) {
  Begin(3);
  a_.Restart();
  TrainerGroup group({a_.get(), b_.get()}, spec_, 1, ++epoch_);
  std::vector<v1::GetJobResponse> answers;
  ASSERT_EQ(group.Fence(&answers), absl::OkStatus());
  for (const int64_t base : {int64_t{-1}, int64_t{1}, int64_t{5}, std::numeric_limits<int64_t>::max()}) {
    SCOPED_TRACE(base);
    v1::OpenRequest open = group.open_request(base, std::nullopt);
    open.set_restores(2);
    Answer<v1::OpenResponse> answer;
    a_->Open(open, absl::InfiniteFuture(), answer.reply());
    EXPECT_FALSE(answer.Wait().ok());
  }
  a_.Restart();
  EXPECT_EQ(Job(a_).committed(), 4);
  EXPECT_EQ(NextGroup(), absl::OkStatus());
}

TEST_F(EveryKJobTest, PinsThatWereAskedForAreBoundedAlsoWhereTheServerHasThemAnyway) {
  spec_.set_pin_interval(1);
  Begin(0);
  for (int i = 0; i < 16; ++i) {
    for (TestServer* server : {&a_, &b_}) ASSERT_EQ(Pin(*server, i, true), absl::OkStatus());
    ASSERT_EQ(Step(), absl::OkStatus());
  }
  ExpectRefused(Pin(a_, 16, true), model::kBudget, "give one up first");
  ASSERT_EQ(Unpin(a_, 3), absl::OkStatus());
  EXPECT_EQ(Pin(a_, 16, true), absl::OkStatus());
}

// A version that rotted on one server: given up there, the group goes back to an older one.
TEST_F(EveryKJobTest, AnUnreadablePinIsGivenUpWhileTheStateIsLost) {
  Begin(0);
  for (TestServer* server : {&a_, &b_}) ASSERT_EQ(Pin(*server, 0, true), absl::OkStatus());
  for (int i = 0; i < 3; ++i) ASSERT_EQ(Step(), absl::OkStatus());
  EXPECT_EQ(Unpin(a_, 2), absl::OkStatus());  // a word: the server keeps it
  EXPECT_THAT(Job(a_).durable_versions(), ElementsAre(0, 2));
  a_.End();
  {
    const auto catalog = storage::Catalog::Open(a_.directory());
    ASSERT_TRUE(catalog.ok()) << catalog.status();
    const auto entry = ReadJobEntry(**catalog, "job");
    ASSERT_TRUE(entry.ok() && entry->pins.size() == 2);
    std::fstream tier(a_.directory() + "/nvme.tier", std::ios::in | std::ios::out | std::ios::binary);
    for (const storage::DurableChunk& chunk : PinnedChunks(entry->pins[1])) {
      tier.seekp(static_cast<std::streamoff>(chunk.offset));
      tier.write("rot", 3);
    }
  }
  a_.Restart();
  ASSERT_EQ(NextGroup(), absl::OkStatus());
  ASSERT_EQ(group_->restores(), 2);
  const absl::Status rotten = group_->SealAll(RestoreOf(2)).status();
  EXPECT_EQ(rotten.code(), StatusCode::kDataLoss);
  EXPECT_THAT(std::string(rotten.message()), HasSubstr("give the version up"));
  EXPECT_EQ(Unpin(a_, 2), absl::OkStatus());
  EXPECT_THAT(Job(a_).durable_versions(), ElementsAre(0));
  a_.Restart();
  ASSERT_EQ(NextGroup(), absl::OkStatus());
  EXPECT_EQ(group_->restores(), 0);
  ASSERT_EQ(group_->Finish(RestoreOf(0)).status(), absl::OkStatus());
  EXPECT_EQ(Step(), absl::OkStatus());
}

TEST_F(EveryKJobTest, ASpecWithoutKIsRefused) {
  spec_.set_pin_interval(0);
  const absl::Status status = NextGroup();
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  ExpectRefused(status, model::kBadSpec, "pin_interval");
}

}  // namespace
}  // namespace ballast::services
