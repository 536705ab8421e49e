// Seals on all servers, and the decision that follows from their records.
#include "ballast/client/transfers/transaction.h"

#include <atomic>
#include <functional>
#include <vector>

#include "absl/time/clock.h"
#include "ballast/proto/base/status.h"
#include "ballast/tests/client/transfers/transfers_fixture.h"
#include "gmock/gmock.h"

namespace ballast::client {
namespace {

using ::testing::HasSubstr;

class TransactionTest : public TransfersTest {
 protected:
  TransactionTest() {
    request_.set_job("job");
    request_.set_step(7);
    for (uint32_t i = 0; i < 2; ++i) {
      servers_[i].on_seal = [this, i](const v1::SealRequest& request) {
        EXPECT_GT(request.wait_ms(), 0);
        return seals_[i](request);
      };
      seals_[i] = [this, i](const v1::SealRequest&) { return Prepared(i); };
    }
  }
  absl::StatusOr<v1::SealResponse> Prepared(uint32_t server) const {
    v1::SealResponse response;
    v1::PreparedRecord* record = response.mutable_prepared();
    record->set_step(7);
    record->set_server_id(server == 0 ? "s0" : "s1");
    *record->mutable_epoch() = seat_.epoch();
    record->set_attempt(2);
    record->set_plan_hash("hash");
    record->mutable_header()->set_kind(v1::STEP_KIND_VALUES);
    record->mutable_header()->set_gradient_scale(1);
    return response;
  }
  // This rank's slice on the server.
  const OwnedSlice& SliceOn(uint32_t server) const {
    for (uint32_t unit = 0; unit < 2; ++unit) {
      for (const OwnedSlice& owned : view(unit).slices) {
        if (seat_.units->plan().Has(server, owned.slice.chunk)) return owned;
      }
    }
    ADD_FAILURE() << "no slice on server " << server;
    return view(0).slices[0];
  }
  static absl::StatusOr<v1::SealResponse> Lacks(const OwnedSlice& owned, uint32_t rank) {
    v1::SealResponse response;
    v1::SealResponse::Pending* pending = response.mutable_pending();
    pending->set_missing_count(1);
    v1::RankRange* missing = pending->add_missing();
    missing->set_rank(rank);
    missing->set_unit(owned.slice.unit);
    missing->set_begin(owned.slice.range.begin);
    missing->set_end(owned.slice.range.end);
    return response;
  }
  absl::StatusOr<v1::Decision> Seal(absl::Time deadline = absl::InfiniteFuture()) {
    return transaction_.SealAndDecide(request_, deadline, [this](absl::Span<const OwnedSlice* const> missing) {
      resent_.insert(resent_.end(), missing.begin(), missing.end());
      return resending_;
    });
  }

