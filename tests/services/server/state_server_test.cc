#include "ballast/services/server/state_server.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/model/protocol.h"
#include "ballast/proto/model/tiling.h"
#include "ballast/services/counters/counters.h"
#include "ballast/tests/services/gated_disk.h"
#include "ballast/tests/services/machine_with_disk.h"
#include "ballast/tests/services/trainer_group.h"
#include "ballast/tests/small_disk.h"

namespace ballast::services {
namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;

float Ones(uint32_t, uint64_t) { return 1.0f; }

bool Contains(const absl::Status& status, absl::string_view text) {
  return status.message().find(text) != absl::string_view::npos;
}

absl::StatusOr<v1::GetJobResponse> GetJob(StateServer* server, const std::string& job) {
  v1::GetJobRequest request;
  request.set_job(job);
  Answer<v1::GetJobResponse> answer;
  server->GetJob(request, answer.reply());
  return answer.Wait();
}

absl::Status Drop(StateServer* server, const std::string& job, const v1::Epoch& epoch) {
  v1::DropJobRequest request;
  request.set_job(job);
  *request.mutable_epoch() = epoch;
  Answer<v1::DropJobResponse> answer;
  server->DropJob(request, answer.reply());
  return answer.Wait().status();
}

TEST(StateServer, RefusesADirectoryItCannotWrite) {
  ScratchDirectory scratch;
  const std::string file = scratch.path() + "/file";
  std::ofstream(file) << "not a directory";
  StateServerOptions options;
  options.data_directory = file + "/data";
  options.budget.dram = kMiB;
  const absl::Status status = StateServer::Start(options).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
  EXPECT_EQ(model::ReasonOf(status), model::kIo);
  EXPECT_TRUE(Contains(status, "data directory '" + file + "/data' is not writable")) << status;
}

// A member of so many that routing 2^16 chunks takes a while.
v1::OpenRequest SlowDryRun(const std::string& job) {
  v1::OpenRequest open;
  *open.mutable_spec() = MakeSpec(job, {{"t", "u", uint64_t{1} << 32, 0}});
  open.set_spec_digest(model::SpecDigest(open.spec()));
  *open.mutable_tiling() = model::EvenTiling(1);
  open.set_base(-1);
  open.set_dry_run(true);
  open.set_protocol_version(model::kProtocolVersion);
  for (int i = 0; i < 256; ++i) {
    v1::Member* const member = open.add_members();
    member->set_server_id(i == 0 ? "s" : absl::StrCat("s", i));
    member->set_weight(1);
  }
  return open;
}

// Its threads begin nothing that they get from Hold to `go`.
class HeldThreads : public ThisMachine {
 public:
  std::unique_ptr<Executor> MakeExecutor(int threads) override {
    return std::make_unique<Held>(this, ThisMachine::MakeExecutor(threads));
  }
  void Hold() { hold_ = true; }
  absl::Notification go;

 private:
  class Held : public Executor {
   public:
    Held(HeldThreads* machine, std::unique_ptr<Executor> executor)
        : machine_(machine), executor_(std::move(executor)) {}
    void Join() override { executor_->Join(); }
    absl::Status Prepare() override { return executor_->Prepare(); }
    void Post(std::function<void()> work) override {
      if (!machine_->hold_) return executor_->Post(std::move(work));
      executor_->Post([machine = machine_, work = std::move(work)] {
        machine->go.WaitForNotification();
        work();
      });
    }

