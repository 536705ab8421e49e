// Real processes that die: trainers killed in mid-step and started again with another world size end with the bits of a
// run that nobody disturbed; so do runs whose servers are killed, under durability `step`; and a server that lost its
// state says so.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <cstdlib>
#include <memory>
#include <thread>

#include "absl/strings/str_cat.h"
#include "ballast/tests/e2e/training_processes.h"
#include "ballast/tests/scratch_directory.h"
#include "ballast/tests/services/daemon.h"

namespace ballast {
namespace {

using ::testing::HasSubstr;

constexpr int kSteps = 40;  // some seconds: enough to be disturbed twice

class CrashTest : public ::testing::Test {
 protected:
  void SetUp() override {
    for (int i = 0; i < 2; ++i) StartServer(i);
  }

  void StartServer(int i) {
    const std::string directory = absl::StrCat(scratch_.path(), "/server", i);
    std::filesystem::create_directories(directory);
    const std::string listen =
        servers_[i] == nullptr ? services::OwnLoopback() + ":0" : servers_[i]->listen();  // kept by a restarted server
    const std::string config =
        absl::StrCat("listen: ", listen, "\nmetrics_listen: 127.0.0.1:0\ndata_directory: ", directory,
                     "/data\nserver_id: s", i, "\nstaging: 4MiB\nbudget:\n  dram: 10MiB\n  nvme: 256MiB\n");
    servers_[i].reset();
    servers_[i] = std::make_unique<services::Daemon>(directory, config);
    ASSERT_TRUE(servers_[i]->ready());
  }

  std::string Servers() const { return absl::StrCat(servers_[0]->listen(), ",", servers_[1]->listen()); }

  std::unique_ptr<services::Process> Rank(int rank, int world_size, const std::string& resume,
                                          const std::string& durability = "step") const {
    std::vector<std::string> command = RankCommand(kSteps, Servers(), scratch_.path() + "/ranks", rank, world_size);
    command.insert(command.end(), {"--working-dtype", working_});
    command.insert(command.end(), {"--durability", durability, "--resume", resume, "--log-every", "1"});
    return std::make_unique<services::Process>(command);
  }

  // Starts a group and waits for it; the digest that rank 0 printed.
  std::string TrainToTheEnd(int world_size, const std::string& resume) {
    std::vector<std::unique_ptr<services::Process>> ranks;
    for (int r = 0; r < world_size; ++r) ranks.push_back(Rank(r, world_size, resume));
    std::string digest;
    for (int r = 0; r < world_size; ++r) {
      const services::Finished finished = ranks[r]->Wait();
      EXPECT_EQ(finished.code, 0) << "rank " << r << ": " << finished.err;
      if (r == 0) digest = DigestIn(finished.out);
    }
    return digest;
  }

  // Of a run that nobody disturbed.
  static const std::string& Reference() {
    static const std::string digest = ReferenceDigest(kSteps);
    return digest;
  }

  // Twice: all ranks and servers die, and the servers come back.
  void AllDieTwice() {
    for (const int version : {3, 11}) {
      const auto rank0 = Rank(0, 2, "auto");
      const auto rank1 = Rank(1, 2, "auto");
      ASSERT_NO_FATAL_FAILURE(AwaitStep(*rank0, version));
      for (const auto& process : {rank0.get(), rank1.get()}) process->Signal(SIGKILL);
      for (const auto& server : servers_) server->End(SIGKILL);
      rank0->Wait();
      rank1->Wait();
      for (int i = 0; i < 2; ++i) StartServer(i);
      // A commit is not synced on its own; without it the step is still prepared.
      EXPECT_GE(VersionOn(Servers()), version - 1);
    }
  }

  // By what the trainer tells: asking the servers takes a process of its own, and the run goes on meanwhile.
  static void AwaitStep(const services::Process& rank0, int step) {
    while (LastStepIn(rank0.OutputSoFar()) < step && !rank0.ended()) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    ASSERT_FALSE(rank0.ended()) << "too late to disturb it: " << rank0.OutputSoFar();
  }