  v1::SealRequest request_;
  std::function<absl::StatusOr<v1::SealResponse>(const v1::SealRequest&)> seals_[2];
  std::vector<const OwnedSlice*> resent_;
  absl::Status resending_;
  Transaction transaction_{&seat_};
};

TEST_F(TransactionTest, AllPreparedRecordsDecide) {
  const auto decision = Seal();
  ASSERT_TRUE(decision.ok()) << decision.status();
  EXPECT_EQ(decision->step(), 7);
  EXPECT_EQ(decision->attempt(), 2);
  EXPECT_FALSE(decision->verdict().skip());
  EXPECT_TRUE(resent_.empty());
}

// Each server hears of the copies that it told of, and of no others; a server that told nothing gets the same Commit as
// ever. The next step's Commit says nothing of it.
TEST_F(TransactionTest, CopiesThatDifferAreToldToTheServersThatHaveThem) {
  for (uint32_t i = 0; i < 2; ++i) {
    seals_[i] = [this, i](const v1::SealRequest&) {
      auto answer = Prepared(i);
      for (const uint64_t chunk : {5u, 69u}) {
        v1::ChunkDigest* const digest = answer->add_digests();
        digest->set_chunk(chunk);
        digest->set_version(-1);
        digest->add_crc32c(chunk == 5 ? 40 + i : 7);
      }
      return answer;
    };
  }
  std::vector<v1::CommitRequest> commits[2];
  for (uint32_t i = 0; i < 2; ++i) {
    servers_[i].on_commit = [&commits, i](const v1::CommitRequest& request) {
      commits[i].push_back(request);
      return v1::CommitResponse();
    };
  }
  for (int step = 0; step < 2; ++step) {
    const auto decision = Seal();
    ASSERT_TRUE(decision.ok()) << decision.status();
    transaction_.Commit(*decision);
    ASSERT_TRUE(transaction_.AwaitCommits(absl::InfiniteFuture()));
    for (uint32_t i = 0; i < 2; ++i) seals_[i] = [this, i](const v1::SealRequest&) { return Prepared(i); };
  }
  for (const std::vector<v1::CommitRequest>& told : commits) {
    ASSERT_EQ(told.size(), 2u);
    ASSERT_EQ(told[0].differing_size(), 1);
    EXPECT_EQ(told[0].differing(0).chunk(), 5u);
    ASSERT_EQ(told[0].differing(0).copies_size(), 2);
    EXPECT_EQ(told[0].differing(0).copies(1).server_id(), "s1");
    EXPECT_EQ(told[0].differing(0).copies(1).crc32c(0), 41u);
    EXPECT_EQ(told[1].differing_size(), 0);
  }
}

TEST_F(TransactionTest, RecordsOfAnotherPlanDecideNothing) {
  seals_[1] = [this](const v1::SealRequest&) {
    auto other = Prepared(1);
    other->mutable_prepared()->set_plan_hash("another");
    return other;
  };
  EXPECT_FALSE(Seal().ok());
}

TEST_F(TransactionTest, WhatAServerLacksIsSentAgainUntilItIsPrepared) {
  int asked = 0;
  seals_[1] = [this, asked](const v1::SealRequest&) mutable {
    return ++asked < 3 ? Lacks(SliceOn(1), 0) : Prepared(1);
  };
  const auto decision = Seal();
  ASSERT_TRUE(decision.ok()) << decision.status();
  EXPECT_EQ(resent_, (std::vector<const OwnedSlice*>{&SliceOn(1), &SliceOn(1)}));
}

TEST_F(TransactionTest, OthersSlicesAreNotThisRanksToSend) {
  int asked = 0;
  seals_[0] = [this, asked](const v1::SealRequest&) mutable {
    ++asked;
    if (asked == 1) return Lacks(SliceOn(0), /*rank=*/1);
    if (asked == 2) return Lacks(SliceOn(1), /*rank=*/0);  // it is the other server's
    return Prepared(0);
  };
  ASSERT_TRUE(Seal().ok());
  EXPECT_TRUE(resent_.empty());
}

TEST_F(TransactionTest, AFailedResendEndsTheSeal) {
  seals_[0] = [this](const v1::SealRequest&) { return Lacks(SliceOn(0), 0); };
  resending_ = absl::AbortedError("let go");
  EXPECT_EQ(Seal().status(), resending_);
}

TEST_F(TransactionTest, ADecisionOfAFasterRankCounts) {
  seals_[0] = [](const v1::SealRequest&) {
    v1::SealResponse response;
    response.mutable_decided()->set_step(7);
    response.mutable_decided()->set_plan_hash("theirs");
    return response;
  };
  const auto decision = Seal();
  ASSERT_TRUE(decision.ok()) << decision.status();
  EXPECT_EQ(decision->plan_hash(), "theirs");
}

TEST_F(TransactionTest, ALateStepNamesWhoOrWhatIsMissing) {
  seals_[0] = [](const v1::SealRequest&) {
    v1::SealResponse response;
    response.mutable_pending()->set_unsealed_count(20);
    response.mutable_pending()->add_unsealed_ranks(1);
    response.mutable_pending()->add_unsealed_ranks(4);
    return response;
  };
  const absl::Status unsealed = Seal(absl::InfinitePast()).status();
  EXPECT_EQ(model::ReasonOf(unsealed), model::kRankMissing) << unsealed;
  EXPECT_THAT(unsealed.ToString(), HasSubstr("rank(s) 1, 4 and 18 more have not sealed"));
  seals_[0] = [this](const v1::SealRequest&) { return Lacks(SliceOn(0), 1); };
  const absl::Status missing = Seal(absl::InfinitePast()).status();
  EXPECT_EQ(model::ReasonOf(missing), model::kRankMissing) << missing;
  EXPECT_THAT(missing.ToString(), HasSubstr("from rank 1"));
}

TEST_F(TransactionTest, AServersRefusalIsTheSealsError) {
  seals_[1] = [](const v1::SealRequest&) {
    return model::Error(absl::StatusCode::kFailedPrecondition, model::kStaleEpoch, "over");
  };
  EXPECT_EQ(model::ReasonOf(Seal().status()), model::kStaleEpoch);
}

TEST_F(TransactionTest, ACommitGoesToAllServersWithoutTheBlobs) {
  std::atomic<int> commits = 0;
  for (FakeServer* server : servers_.servers) {
    server->on_commit = [&](const v1::CommitRequest& request) {
      EXPECT_EQ(request.job(), "job");
      EXPECT_EQ(request.decision().step(), 7);
      EXPECT_TRUE(request.decision().blobs().empty());
      ++commits;
      return v1::CommitResponse();
    };
  }
  transaction_.CommitAgain();
  EXPECT_EQ(commits, 0) << "there is no decision";
  auto decision = Seal();
  ASSERT_TRUE(decision.ok()) << decision.status();
  decision->add_blobs("cursor");
  transaction_.Commit(*decision);
  EXPECT_TRUE(transaction_.AwaitCommits(absl::InfiniteFuture()));
  EXPECT_EQ(commits, 2);
  transaction_.CommitAgain();
  EXPECT_TRUE(transaction_.AwaitCommits(absl::InfiniteFuture()));
  EXPECT_EQ(commits, 4);
}

}  // namespace
}  // namespace ballast::client