   private:
    HeldThreads* const machine_;
    const std::unique_ptr<Executor> executor_;
  };
  std::atomic<bool> hold_ = false;
};

TEST(StateServer, DryRunsOfNewJobsGoToTheirAskersInTurn) {
  HeldThreads machine;
  TestServer server("s");
  server.options().foundation = &machine;
  server.options().answer_threads = 1;  // answers come in the order of the plans
  server.Restart();
  machine.Hold();
  absl::Mutex mu;
  std::vector<std::string> order;
  const auto ask = [&](const std::string& who, const std::string& job) {
    const auto caller = std::make_shared<Caller>();
    caller->set_identity(who);
    server->Open(SlowDryRun(job), {absl::InfiniteFuture(), caller}, [&, who](const absl::StatusOr<v1::OpenResponse>&) {
      absl::MutexLock lock(&mu);
      order.push_back(who);
    });
  };
  for (int i = 0; i < 6; ++i) ask("greedy", absl::StrCat("g", i));
  ask("modest", "m");
  machine.go.Notify();
  {
    absl::MutexLock lock(&mu);
    const auto all = [&] { return order.size() == 7; };
    ASSERT_TRUE(mu.AwaitWithTimeout(absl::Condition(&all), absl::Minutes(2)));
  }
  const auto place = std::find(order.begin(), order.end(), "modest") - order.begin();
  EXPECT_LE(place, 1) << absl::StrJoin(order, " ");
}

// Its plan would take some ten seconds: the server does not wait for it.
TEST(StateServer, AStopEndsTheDryRunsOfNewJobs) {
  TestServer server("s");
  v1::OpenRequest open = SlowDryRun("j");
  *open.mutable_spec() = MakeSpec("j", {{"t", "u", (uint64_t{1} << 36) - (1 << 16), 0}});
  open.set_spec_digest(model::SpecDigest(open.spec()));
  Answer<v1::OpenResponse> answer;
  server->Open(open, absl::InfiniteFuture(), answer.reply());
  absl::SleepFor(absl::Milliseconds(300));
  const absl::Time began = absl::Now();
  server->Stop();
  std::cout << "a stop beside a plan of 2^28 routes: " << absl::Now() - began << "\n";
  EXPECT_EQ(model::ReasonOf(answer.Wait().status()), model::kServerDown);
}

TEST(StateServer, RefusesADirectoryInUse) {
  TestServer first("s");
  const absl::Status status = StateServer::Start(first.options()).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  EXPECT_TRUE(Contains(status, absl::StrCat("data directory ", first.directory(), " is in use by process ", getpid())))
      << status;
}

TEST(StateServer, KeepsItsNameAndRefusesAnother) {
  TestServer server("");
  const std::string made = server->server_id();
  EXPECT_EQ(made.substr(0, 7), "server-");
  server.Restart();
  EXPECT_EQ(server->server_id(), made);
  ScratchDirectory directory;
  StateServerOptions options = server.options();
  options.data_directory = directory.path();
  options.server_id = "one";
  ASSERT_TRUE(StateServer::Start(options).ok());
  options.server_id = "two";
  const absl::Status status = StateServer::Start(options).status();
  EXPECT_EQ(model::ReasonOf(status), model::kBadConfig);
  EXPECT_TRUE(Contains(status, "belongs to server 'one', server_id says 'two'")) << status;
}

TEST(StateServer, AnswersABudgetThatIsShortWithTheNumbersAndStaysAsItWas) {
  TestServer server("s", {0, 2 * kMiB, 0});
  TrainerGroup group({server.get()}, MakeSpec("job", SmallModel()), 1);
  const absl::Status status = group.Start();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  EXPECT_EQ(model::ReasonOf(status), model::kBudget);
  uint64_t needed = 0;
  for (const model::Chunk& chunk : group.plan().layout().chunks()) {
    const uint64_t n = chunk.range.size();
    needed += storage::StateLayout().StateBytes(n) + storage::StateLayout().WorkingBytes(n) + 4 * n;
  }
  EXPECT_TRUE(Contains(status, absl::StrCat("dram is short of ", needed - 2 * kMiB, " bytes"))) << status;
  EXPECT_TRUE(Contains(status, "job 'job' does not fit on server 's'")) << status;
  EXPECT_EQ(server->Status().tiers(1).used_bytes(), 0u);

  // The job is still where it was, and a smaller model fits.
  TrainerGroup small({server.get()}, MakeSpec("job", {{"a", "u", 1000, 0}}), 1, 2);
  EXPECT_EQ(small.Start(), absl::OkStatus());
  EXPECT_GT(server->Status().tiers(1).used_bytes(), 0u);
}

TEST(StateServer, JobsShareBudgetsButNotState) {
  TestServer server("s", {0, 6 * kMiB, 0});
  TrainerGroup a({server.get()}, MakeSpec("a", SmallModel()), 1);
  TrainerGroup b({server.get()}, MakeSpec("b", SmallModel()), 1);
  ASSERT_EQ(a.Start(), absl::OkStatus());
  EXPECT_EQ(model::ReasonOf(b.Start()), model::kBudget);
  ASSERT_EQ(a.Initialise(Ones), absl::OkStatus());
  ASSERT_EQ(Drop(server.get(), "a", a.epoch()), absl::OkStatus());
  EXPECT_FALSE(GetJob(server.get(), "a")->exists());
  TrainerGroup again({server.get()}, MakeSpec("b", SmallModel()), 1, 2);
  EXPECT_EQ(again.Start(), absl::OkStatus());
  EXPECT_EQ(again.Initialise(Ones), absl::OkStatus());
}

TEST(StateServer, ADropHoldsUpNobodyElse) {
  GatedDisk disk;
  TestServer server("s", {0, 16 * kMiB, 256 * kMiB});
  server.options().foundation = &disk;
  server.Restart();
  v1::JobSpec spec = MakeSpec("busy", SmallModel());
  spec.set_durability(v1::DURABILITY_STEP);
  TrainerGroup busy({server.get()}, spec, 1);
  std::vector<v1::GetJobResponse> answers;
  ASSERT_EQ(busy.Fence(&answers), absl::OkStatus());
  const v1::OpenRequest request = busy.open_request(-1, std::nullopt);
  disk.Hold([](const std::string& path, GatedOperation operation, uint64_t) {
    return absl::EndsWith(path, "/log-busy") && operation == GatedOperation::kWrite;
  });
  Answer<v1::OpenResponse> open;
  server->Open(request, absl::InfiniteFuture(), open.reply());
  disk.AwaitWaiting();
  // Waits for what the job's thread is doing.
  v1::DropJobRequest drop;
  drop.set_job("busy");
  *drop.mutable_epoch() = busy.epoch();
  Answer<v1::DropJobResponse> dropped;
  server->DropJob(drop, dropped.reply());
  TrainerGroup other({server.get()}, MakeSpec("other", SmallModel()), 1);
  EXPECT_EQ(other.Fence(&answers), absl::OkStatus());
  EXPECT_FALSE(dropped.arrived());
  disk.Release();
  EXPECT_EQ(dropped.Wait().status(), absl::OkStatus());
  EXPECT_EQ(model::ReasonOf(open.Wait().status()), model::kUnknownJob);
}

TEST(StateServer, RepliesOfADropMayCallAgain) {
  TestServer server("s");
  v1::DropJobRequest drop;
  drop.set_job("nobody");
  Answer<v1::GetServerStatusResponse> status;
  server->DropJob(drop, [&](const absl::StatusOr<v1::DropJobResponse>& response) {
    EXPECT_EQ(model::ReasonOf(response.status()), model::kUnknownJob);
    status.reply()(server->Status());
  });
  EXPECT_TRUE(status.Wait().ok());
}

TEST(StateServer, AFailedJobSaysWhyAndOthersGoOn) {
  TestServer server("s", {0, 6 * kMiB, 64 * kMiB});
  TrainerGroup lost({server.get()}, MakeSpec("lost", {{"large", "u", 6 << 16, 0}}), 1);
  ASSERT_EQ(lost.Start(), absl::OkStatus());
  ASSERT_EQ(lost.Initialise(Ones), absl::OkStatus());
  ASSERT_TRUE(lost.Read(0, v1::CONTENT_WORKING, 0).ok());
  TrainerGroup well({server.get()}, MakeSpec("well", {{"small", "u", 256, 0}}), 1);
  ASSERT_EQ(well.Start(), absl::OkStatus());
  ASSERT_EQ(well.Initialise(Ones), absl::OkStatus());
  ASSERT_GT(server->Status().tiers(2).state_bytes(), 0u);

  // The disk loses what was written.
  std::filesystem::resize_file(server.directory() + "/nvme.tier", 0);
  ASSERT_EQ(lost.PushAll(v1::SLICE_KIND_GRADIENT, AllTensors(1), Ones), absl::OkStatus());
  ASSERT_EQ(lost.Finish(UpdateHeader(1)).status(), absl::OkStatus());
  const absl::Status status = lost.Read(0, v1::CONTENT_MASTER, 1).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
  EXPECT_TRUE(Contains(status, "job 'lost' stopped on server 's': step 1 could not be applied to its chunks"))
      << status;
  EXPECT_TRUE(Contains(status, "Other jobs go on; drop this one")) << status;
  EXPECT_EQ(server->Status().jobs(0).failure(), status.message());
  EXPECT_EQ(lost.PushSlice(0, v1::SLICE_KIND_GRADIENT, Ones), status);

  ASSERT_EQ(well.PushAll(v1::SLICE_KIND_GRADIENT, AllTensors(1), Ones), absl::OkStatus());
  ASSERT_EQ(well.Finish(UpdateHeader(1)).status(), absl::OkStatus());
  EXPECT_TRUE(well.Read(0, v1::CONTENT_WORKING, 1).ok());
  EXPECT_EQ(Drop(server.get(), "lost", lost.epoch()), absl::OkStatus());
}

TEST(StateServer, StepsGoOnWhenTheCatalogsDiskIsFull) {
  // Too small for RocksDB to set space aside for its log; its last page takes some steps to fill.
  SmallDisk disk(kMiB / 2);
  if (!disk.mounted()) GTEST_SKIP() << "a tmpfs cannot be mounted here: " << disk.why_not();
  StateServerOptions options;
  options.data_directory = disk.path() + "/data";
  options.budget.dram = 64 * kMiB;
  options.server_id = "s";
  auto server = StateServer::Start(options);
  ASSERT_TRUE(server.ok()) << server.status();
  TrainerGroup group({server->get()}, MakeSpec("job", SmallModel()), 1);
  ASSERT_EQ(group.Start(), absl::OkStatus());
  ASSERT_EQ(group.Initialise(Ones), absl::OkStatus());
  ASSERT_TRUE(group.Read(0, v1::CONTENT_WORKING, 0).ok());
  disk.Fill();
  for (int64_t step = 1; step <= 200; ++step) {
    ASSERT_EQ(group.PushAll(v1::SLICE_KIND_GRADIENT, AllTensors(4), Ones), absl::OkStatus());
    ASSERT_EQ(group.Finish(UpdateHeader(4)).status(), absl::OkStatus());
    ASSERT_EQ(group.Read(0, v1::CONTENT_WORKING, step).status(), absl::OkStatus());
  }
  // A promise must be durable.
  TrainerGroup next({server->get()}, MakeSpec("job", SmallModel()), 1, 2);
  absl::Status status = next.Start();
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal) << status;
  EXPECT_EQ(model::ReasonOf(status), model::kDiskFull);
  EXPECT_TRUE(Contains(status, "No space left on device") && Contains(status, "then restart the server")) << status;
  EXPECT_FALSE(Contains(status, "Other jobs go on")) << status;
}

