// A group's transactions over servers that answer as the test says: what ranks agree on, seal, and ask for.
#include "ballast/client/transactions/transactions.h"

#include <cmath>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "ballast/client/collective/loopback_collective.h"
#include "ballast/client/transactions/norms.h"
#include "ballast/kernels/float_formats.h"
#include "ballast/proto/base/status.h"
#include "ballast/tests/client/transactions/rank_of_job.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ballast::client {
namespace {

using ::testing::HasSubstr;

class TransactionsTest : public ::testing::Test {
 protected:
  explicit TransactionsTest() {
    for (uint32_t r = 0; r < 2; ++r) ranks_.push_back(std::make_unique<RankOfJob>(seats_[r].get(), 2, 4));
  }
  // `call` on both ranks at once.
  void Both(const std::function<void(RankOfJob&, size_t)>& call) {
    std::thread other([&] { call(*ranks_[1], 1); });
    call(*ranks_[0], 0);
    other.join();
  }

  std::vector<std::unique_ptr<Collective>> seats_ = MakeLoopbackGroup(2);
  std::vector<std::unique_ptr<RankOfJob>> ranks_;
};

TEST_F(TransactionsTest, AStepIsSealedAlikeByAllRanksWithEveryPresence) {
  absl::StatusOr<StepReport> reports[2];
  Both([&](RankOfJob& rank, size_t r) {
    ASSERT_EQ(rank.PushUnit(static_cast<uint32_t>(r)), absl::OkStatus());  // each a unit of its own
    reports[r] = rank.Step();
  });
  for (size_t r = 0; r < 2; ++r) {
    ASSERT_TRUE(reports[r].ok()) << reports[r].status();
    EXPECT_EQ(reports[r]->version, 5);
    EXPECT_EQ(ranks_[r]->job->seat().version, 5);
    ASSERT_EQ(ranks_[r]->seals.size(), 1);
    const v1::SealRequest& seal = ranks_[r]->seals[0];
    EXPECT_EQ(seal.step(), 5);
    EXPECT_EQ(seal.rank(), r);
    EXPECT_EQ(seal.header().gradient_presence(), model::MakeBitmap(3, {0, 1, 2}));
    EXPECT_EQ(seal.plan_hash(), ranks_[0]->seals[0].plan_hash());
    EXPECT_EQ(seal.blobs_size(), r == 0 ? 2 : 0) << "rank 0 brings them for all";
    EXPECT_TRUE(ranks_[r]->gradients->empty());
    EXPECT_EQ(ranks_[r]->transactions->sealed_blob(), "cursor");
    // Its own unit, and zeros for the other's.
    size_t slices = 0;
    for (uint32_t unit = 0; unit < 2; ++unit) slices += ranks_[r]->job->seat().units->unit(unit).slices.size();
    EXPECT_EQ(ranks_[r]->server->pushed().size(), slices);
  }
}

TEST_F(TransactionsTest, RanksThatMeanDifferentStepsSealNothing) {
  ranks_[1]->rate = 0.2;
  absl::StatusOr<StepReport> reports[2];
  Both([&](RankOfJob& rank, size_t r) {
    ASSERT_EQ(rank.PushUnit(0), absl::OkStatus());
    reports[r] = rank.Step();
  });
  for (size_t r = 0; r < 2; ++r) {
    EXPECT_EQ(model::ReasonOf(reports[r].status()), model::kPlanMismatch) << reports[r].status();
    EXPECT_TRUE(ranks_[r]->seals.empty());
    EXPECT_EQ(ranks_[r]->job->seat().version, 4);
    EXPECT_EQ(ranks_[r]->job->Usable(), absl::OkStatus());
  }
}

TEST_F(TransactionsTest, OneRanksErrorIsAllRanks) {
  absl::StatusOr<StepReport> reports[2];
  Both([&](RankOfJob& rank, size_t r) {
    reports[r] = rank.Step(r == 1 ? model::Error(absl::StatusCode::kInvalidArgument, model::kBadRequest, "mine")
                                  : absl::OkStatus());
  });
  EXPECT_EQ(reports[0].status().message(), "rank 1: mine");
  EXPECT_EQ(reports[1].status().message(), "mine");
  EXPECT_TRUE(ranks_[0]->seals.empty());
}

TEST_F(TransactionsTest, RanksWithDifferentAttemptsComeToTheHigherOne) {
  ranks_[1]->job->NextAttempt();
  absl::StatusOr<StepReport> reports[2];
  Both([&](RankOfJob& rank, size_t r) { reports[r] = rank.Step(); });
  for (size_t r = 0; r < 2; ++r) {
    EXPECT_EQ(model::ReasonOf(reports[r].status()), model::kPlanMismatch) << reports[r].status();
    EXPECT_EQ(ranks_[r]->job->seat().attempt, 1);
  }
  Both([&](RankOfJob& rank, size_t r) { reports[r] = rank.Step(); });
  for (const auto& report : reports) EXPECT_TRUE(report.ok()) << report.status();
}

TEST_F(TransactionsTest, AfterASealWithoutADecisionTheSessionIsOver) {
  for (const auto& rank : ranks_) {
    rank->server->on_seal = [](const v1::SealRequest&) {
      return model::Error(absl::StatusCode::kInternal, model::kIo, "the log's disk failed");
    };
  }
  absl::StatusOr<StepReport> reports[2];
  Both([&](RankOfJob& rank, size_t r) { reports[r] = rank.Step(); });
  for (size_t r = 0; r < 2; ++r) {
    EXPECT_THAT(reports[r].status().ToString(), HasSubstr("its outcome is not known here"));
    EXPECT_EQ(ranks_[r]->job->Usable(), reports[r].status());
    EXPECT_EQ(ranks_[r]->job->seat().version, 4);
  }
}

TEST_F(TransactionsTest, TheNormIsAskedOnceAndEqualOnAllRanks) {
  std::atomic<int> asked = 0;
  for (const auto& rank : ranks_) {
    rank->server->on_norm = [&](const v1::NormRequest& request) {
      ++asked;
      EXPECT_EQ(request.step(), 5);
      EXPECT_EQ(request.gradient_presence(), model::MakeBitmap(3, {0, 1}));
      v1::NormResponse response;
      for (const uint64_t chunk : {1, 0}) {
        v1::ChunkNorm* norm = response.add_norms();
        norm->set_chunk(chunk);
        v1::SegmentNorm* segment = norm->add_segments();
        segment->set_tensor(0);
        segment->set_squared_norm(chunk == 0 ? 9 : 16);
      }
      return response;
    };
  }
  absl::StatusOr<double> norms[2];
  for (int i = 0; i < 2; ++i) {
    Both([&](RankOfJob& rank, size_t r) {
      if (i == 0) {
        ASSERT_EQ(rank.PushUnit(0), absl::OkStatus());
      }
      norms[r] = rank.norms->Norm();
    });
    for (const auto& norm : norms) {
      ASSERT_TRUE(norm.ok()) << norm.status();
      EXPECT_DOUBLE_EQ(*norm, 5);
    }
  }
  EXPECT_EQ(asked, 1) << "rank 0 asks, and remembers it for the attempt";
}

TEST_F(TransactionsTest, AServerThatLostSlicesGetsThemFromAllRanks) {
  std::atomic<int> asked = 0;
  ranks_[0]->server->on_norm = [&](const v1::NormRequest&) -> absl::StatusOr<v1::NormResponse> {
    if (++asked == 1) return model::Error(absl::StatusCode::kFailedPrecondition, model::kIncomplete, "slices lack");
    v1::NormResponse response;
    response.add_norms()->set_overflow(true);
    return response;
  };
  absl::StatusOr<double> norms[2];
  size_t before[2] = {};
  Both([&](RankOfJob& rank, size_t r) {
    ASSERT_EQ(rank.PushUnit(0), absl::OkStatus());
    ASSERT_EQ(rank.gradients->Flush(), absl::OkStatus());
    before[r] = rank.server->pushed().size();
    norms[r] = rank.norms->Norm();
  });
  for (size_t r = 0; r < 2; ++r) {
    ASSERT_TRUE(norms[r].ok()) << norms[r].status();
    EXPECT_TRUE(std::isinf(*norms[r]));
    EXPECT_EQ(ranks_[r]->server->pushed().size(), 2 * before[r]);
  }
}

}  // namespace
}  // namespace ballast::client
