// Readers beside a group that trains: each read has the bits of one version, the group is never fenced, and servers
// keep nothing of a reader that is gone.
#include "ballast/client/reader.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <map>
#include <set>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "ballast/client/collective/loopback_collective.h"
#include "ballast/kernels/kernels.h"
#include "ballast/proto/base/status.h"
#include "ballast/services/gateway/embedded_transport.h"
#include "ballast/tests/client/reading/read_all.h"
#include "ballast/tests/client/reading/spoiled_transport.h"
#include "ballast/tests/client/session/session_fixture.h"
#include "ballast/tests/services/answer.h"

namespace ballast::client {
namespace {

uint32_t DigestOf(const TensorBytes& tensors) {
  std::vector<std::byte> all;
  for (const auto& [name, bytes] : tensors) all.insert(all.end(), bytes.begin(), bytes.end());
  return kernels::Crc32c(all);
}

void ExpectRefused(const absl::Status& status, const char* reason, const char* text) {
  EXPECT_EQ(ExpectError(status, reason, text), absl::OkStatus());
}

class ReaderTest : public ::testing::Test {
 protected:
  static ReaderOptions Options() {
    ReaderOptions options;
    options.job = "test";
    options.timeout = absl::Minutes(1);
    return options;
  }
  absl::StatusOr<std::unique_ptr<Reader>> OpenReader(const ReaderOptions& options = Options()) {
    std::vector<std::unique_ptr<Transport>> servers;
    for (std::unique_ptr<Transport>& server : servers_.Connect()) {
      servers.push_back(std::make_unique<SpoiledTransport>(std::move(server), &spoils_));
    }
    std::reverse(servers.begin(), servers.end());  // the order of the job's members is another
    return Reader::Open(options, std::move(servers));
  }
  // A job at version `steps`, with its group of one rank.
  void Train(int64_t steps) {
    if (session_ == nullptr) {
      group_ = MakeLoopbackGroup(1);
      auto session = servers_.Open(group_[0].get(), TestOptions(), TestTensors());
      ASSERT_TRUE(session.ok()) << session.status();
      session_ = *std::move(session);
      ASSERT_EQ(InitialiseAll(*session_), absl::OkStatus());
    }
    while (session_->version() < steps) {
      ASSERT_EQ(TrainStep(*session_, session_->version() + 1).status(), absl::OkStatus());
      reference_.Step(session_->version(), TestStep());
    }
  }
  // Versions pinned for reading, over all servers.
  std::set<int64_t> Pinned() {
    std::set<int64_t> versions;
    for (int i = 0; i < 2; ++i) {
      const v1::GetServerStatusResponse status = servers_.server(i)->Status();
      for (const int64_t version : status.jobs(0).pinned_versions()) versions.insert(version);
    }
    return versions;
  }
  // A reader that lets go waits for the servers for a short while only.
  bool AwaitPinned(const std::set<int64_t>& versions) {
    for (int i = 0; i < 3000 && Pinned() != versions; ++i) absl::SleepFor(absl::Milliseconds(10));
    return Pinned() == versions;
  }
  bool AwaitUnpinned() { return AwaitPinned({}); }
  absl::Status PinAs(uint64_t holder, int64_t version, uint32_t lease_ms) {
    v1::PinRequest request;
    request.set_job("test");
    request.set_version(version);
    request.set_holder(holder);
    request.set_lease_ms(lease_ms);
    services::Answer<v1::PinResponse> answer;
    servers_.server(0)->Pin(request, absl::InfiniteFuture(), answer.reply());
    return answer.Wait().status();
  }
  void UnpinAs(uint64_t holder, int64_t version) {
    v1::UnpinRequest request;
    request.set_job("test");
    request.set_version(version);
    request.set_holder(holder);
    services::Answer<v1::UnpinResponse> answer;
    servers_.server(0)->Unpin(request, answer.reply(), nullptr);
    ASSERT_TRUE(answer.Wait().ok());
  }