TEST(StateServer, KnowsAfterARestartWhoseStateItLost) {
  TestServer server("s");
  TrainerGroup group({server.get()}, MakeSpec("job", SmallModel()), 1);
  ASSERT_EQ(group.Start(), absl::OkStatus());
  ASSERT_EQ(group.Initialise(Ones), absl::OkStatus());
  ASSERT_EQ(group.PushAll(v1::SLICE_KIND_GRADIENT, AllTensors(4), Ones), absl::OkStatus());
  ASSERT_TRUE(group.Finish(UpdateHeader(4)).ok());
  ASSERT_TRUE(group.Read(0, v1::CONTENT_WORKING, 1).ok());
  server.Restart();

  const auto job = GetJob(server.get(), "job");
  ASSERT_TRUE(job.ok()) << job.status();
  EXPECT_TRUE(job->exists());
  EXPECT_TRUE(job->state_lost());
  EXPECT_EQ(job->committed(), 1);
  EXPECT_EQ(job->promised().counter(), 1u);
  EXPECT_EQ(job->open().spec().name(), "job");
  TrainerGroup next({server.get()}, MakeSpec("job", SmallModel()), 1, 2);
  const absl::Status status = next.Start();
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(model::ReasonOf(status), model::kStateLost);
  EXPECT_TRUE(Contains(status, "server 's'") && Contains(status, "ballastctl drop")) << status;
  EXPECT_EQ(model::ReasonOf(next.Open(0, v1::Decision())), model::kStateLost);
  EXPECT_TRUE(server->Status().jobs(0).state_lost());

  EXPECT_EQ(model::ReasonOf(Drop(server.get(), "job", next.epoch())), model::kStaleEpoch);
  ASSERT_EQ(Drop(server.get(), "job", group.epoch()), absl::OkStatus());
  EXPECT_FALSE(GetJob(server.get(), "job")->exists());
  server.Restart();
  EXPECT_FALSE(GetJob(server.get(), "job")->exists());
  TrainerGroup fresh({server.get()}, MakeSpec("job", SmallModel()), 1);
  EXPECT_EQ(fresh.Start(), absl::OkStatus());
}

