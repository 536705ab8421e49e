// Readers of a job with two copies, whose servers die while they read.
#include <gtest/gtest.h>

#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "ballast/client/collective/loopback_collective.h"
#include "ballast/client/reader.h"
#include "ballast/proto/base/status.h"
#include "ballast/tests/client/reading/read_all.h"
#include "ballast/tests/client/session/mortal_servers.h"
#include "ballast/tests/client/session/session_fixture.h"

namespace ballast::client {
namespace {

class ReaderLossTest : public ::testing::Test {
 protected:
  void Open(absl::Duration failover_after) {
    SessionOptions options = TestOptions();
    options.replicas = 2;
    options.failover_after = failover_after;
    auto session = Session::Open(options, TestTensors(), servers_.Connect(&trainers_), group_[0].get());
    ASSERT_TRUE(session.ok()) << session.status();
    session_ = *std::move(session);
    ASSERT_EQ(InitialiseAll(*session_), absl::OkStatus());
  }
  void Train(int64_t steps) {
    while (session_->version() < steps) {
      ASSERT_EQ(TrainStep(*session_, session_->version() + 1).status(), absl::OkStatus());
      reference_.Step(session_->version(), TestStep());
    }
  }
  absl::StatusOr<std::unique_ptr<Reader>> OpenReader() {
    ReaderOptions options;
    options.job = "test";
    options.timeout = absl::Minutes(2);
    return Reader::Open(options, servers_.Connect(&readers_));
  }

  MortalServers servers_;
  Machine& lost_ = servers_.machine(1);
  BeforeCall trainers_, readers_;
  std::vector<std::unique_ptr<Collective>> group_ = MakeLoopbackGroup(1);
  std::unique_ptr<Session> session_;
  Reference reference_{TestTensors()};
};

TEST_F(ReaderLossTest, WhatADeadServerHadComesFromTheOtherHolder) {
  Open(/*failover_after=*/absl::Minutes(10));  // the group stays as it is
  Train(2);
  const auto reader = OpenReader();
  ASSERT_TRUE(reader.ok()) << reader.status();
  ASSERT_EQ((*reader)->Take()->version, 2);
  const TensorBytes working = Expected(reference_), masters = Expected(reference_, true);
  Train(3);
  readers_.pull = [this](int server) {
    if (server == 1) lost_.dead = true;
  };
  auto read = ReadAll(**reader);
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(*read, working);
  EXPECT_TRUE(lost_.dead) << "the reader asked it";
  read = ReadAll(**reader, true);
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(*read, masters);
  lost_.dead = false;
}

// Also if the reader asks for the newest version meanwhile, for which it connects to the servers that the job has now.
TEST_F(ReaderLossTest, AReadGoesOnWhileTheGroupDoesWithoutTheServer) {
  Open(/*failover_after=*/absl::Seconds(1));
  Train(2);
  const auto reader = OpenReader();
  ASSERT_TRUE(reader.ok()) << reader.status();
  ASSERT_EQ((*reader)->Take()->version, 2);
  const TensorBytes expected = Expected(reference_);
  readers_.pull = [this](int server) {
    if (server != 1 && !lost_.dead) return;
    lost_.dead = true;
    while (servers_.MembersByKey() != 2) absl::SleepFor(absl::Milliseconds(10));
  };
  std::thread trainer([this] {
    while (!lost_.dead) absl::SleepFor(absl::Milliseconds(10));
    Train(3);
  });
  auto read = ReadAll(**reader);
  lost_.dead = true;
  trainer.join();
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(*read, expected);
  const auto newest = (*reader)->Newest();
  ASSERT_TRUE(newest.ok()) << newest.status();
  EXPECT_EQ(*newest, 3);
  read = ReadAll(**reader);
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(*read, expected);
  const auto next = (*reader)->Take();
  ASSERT_TRUE(next.ok()) << next.status();
  EXPECT_EQ(next->version, 3);
  EXPECT_EQ(*ReadAll(**reader), Expected(reference_));
}

// Both holders of each chunk are gone. The reader says so, and does not wait for its time-out.
TEST_F(ReaderLossTest, AVersionThatNobodyHasAnyMoreIsGone) {
  Open(/*failover_after=*/absl::Minutes(10));
  Train(2);
  const auto reader = OpenReader();
  ASSERT_TRUE(reader.ok()) << reader.status();
  ASSERT_EQ((*reader)->Take()->version, 2);
  readers_.pull = [this](int) {
    for (int i = 0; i < kMachines; ++i) servers_.machine(i).dead = true;
  };
  const absl::Status lost = ReadAll(**reader).status();
  for (const char* text : {"version 2 was lost while it was read, so take a newer one", "no answer for 5s from 's",
                           "which alone had the chunk"}) {
    EXPECT_EQ(ExpectError(lost, model::kVersionGone, text), absl::OkStatus());
  }
  readers_.pull = nullptr;
  for (int i = 0; i < kMachines; ++i) servers_.machine(i).dead = false;
  const auto next = (*reader)->Take();
  ASSERT_TRUE(next.ok()) << next.status();
  EXPECT_EQ(*ReadAll(**reader), Expected(reference_));
}

}  // namespace
}  // namespace ballast::client