  SessionFixture servers_{2};
  Spoils spoils_;
  std::vector<std::unique_ptr<Collective>> group_;
  std::unique_ptr<Session> session_;
  Reference reference_{TestTensors()};
};

TEST_F(ReaderTest, EachReadOfAGroupAtWorkIsOneVersion) {
  absl::Mutex mutex;  // both ranks end with the same step
  int64_t started = -1, last = std::numeric_limits<int64_t>::max();
  const auto starts = [&](int64_t step) {
    absl::MutexLock lock(&mutex);
    if (step > last) return false;
    started = std::max(step, started);
    return true;
  };
  const auto newest = [&] {
    absl::MutexLock lock(&mutex);
    return started;
  };
  absl::Status trained;
  std::thread trainer([&] {
    trained = SessionFixture::RunRanks(2, [&](Collective* collective) -> absl::Status {
      BALLAST_ASSIGN_OR_RETURN(const auto session, servers_.Open(collective, TestOptions(), TestTensors()));
      BALLAST_RETURN_IF_ERROR(InitialiseAll(*session));
      for (int64_t step = 0; starts(step); ++step) {
        if (step > 0) BALLAST_RETURN_IF_ERROR(TrainStep(*session, step).status());
      }
      return session->ended();
    });
  });
  std::map<int64_t, std::set<uint32_t>> digests;  // of what was read, by version
  uint64_t steps = 0;
  const auto evaluate = [&]() -> absl::Status {
    while (newest() < 0) absl::SleepFor(absl::Milliseconds(1));
    BALLAST_ASSIGN_OR_RETURN(const auto reader, OpenReader());
    // And until the group has gone on, however slowly.
    const absl::Time end = absl::Now() + absl::Minutes(1);
    for (int i = 0; i < 100 || ((digests.size() < 6 || steps < 6) && absl::Now() < end); ++i) {
      BALLAST_ASSIGN_OR_RETURN(const TakenVersion taken, reader->Take());
      if (i % 4 == 0) absl::SleepFor(absl::Milliseconds(20));  // the group goes on
      BALLAST_ASSIGN_OR_RETURN(const TensorBytes read, ReadAll(*reader));
      digests[taken.version].insert(DigestOf(read));
      BALLAST_RETURN_IF_ERROR(Expect(taken.steps == static_cast<uint64_t>(taken.version), "step count"));
      steps = taken.steps;
    }
    return absl::OkStatus();
  };
  const absl::Status evaluated = evaluate();
  {
    absl::MutexLock lock(&mutex);
    last = started + 2;
  }
  trainer.join();
  ASSERT_EQ(trained, absl::OkStatus());
  ASSERT_EQ(evaluated, absl::OkStatus());
  EXPECT_GT(digests.size(), 5u);
  for (int64_t version = 0; version <= digests.rbegin()->first; ++version) {
    if (version > 0) reference_.Step(version, TestStep());
    if (!digests.contains(version)) continue;
    EXPECT_EQ(digests[version], std::set<uint32_t>{DigestOf(Expected(reference_))}) << "version " << version;
  }
  EXPECT_GT(steps, 5u);
  EXPECT_EQ(spoils_.changes, 0);
  EXPECT_TRUE(AwaitUnpinned());
}

TEST_F(ReaderTest, AVersionTakenStaysWhileStepsGoOn) {
  Train(2);
  const auto reader = OpenReader();
  ASSERT_TRUE(reader.ok()) << reader.status();
  const auto taken = (*reader)->Take();
  ASSERT_TRUE(taken.ok()) << taken.status();
  EXPECT_EQ(taken->version, 2);
  EXPECT_EQ(taken->steps, 2u);
  EXPECT_EQ((*reader)->working(), kernels::Dtype::kBf16);
  const TensorBytes working = Expected(reference_), masters = Expected(reference_, true);
  Train(5);
  EXPECT_EQ(*(*reader)->Newest(), 5);
  EXPECT_EQ(*ReadAll(**reader), working);
  EXPECT_EQ(*ReadAll(**reader, true), masters);
  EXPECT_EQ(Pinned(), std::set<int64_t>{2});
  EXPECT_EQ((*reader)->Take()->version, 5);
  EXPECT_EQ(*ReadAll(**reader), Expected(reference_));
  EXPECT_TRUE(AwaitPinned({5}));
  (*reader)->LetGo();
  EXPECT_TRUE(AwaitUnpinned());
  EXPECT_EQ(model::ReasonOf((*reader)->Read({})), model::kBadRequest);
}

// By name or alias; places of another size and unknown names are refused.
TEST_F(ReaderTest, TensorsAreReadByName) {
  Train(1);
  const auto reader = OpenReader();
  ASSERT_TRUE((*reader)->Take().ok());
  std::vector<std::byte> bytes(300 * 257 * sizeof(bf16));
  ASSERT_EQ((*reader)->Read({{{"head.weight", absl::MakeSpan(bytes)}}}), absl::OkStatus());
  EXPECT_EQ(bytes, Expected(reference_)["embed.weight"]);
  ExpectRefused((*reader)->Read({{{"embed.norm", absl::MakeSpan(bytes)}}}), model::kBadLength,
                "tensor 'embed.norm' has 514 bytes, got room for 154200");
  ExpectRefused((*reader)->Read({{{"other", absl::MakeSpan(bytes)}}}), model::kUnknownTensor, "'other'");
}

// Servers keep the halves of its rows one behind the other.
TEST_F(ReaderTest, ATensorInPartsComesRowMajor) {
  group_ = MakeLoopbackGroup(1);
  const TensorSpec parted{.name = "parted", .unit = "unit", .shape = {6, 512}, .parts = {.dimension = 1, .count = 2}};
  auto session = servers_.Open(group_[0].get(), TestOptions(), {parted});
  ASSERT_TRUE(session.ok()) << session.status();
  session_ = *std::move(session);
  ASSERT_EQ(InitialiseAll(*session_), absl::OkStatus());
  std::vector<float> expected(6 * 512);
  ASSERT_EQ(session_->Read("parted", Content::kMaster, 0, absl::MakeSpan(expected)), absl::OkStatus());
  const auto reader = OpenReader();
  ASSERT_TRUE((*reader)->Take().ok());
  EXPECT_EQ((*ReadAll(**reader, true))["parted"], BytesOf(expected));
}

// Other ranks, another epoch's plan, and a tensor that came later.
TEST_F(ReaderTest, AReaderFollowsTheNextGroup) {
  Train(2);
  const auto reader = OpenReader();
  ASSERT_TRUE((*reader)->Take().ok());
  session_ = nullptr;
  ASSERT_EQ(SessionFixture::RunRanks(
                2,
                [&](Collective* collective) -> absl::Status {
                  SessionOptions options = TestOptions();
                  options.resume = Resume::kMust;
                  BALLAST_ASSIGN_OR_RETURN(const auto session, servers_.Open(collective, options, TestTensors()));
                  BALLAST_RETURN_IF_ERROR(TrainStep(*session, 3).status());
                  BALLAST_RETURN_IF_ERROR(session->Register({{.name = "late", .unit = "late", .shape = {70, 1000}}}));
                  return InitialiseAll(*session);
                }),
            absl::OkStatus());
  reference_.Step(3, TestStep());
  const auto taken = (*reader)->Take();
  ASSERT_TRUE(taken.ok()) << taken.status();
  EXPECT_EQ(taken->version, 4);
  EXPECT_EQ(taken->steps, 3u);
  ASSERT_EQ((*reader)->tensors().size(), 6u);
  EXPECT_EQ((*reader)->tensors().back().name, "late");
  TensorBytes read = *ReadAll(**reader);
  Reference late({{.name = "late", .unit = "late", .shape = {70, 1000}}});
  EXPECT_EQ(read["late"], BytesOf(late.at("late").working));
  read.erase("late");
  EXPECT_EQ(read, Expected(reference_));
}

TEST_F(ReaderTest, AReaderThatIsCutOffHoldsItsVersionForALeaseAlone) {
  Train(1);
  ReaderOptions options = Options();
  options.lease = absl::Seconds(3);
  auto reader = OpenReader(options);
  const absl::Time began = absl::Now();
  // On a busy machine the lease may end meanwhile.
  const auto expect_pinned = [&] {
    const std::set<int64_t> pinned = Pinned();
    if (absl::Now() - began < options.lease) {
      EXPECT_EQ(pinned, std::set<int64_t>{1});
    }
  };
  ASSERT_TRUE((*reader)->Take().ok());
  expect_pinned();
  spoils_.loses_unpins = true;
  Train(2);
  reader->reset();
  expect_pinned();
  EXPECT_TRUE(AwaitUnpinned());
}

TEST_F(ReaderTest, AReadAfterTheLeaseIsRefusedAndTheNextOneGoes) {
  Train(1);
  ReaderOptions options = Options();
  options.lease = absl::Milliseconds(50);
  const auto reader = OpenReader(options);
  ASSERT_TRUE((*reader)->Take().ok());
  Train(2);
  ASSERT_TRUE(AwaitUnpinned());
  ExpectRefused(ReadAll(**reader).status(), model::kVersionGone,
                "version 1 was lost while it was read, so take a newer one");
  EXPECT_EQ((*reader)->Take()->version, 2);
  EXPECT_EQ(*ReadAll(**reader), Expected(reference_));
}

TEST_F(ReaderTest, AReadThatTakesLongRenewsItsLease) {
  // On a busy machine a short lease may end between two pulls.
  absl::StatusOr<TensorBytes> read = absl::UnknownError("not tried");
  for (absl::Duration lease = absl::Seconds(5); lease < absl::Minutes(1) && !read.ok(); lease *= 4) {
    spoils_.pull = absl::ZeroDuration();
    Train(session_ == nullptr ? 1 : session_->version() + 1);
    ReaderOptions options = Options();
    options.lease = lease;
    options.timeout = absl::Minutes(5);
    const auto reader = OpenReader(options);
    ASSERT_TRUE((*reader)->Take().ok());
    const TensorBytes expected = Expected(reference_);
    Train(session_->version() + 1);
    spoils_.pull = 0.6 * lease;  // and more pulls than the transports have threads
    const absl::Time began = absl::Now();
    read = ReadAll(**reader);
    EXPECT_GT(absl::Now() - began, lease);
    if (read.ok()) {
      EXPECT_EQ(*read, expected);
    }
  }
  EXPECT_EQ(read.status(), absl::OkStatus());
}

TEST_F(ReaderTest, EachHolderHoldsForItself) {
  Train(1);
  ASSERT_EQ(session_->Pin(), absl::OkStatus());
  ASSERT_EQ(PinAs(7, 1, 60'000), absl::OkStatus());
  ASSERT_EQ(PinAs(8, 1, 100), absl::OkStatus());
  Train(2);
  UnpinAs(7, 1);
  absl::SleepFor(absl::Milliseconds(300));    // longer than the lease of 8, whose end shows nothing to wait for
  EXPECT_EQ(Pinned(), std::set<int64_t>{1});  // the group's
  std::vector<float> norm(257);
  EXPECT_EQ(session_->Read("embed.norm", Content::kMaster, 1, absl::MakeSpan(norm)), absl::OkStatus());
  ASSERT_EQ(PinAs(9, 1, 60'000), absl::OkStatus());  // takes part in a pin of an older version
  ASSERT_EQ(session_->Unpin(1), absl::OkStatus());
  EXPECT_EQ(Pinned(), std::set<int64_t>{1});
  UnpinAs(9, 1);
  EXPECT_TRUE(Pinned().empty());
  EXPECT_EQ(model::ReasonOf(PinAs(9, 1, 60'000)), model::kVersionGone);
}

TEST_F(ReaderTest, LeasesAreBounded) {
  Train(1);
  ExpectRefused(PinAs(7, 1, 600'001), model::kBadRequest, "a lease of at most 10m");
  ExpectRefused(PinAs(7, 1, 0), model::kBadRequest, "a lease of at most 10m");
  ExpectRefused(PinAs(0, 1, 10), model::kBadRequest, "a group's none");
  for (int64_t version = 1; version <= 8; ++version) {
    ASSERT_EQ(PinAs(7, version, 60'000), absl::OkStatus());
    Train(version + 1);
  }
  ExpectRefused(PinAs(7, 9, 60'000), model::kBudget, "readers of job 'test' hold 8 versions");
  EXPECT_EQ(session_->Pin(), absl::OkStatus());  // the group has room left
  for (uint64_t holder = 100; holder < 100 + 255; ++holder) ASSERT_EQ(PinAs(holder, 1, 60'000), absl::OkStatus());
  ExpectRefused(PinAs(99, 1, 60'000), model::kBudget, "has 256 holders");
  EXPECT_EQ(PinAs(0, 1, 0), absl::OkStatus());  // readers keep out no group
}

// The group left its versions to readers that had joined it, and then had no pin left for itself.
TEST_F(ReaderTest, AVersionThatReadersJoinCountsAsTheirs) {
  Train(1);
  for (int64_t version = 1; version <= 8; ++version) {
    ASSERT_EQ(PinAs(0, version, 0), absl::OkStatus());
    ASSERT_EQ(PinAs(7, version, 60'000), absl::OkStatus());
    UnpinAs(0, version);
    Train(version + 1);
  }
  ASSERT_EQ(PinAs(0, 9, 0), absl::OkStatus());
  ExpectRefused(PinAs(7, 9, 60'000), model::kBudget, "readers of job 'test' hold 8 versions");
  Train(10);
  EXPECT_EQ(PinAs(0, 10, 0), absl::OkStatus());
}

TEST_F(ReaderTest, WhatIsNoJobToReadIsRefusedByName) {
  const auto reader = OpenReader();
  ASSERT_TRUE(reader.ok()) << reader.status();
  ExpectRefused((*reader)->Take().status(), model::kJobMissing, "have no job 'test'");
  group_ = MakeLoopbackGroup(1);
  session_ = *servers_.Open(group_[0].get(), TestOptions(), TestTensors());
  ExpectRefused((*reader)->Take().status(), model::kBadRequest, "job 'test' has no values yet");
  ExpectRefused((*reader)->Newest().status(), model::kBadRequest, "job 'test' has no values yet");
  ASSERT_EQ(InitialiseAll(*session_), absl::OkStatus());
  EXPECT_EQ((*reader)->Take()->version, 0);
  ReaderOptions nameless = Options();
  nameless.job = "a/b";
  EXPECT_FALSE(OpenReader(nameless).ok());
  ExpectRefused(Reader::Open(Options(), {}).status(), model::kBadSpec, "at least one server");
  std::vector<std::unique_ptr<Transport>> one;
  one.push_back(std::move(servers_.Connect()[0]));
  ExpectRefused((*Reader::Open(Options(), std::move(one)))->Take().status(), model::kBadSpec,
                "the job lies on 2 servers");
}

TEST_F(ReaderTest, ServersOfAnotherKindAreRefusedByName) {
  Train(1);
  spoils_.identity = [](v1::IdentifyResponse& identity) { identity.set_protocol_version(4); };
  ExpectRefused(OpenReader().status(), model::kVersionsDiffer, "'s1'");
  spoils_.identity = nullptr;
  const auto reader = OpenReader();
  spoils_.job = [](v1::GetJobResponse& job) { job.set_disk(job.disk() + 1); };
  ExpectRefused((*reader)->Take().status(), model::kOtherServer, "was not among the servers");
  spoils_.job = [](v1::GetJobResponse& job) { job.clear_leases_pins(); };
  ExpectRefused((*reader)->Take().status(), model::kUnsupported, "of an earlier release");
  spoils_.job = [](v1::GetJobResponse& job) { job.set_state_lost(true); };
  ExpectRefused((*reader)->Take().status(), model::kStateLost, "was restarted without the state");
  // The name came back while tensors were read: numbers of versions do too.
  spoils_.job = nullptr;
  ASSERT_TRUE((*reader)->Take().ok());
  spoils_.job = [](v1::GetJobResponse& job) { job.set_life(job.server_id() == "s0" ? job.life() ^ 2 : job.life()); };
  ExpectRefused(ReadAll(**reader).status(), model::kVersionGone, "was dropped while it was read");
}

}  // namespace
}  // namespace ballast::client