TEST(StateServer, KeepsThePromiseOfAJobThatHadNoStateYet) {
  TestServer server("s");
  TrainerGroup group({server.get()}, MakeSpec("job", SmallModel()), 1, 5);
  ASSERT_EQ(group.Start(), absl::OkStatus());
  server.Restart();
  const auto job = GetJob(server.get(), "job");
  ASSERT_TRUE(job.ok()) << job.status();
  EXPECT_FALSE(job->state_lost());
  EXPECT_EQ(job->promised().counter(), 5u);
  TrainerGroup older({server.get()}, MakeSpec("job", SmallModel()), 1, 4);
  EXPECT_EQ(model::ReasonOf(older.Start()), model::kStaleEpoch);
  // The group sends Open again and goes on.
  TrainerGroup same({server.get()}, MakeSpec("job", SmallModel()), 1, 5);
  ASSERT_EQ(same.Open(-1, std::nullopt), absl::OkStatus());
  EXPECT_EQ(same.Initialise(Ones), absl::OkStatus());
}

absl::Status Fence(StateServer* server, const std::string& job, uint64_t counter) {
  v1::FenceRequest request;
  request.set_job(job);
  request.mutable_epoch()->set_counter(counter);
  request.mutable_epoch()->set_nonce(7);
  request.set_protocol_version(model::kProtocolVersion);
  Answer<v1::FenceResponse> answer;
  server->Fence(request, absl::InfiniteFuture(), answer.reply());
  return answer.Wait().status();
}