  ScratchDirectory scratch_;
  std::unique_ptr<services::Daemon> servers_[2];
  std::string working_ = "bf16";
};

TEST_F(CrashTest, KilledTrainersLoseNothing) {
  // Twice: rank 1 dies first, then rank 0, the rank that fences and asks for norms.
  for (const int victim : {1, 0}) {
    const auto rank0 = Rank(0, 2, "auto");
    const auto rank1 = Rank(1, 2, "auto");
    ASSERT_NO_FATAL_FAILURE(AwaitStep(*rank0, victim == 1 ? 2 : 8));
    (victim == 0 ? rank0 : rank1)->Signal(SIGKILL);
    const services::Finished survivor = (victim == 0 ? rank1 : rank0)->Wait();
    EXPECT_EQ(survivor.code, 1) << survivor.out;
    // The collective names the victim or, if the victim died between the last collective and its seal, a server does.
    EXPECT_THAT(survivor.err, ::testing::AnyOf(HasSubstr(absl::StrCat("rank ", victim)),
                                               HasSubstr(absl::StrCat("rank(s) ", victim, " have not sealed"))));
  }
  // Another world size takes over; a job that exists is not taken for a new one.
  const services::Finished never = Rank(0, 1, "never")->Wait();
  EXPECT_EQ(never.code, 1);
  EXPECT_THAT(never.err, ::testing::AllOf(HasSubstr("never"), HasSubstr("auto"), HasSubstr("must")));
  EXPECT_EQ(TrainToTheEnd(1, "must"), Reference());
}

TEST_F(CrashTest, AStoppedRunContinues) {
  const auto rank0 = Rank(0, 2, "never");
  const auto rank1 = Rank(1, 2, "never");
  ASSERT_NO_FATAL_FAILURE(AwaitStep(*rank0, 2));
  rank1->Signal(SIGTERM);
  EXPECT_EQ(rank0->Wait().code, 128 + SIGTERM);
  EXPECT_EQ(rank1->Wait().code, 128 + SIGTERM);
  EXPECT_EQ(TrainToTheEnd(3, "must"), Reference());
}

TEST_F(CrashTest, AKilledServerIsWaitedFor) {
  const auto rank0 = Rank(0, 2, "never");
  const auto rank1 = Rank(1, 2, "never");
  for (const int victim : {1, 0}) {
    ASSERT_NO_FATAL_FAILURE(AwaitStep(*rank0, victim == 1 ? 2 : 9));
    servers_[victim]->End(SIGKILL);
    StartServer(victim);
  }
  // The trainers noticed nothing but a pause.
  const services::Finished first = rank0->Wait(), second = rank1->Wait();
  EXPECT_EQ(first.code, 0) << first.err;
  EXPECT_EQ(second.code, 0) << second.err;
  EXPECT_EQ(DigestIn(first.out), Reference());
}

TEST_F(CrashTest, AllMayDieAtOnce) {
  ASSERT_NO_FATAL_FAILURE(AllDieTwice());
  EXPECT_EQ(TrainToTheEnd(2, "must"), Reference());
}

// Replay makes the blocks again that the next gradients depend on.
TEST_F(CrashTest, AllMayDieAtOnceInF8) {
  working_ = "f8";
  ASSERT_NO_FATAL_FAILURE(AllDieTwice());
  const std::string reference = ReferenceDigest(kSteps, {"--working-dtype", "f8"});
  EXPECT_EQ(TrainToTheEnd(2, "must"), reference);
  EXPECT_NE(reference, Reference());
}

TEST_F(CrashTest, AServerThatLostStateSaysSo) {
  {
    const auto rank0 = Rank(0, 1, "never", "none");
    ASSERT_NO_FATAL_FAILURE(AwaitStep(*rank0, 2));
    servers_[1]->End(SIGKILL);
    StartServer(1);
    const services::Finished finished = rank0->Wait();
    EXPECT_EQ(finished.code, 1) << finished.out;
  }
  const services::Finished again = Rank(0, 1, "auto", "none")->Wait();
  EXPECT_EQ(again.code, 1);
  EXPECT_THAT(again.err, HasSubstr("STATE_LOST"));
  EXPECT_THAT(again.err, HasSubstr("server 's1' was restarted"));
  // The way out: forget the job, start it again.
  EXPECT_EQ(services::RunProcess(
                {services::CtlPath(), "drop", "--job", "bytes_lm", "--servers", Servers(), "--timeout", "60"})
                .code,
            0);
  EXPECT_EQ(TrainToTheEnd(1, "never"), Reference());
}

}  // namespace
}  // namespace ballast