absl::StatusOr<v1::OpenResponse> DryRun(StateServer* server, const TrainerGroup& group) {
  v1::OpenRequest request = group.open_request(-1, std::nullopt);
  request.set_dry_run(true);
  Answer<v1::OpenResponse> answer;
  server->Open(request, absl::InfiniteFuture(), answer.reply());
  return answer.Wait();
}

v1::JobSpec TooLarge(const std::string& name) { return MakeSpec(name, {{"large", "u", 64 << 16, 0}}); }
v1::JobSpec Tiny(const std::string& name) { return MakeSpec(name, {{"small", "u", 256, 0}}); }

TEST(UnopenedJobs, FirstOpensThatFailLeaveNothing) {
  TestServer server("s", {0, 4 * kMiB, 16 * kMiB});
  for (int i = 0; i < 300; ++i) {
    v1::JobSpec spec = TooLarge(absl::StrCat("job", i));
    if (i % 2 == 0) spec.set_durability(v1::DURABILITY_STEP);
    TrainerGroup group({server.get()}, spec, 1);
    ASSERT_EQ(model::ReasonOf(group.Start()), model::kBudget) << i;
  }
  EXPECT_EQ(server->Status().jobs_size(), 0);
  EXPECT_FALSE(GetJob(server.get(), "job0")->exists());
  const v1::GetServerStatusResponse status = server->Status();
  for (const v1::TierStatus& tier : status.tiers()) EXPECT_EQ(tier.used_bytes(), 0u) << tier.tier();
  server.Restart();
  EXPECT_EQ(server->Status().jobs_size(), 0);
}

TEST(UnopenedJobs, AGroupAfterAFailedOneWorksAndTheFailedOneIsRefused) {
  TestServer server("s", {0, 4 * kMiB, 0});
  TrainerGroup failed({server.get()}, TooLarge("job"), 1, 5);
  ASSERT_EQ(model::ReasonOf(failed.Start()), model::kBudget);
  EXPECT_EQ(model::ReasonOf(failed.Open(-1, std::nullopt)), model::kUnknownJob);
  TrainerGroup next({server.get()}, Tiny("job"), 1, 6);
  ASSERT_EQ(next.Start(), absl::OkStatus());
  ASSERT_EQ(next.Initialise(Ones), absl::OkStatus());
  EXPECT_EQ(model::ReasonOf(failed.Open(-1, std::nullopt)), model::kStaleEpoch);
  EXPECT_EQ(model::ReasonOf(Fence(server.get(), "job", 5)), model::kStaleEpoch);
  // The server does not remember how far the failed group counted: a successor that begins at 1 is no worse off.
  TrainerGroup other({server.get()}, TooLarge("other"), 1, 5);
  ASSERT_EQ(model::ReasonOf(other.Start()), model::kBudget);
  TrainerGroup first({server.get()}, Tiny("other"), 1, 1);
  ASSERT_EQ(first.Start(), absl::OkStatus());
  const absl::Status stale = other.Open(-1, std::nullopt);
  EXPECT_TRUE(Contains(stale, "was never promised")) << stale;
  EXPECT_EQ(first.Initialise(Ones), absl::OkStatus());
}

TEST(UnopenedJobs, ADryRunLeavesNothing) {
  TestServer server("s", {0, 4 * kMiB, 0});
  for (int i = 0; i < 300; ++i) {
    const auto fits = DryRun(server.get(), TrainerGroup({server.get()}, Tiny(absl::StrCat("job", i)), 1));
    ASSERT_TRUE(fits.ok()) << fits.status();
    EXPECT_TRUE(absl::StrContains(fits->plan(), "dram holds the state of 1 chunks")) << fits->plan();
  }
  const absl::Status status = DryRun(server.get(), TrainerGroup({server.get()}, TooLarge("large"), 1)).status();
  EXPECT_EQ(model::ReasonOf(status), model::kBudget);
  EXPECT_TRUE(Contains(status, "job 'large' does not fit on server 's'")) << status;
  EXPECT_EQ(model::ReasonOf(DryRun(server.get(), TrainerGroup({server.get()}, Tiny("a/b"), 1)).status()),
            model::kBadSpec);
  EXPECT_EQ(server->Status().jobs_size(), 0);
  EXPECT_EQ(server->Status().tiers(1).used_bytes(), 0u);
  EXPECT_FALSE(GetJob(server.get(), "job0")->exists());
  server.Restart();
  EXPECT_EQ(server->Status().jobs_size(), 0);
}

TEST(UnopenedJobs, AFirstFenceThatIsRefusedLeavesNothing) {
  TestServer server("s");
  EXPECT_EQ(model::ReasonOf(Fence(server.get(), "job", uint64_t{1} << 40)), model::kBadRequest);
  EXPECT_EQ(server->Status().jobs_size(), 0);
}

TEST(UnopenedJobs, TheOldestYieldsWhenAllPlacesAreTaken) {
  TestServer server("s");
  TrainerGroup opened({server.get()}, Tiny("opened"), 1);
  ASSERT_EQ(opened.Start(), absl::OkStatus());
  for (int i = 0; i < 255; ++i) ASSERT_EQ(Fence(server.get(), absl::StrCat("fenced", i), 1), absl::OkStatus());
  ASSERT_EQ(server->Status().jobs_size(), 256);
  ASSERT_EQ(Fence(server.get(), "more", 1), absl::OkStatus());
  EXPECT_EQ(server->Status().jobs_size(), 256);
  EXPECT_FALSE(GetJob(server.get(), "fenced0")->exists());
  EXPECT_TRUE(GetJob(server.get(), "fenced1")->exists());
  EXPECT_TRUE(GetJob(server.get(), "opened")->exists());
  EXPECT_EQ(opened.Initialise(Ones), absl::OkStatus());
  // A group may be between its fence and its Open while the server restarts: the promise stays.
  server.Restart();
  EXPECT_FALSE(GetJob(server.get(), "fenced0")->exists());
  EXPECT_EQ(GetJob(server.get(), "fenced1")->promised().counter(), 1u);
  EXPECT_EQ(model::ReasonOf(TrainerGroup({server.get()}, Tiny("gone"), 1).Open(-1, std::nullopt)), model::kUnknownJob);
  EXPECT_EQ(TrainerGroup({server.get()}, Tiny("fenced1"), 1).Open(-1, std::nullopt), absl::OkStatus());
}

TEST(UnopenedJobs, WhatWasOpenedStaysWhenAllPlacesAreTaken) {
  TestServer server("s");
  for (int i = 0; i < 256; ++i) {
    TrainerGroup group({server.get()}, Tiny(absl::StrCat("job", i)), 1);
    ASSERT_EQ(group.Start(), absl::OkStatus());
  }
  // After the restart only the catalog knows.
  for (const bool restarted : {false, true}) {
    if (restarted) server.Restart();
    const absl::Status status = Fence(server.get(), "more", 1);
    EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
    EXPECT_TRUE(Contains(status, "holds 256 jobs")) << status;
  }
}

TEST(UnopenedJobs, AFailedOpenForgetsNoJobThatWasOpenedOrHasANewerPromise) {
  TestServer server("s", {0, 4 * kMiB, 0});
  TrainerGroup opened({server.get()}, Tiny("opened"), 1);
  ASSERT_EQ(opened.Start(), absl::OkStatus());
  server.Restart();  // from now on only the catalog knows that it was opened
  TrainerGroup large({server.get()}, TooLarge("opened"), 1, 2);
  EXPECT_EQ(model::ReasonOf(large.Start()), model::kBudget);
  EXPECT_EQ(GetJob(server.get(), "opened")->promised().counter(), 2u);
  TrainerGroup failed({server.get()}, TooLarge("fenced"), 1, 1);
  ASSERT_EQ(Fence(server.get(), "fenced", 2), absl::OkStatus());
  EXPECT_EQ(model::ReasonOf(failed.Open(-1, std::nullopt)), model::kStaleEpoch);
  EXPECT_EQ(model::ReasonOf(DryRun(server.get(), failed).status()), model::kBudget);
  EXPECT_EQ(GetJob(server.get(), "fenced")->promised().counter(), 2u);
}

TEST(StateServer, RefusesToFenceAnExistingJobThatShouldBeNew) {
  TestServer server("s");
  TrainerGroup group({server.get()}, MakeSpec("job", SmallModel()), 1);
  ASSERT_EQ(group.Start(), absl::OkStatus());
  ASSERT_EQ(group.Initialise(Ones), absl::OkStatus());
  v1::FenceRequest request;
  request.set_job("job");
  request.mutable_epoch()->set_counter(2);
  request.set_expect_empty(true);
  request.set_protocol_version(model::kProtocolVersion);
  Answer<v1::FenceResponse> answer;
  server->Fence(request, absl::InfiniteFuture(), answer.reply());
  EXPECT_EQ(model::ReasonOf(answer.Wait().status()), model::kJobExists);
  EXPECT_EQ(GetJob(server.get(), "job")->promised().counter(), 1u);
}

TEST(StateServer, RefusesNamesThatAreNone) {
  TestServer server("s");
  for (const std::string& name : {std::string(), std::string("a/b"), std::string(200, 'x')}) {
    v1::FenceRequest request;
    request.set_job(name);
    request.mutable_epoch()->set_counter(1);
    request.set_protocol_version(model::kProtocolVersion);
    Answer<v1::FenceResponse> answer;
    server->Fence(request, absl::InfiniteFuture(), answer.reply());
    EXPECT_EQ(model::ReasonOf(answer.Wait().status()), model::kBadSpec);
  }
}

TEST(StateServer, ManyRanksAtOnceAndPullsBetween) {
  TestServer server("s");
  TrainerGroup group({server.get()}, MakeSpec("job", SmallModel()), 4);
  ASSERT_EQ(group.Start(), absl::OkStatus());
  ASSERT_EQ(group.Initialise(Ones), absl::OkStatus());
  for (int64_t step = 1; step <= 10; ++step) {
    std::vector<std::thread> ranks;
    for (uint32_t rank = 0; rank < 4; ++rank) {
      ranks.emplace_back([&, rank] {
        for (const uint32_t slice : group.plan().slices_of_rank(rank)) {
          const std::string payload = group.Payload(slice, v1::SLICE_KIND_GRADIENT, Ones);
          for (int twice = 0; twice < 2; ++twice) {
            Answer<v1::PushResponse> answer;
            server->Push(group.PushHeader(slice, v1::SLICE_KIND_GRADIENT, payload),
                         absl::MakeConstSpan(reinterpret_cast<const std::byte*>(payload.data()), payload.size()),
                         absl::Now() + absl::Seconds(30), answer.reply());
            EXPECT_EQ(answer.Wait().status(), absl::OkStatus());
          }
        }
      });
    }
    std::thread reader([&] {
      for (int i = 0; i < 20; ++i) {
        EXPECT_TRUE(group.Read(2, v1::CONTENT_WORKING, step - 1).ok());
      }
    });
    for (std::thread& rank : ranks) rank.join();
    reader.join();
    ASSERT_TRUE(group.Finish(UpdateHeader(4)).ok());
  }
  EXPECT_TRUE(group.Read(2, v1::CONTENT_MASTER, 10).ok());
  EXPECT_EQ(server->counters().waiting_requests, 0u);
  // Given back after the reply.
  const absl::Time patience = absl::Now() + absl::Minutes(1);
  while (server->counters().waiting_push_bytes > 0 && absl::Now() < patience) absl::SleepFor(absl::Milliseconds(1));
  EXPECT_EQ(server->counters().waiting_push_bytes, 0u);
}

}  // namespace
}  // namespace ballast::services
