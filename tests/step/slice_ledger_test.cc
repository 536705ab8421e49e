// Which slices of a step a server holds, by attempt, and what a seal still lacks.
#include "ballast/services/step/slice_ledger.h"

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ballast/proto/model/protocol.h"
#include "ballast/proto/model/tiling.h"
#include "ballast/tests/step/step_fixture.h"
#include "gtest/gtest.h"

namespace ballast::services {
namespace {

constexpr auto kGradient = v1::SLICE_KIND_GRADIENT, kValue = v1::SLICE_KIND_VALUE;

// Unit "u" has tensor 0 of two chunks and tensor 1 of one; unit "f" has the frozen tensor 2. Two ranks.
class SliceLedgerTest : public ::testing::Test {
 protected:
  static constexpr uint64_t kChunk = 65536;

  SliceLedgerTest() { Open(1, 2); }
  void Open(int servers, uint32_t world_size) {
    v1::OpenRequest open;
    v1::JobSpec* spec = open.mutable_spec();
    spec->set_name("job");
    spec->set_chunk_elements(kChunk);
    spec->set_optimizer(v1::OPTIMIZER_ADAMW);
    spec->set_gradient_dtype(v1::DTYPE_BF16);
    spec->set_working_dtype(v1::DTYPE_BF16);
    spec->set_group_count(1);
    v1::Registration* batch = spec->add_registrations();
    batch->set_version(-1);
    const auto add = [&](const char* name, const char* unit, int64_t elements) {
      v1::TensorSpec* tensor = batch->add_tensors();
      tensor->set_name(name);
      tensor->set_unit(unit);
      tensor->add_shape(elements);
      return tensor;
    };
    add("t0", "u", 2 * kChunk);
    add("t1", "u", kChunk);
    add("t2", "f", 512)->set_frozen(v1::FROZEN_WORKING);
    for (int i = 0; i < servers; ++i) {
      v1::Member* member = open.add_members();
      member->set_server_id(std::string(1, static_cast<char>('a' + i)));
      member->set_weight(1);
    }
    *open.mutable_tiling() = model::EvenTiling(world_size);
    open.set_spec_digest(model::SpecDigest(*spec));
    open.set_protocol_version(model::kProtocolVersion);
    auto plan = model::EpochPlan::Make(open);
    ASSERT_TRUE(plan.ok()) << plan.status();
    plan_ = std::make_unique<model::EpochPlan>(*std::move(plan));
    ledger_.Open(plan_.get(), 0);
  }
  v1::PushRequest Header(const model::Slice& slice, v1::SliceKind kind = kGradient) const {
    v1::PushRequest header;
    header.set_rank(slice.rank);
    header.set_kind(kind);
    header.set_unit(slice.unit);
    header.set_begin(slice.range.begin);
    header.set_end(slice.range.end);
    return header;
  }
  // Slices of the tensors of `presence`, in the plan's order.
  std::vector<model::Slice> Slices(absl::string_view presence) const {
    std::vector<model::Slice> slices;
    for (const model::Slice& slice : plan_->slices()) {
      if (plan_->Touches(slice, presence)) slices.push_back(slice);
    }
    return slices;
  }
  uint32_t Place(const model::Slice& slice, v1::SliceKind kind = kGradient) {
    const auto place = ledger_.FindPlace(Header(slice, kind));
    EXPECT_TRUE(place.ok()) << place.status();
    return place.ok() ? *place : 0;
  }
  void Hold(const model::Slice& slice, uint64_t attempt, v1::SliceKind kind = kGradient) {
    ledger_.Hold(kind, Place(slice, kind), attempt, /*crc32c=*/5);
  }
  v1::SealResponse::Pending Missing(absl::string_view presence, uint64_t attempt, uint32_t asker) {
    v1::SealResponse::Pending pending;
    ledger_.AddMissing(kGradient, presence, attempt, asker, &pending);
    return pending;
  }

  const std::string t0_ = "\x01", t1_ = "\x02", both_ = "\x03", frozen_ = "\x04";
  std::unique_ptr<model::EpochPlan> plan_;
  SliceLedger ledger_;
};

TEST_F(SliceLedgerTest, AStepIsCoveredByExactlyItsTensorsSlices) {
  ASSERT_GE(Slices(both_).size(), 3u);
  EXPECT_TRUE(ledger_.Covered(kGradient, std::string(1, '\0'), 0)) << "a step of no tensor";
  for (const model::Slice& slice : Slices(both_)) {
    EXPECT_FALSE(ledger_.Covered(kGradient, both_, 0));
    Hold(slice, 0);
  }
  EXPECT_TRUE(ledger_.Covered(kGradient, both_, 0));
  EXPECT_TRUE(ledger_.Covered(kGradient, t1_, 0));
  EXPECT_FALSE(ledger_.Covered(kValue, both_, 0)) << "kinds do not mix";
  EXPECT_FALSE(ledger_.Covered(kGradient, both_, 1)) << "attempts do not mix";
}

TEST_F(SliceLedgerTest, ATensorsSlicesCoverThatTensorAlone) {
  for (const model::Slice& slice : Slices(t1_)) Hold(slice, 0);
  EXPECT_TRUE(ledger_.Covered(kGradient, t1_, 0));
  EXPECT_FALSE(ledger_.Covered(kGradient, t0_, 0));
}

TEST_F(SliceLedgerTest, AChunkThatIsPassedOverNoMoreCountsAsIfItNeverWas) {
  const auto missing = [&](SliceLedger* ledger) {
    std::string all;
    for (const v1::SliceKind kind : {kGradient, kValue}) {
      for (const uint32_t asker : {0u, 1u}) {
        v1::SealResponse::Pending pending;
        ledger->AddMissing(kind, both_, 0, asker, &pending);
        all += pending.ShortDebugString() + "; ";
      }
    }
    return all;
  };
  const std::vector<model::Slice> slices = Slices(both_);
  const std::vector<uint64_t> chunks = {0, 1, 2};
  for (size_t held = 0; held <= slices.size(); ++held) {
    Open(1, 2);
    for (size_t i = 0; i < held; ++i) Hold(slices[i], 0);
    ledger_.PassOver(chunks);
    for (const std::vector<uint64_t>& left : {std::vector<uint64_t>{0, 2}, {0}, {}}) {
      missing(&ledger_);  // computed before the chunk counts
      ledger_.PassOverNoMore(left.size() == 2 ? 1 : left.size() == 1 ? 2 : 0);
      SliceLedger own = ledger_;
      own.PassOver(left);  // computes all anew
      EXPECT_EQ(missing(&ledger_), missing(&own)) << held << " held, " << left.size() << " passed over";
      EXPECT_EQ(ledger_.Covered(kGradient, both_, 0), own.Covered(kGradient, both_, 0));
      EXPECT_EQ(ledger_.Lacking(kGradient, both_, 0), own.Lacking(kGradient, both_, 0));
    }
    EXPECT_EQ(ledger_.Covered(kGradient, both_, 0), held == slices.size());
    ledger_.PassOverNoMore(1);  // it is not
    EXPECT_EQ(ledger_.Covered(kGradient, both_, 0), held == slices.size());
  }
}

TEST_F(SliceLedgerTest, ALostOrDroppedSliceIsMissingAgain) {
  const std::vector<model::Slice> slices = Slices(both_);
  for (const model::Slice& slice : slices) Hold(slice, 0);
  ASSERT_TRUE(ledger_.Covered(kGradient, both_, 0));
  const uint32_t place = Place(slices[0]);
  ledger_.Lose(kGradient, place, 1);
  EXPECT_TRUE(ledger_.Covered(kGradient, both_, 0)) << "a slice of another attempt was lost";
  ledger_.Lose(kGradient, place, 0);
  EXPECT_FALSE(ledger_.Covered(kGradient, both_, 0));
  EXPECT_EQ(ledger_.Held(kGradient, place), std::nullopt);
  Hold(slices[0], 0);
  EXPECT_TRUE(ledger_.Covered(kGradient, both_, 0));
}

TEST_F(SliceLedgerTest, AHigherAttemptForgetsThatRanksSlicesOfBothKinds) {
  for (const model::Slice& slice : Slices(both_)) {
    Hold(slice, 0);
    Hold(slice, 0, kValue);
  }
  ledger_.RaiseAttempt(1, 2);
  EXPECT_EQ(ledger_.attempt(1), 2);
  EXPECT_EQ(ledger_.attempt(0), 0);
  for (const model::Slice& slice : Slices(both_)) {
    for (const v1::SliceKind kind : {kGradient, kValue}) {
      EXPECT_EQ(ledger_.Held(kind, Place(slice, kind)).has_value(), slice.rank == 0);
    }
  }
  for (const model::Slice& slice : Slices(both_)) {
    if (slice.rank == 1) Hold(slice, 2);
  }
  EXPECT_FALSE(ledger_.Covered(kGradient, both_, 2)) << "rank 0 has not pushed for attempt 2";
  EXPECT_FALSE(ledger_.Covered(kGradient, both_, 0));
  for (const model::Slice& slice : Slices(both_)) {
    if (slice.rank == 0) Hold(slice, 2);
  }
  EXPECT_TRUE(ledger_.Covered(kGradient, both_, 2));
}

TEST_F(SliceLedgerTest, TheNextStepHoldsNothing) {
  for (const model::Slice& slice : Slices(both_)) Hold(slice, 0);
  ledger_.RaiseAttempt(0, 3);
  ASSERT_FALSE(ledger_.Covered(kGradient, both_, 0));
  ledger_.NextStep();
  EXPECT_EQ(ledger_.attempt(0), 0);
  for (const model::Slice& slice : Slices(both_)) EXPECT_EQ(ledger_.Held(kGradient, Place(slice)), std::nullopt);
  EXPECT_FALSE(ledger_.Covered(kGradient, both_, 0));
}

TEST_F(SliceLedgerTest, AHeldSliceKeepsItsDigest) {
  const uint32_t place = Place(Slices(t0_)[0]);
  ledger_.Hold(kGradient, place, 0, 77);
  EXPECT_EQ(ledger_.Held(kGradient, place), std::optional<uint32_t>(77));
  EXPECT_EQ(ledger_.Held(kValue, place), std::nullopt);
}

TEST_F(SliceLedgerTest, APlaceHasOneWriterUntilItIsFree) {
  const std::vector<model::Slice> slices = Slices(both_);
  EXPECT_TRUE(ledger_.TakePlace(Header(slices[0])));
  EXPECT_FALSE(ledger_.TakePlace(Header(slices[0])));
  EXPECT_TRUE(ledger_.TakePlace(Header(slices[0], kValue))) << "its value has a place of its own";
  EXPECT_TRUE(ledger_.TakePlace(Header(slices[1])));
  ledger_.FreePlace(Header(slices[0]));
  ledger_.FreePlace(Header(slices[0]));
  EXPECT_TRUE(ledger_.TakePlace(Header(slices[0])));
}

TEST_F(SliceLedgerTest, AWriterOfAnOlderEpochKeepsItsBytesAlone) {
  const model::Slice old = Slices(t0_)[0];
  ASSERT_TRUE(ledger_.TakePlace(Header(old)));
  Open(1, 1);
  const model::Slice now = Slices(t0_)[0];
  ASSERT_GT(model::Intersect(old.range, now.range).size(), 0u);
  EXPECT_FALSE(ledger_.TakePlace(Header(now))) << "the old push's bytes may still arrive";
  ledger_.FreePlace(Header(old));
  EXPECT_TRUE(ledger_.TakePlace(Header(now)));
}

TEST_F(SliceLedgerTest, WhatIsMissingIsListedForTheOneWhoAsks) {
  uint64_t of_rank[2] = {};
  for (const model::Slice& slice : Slices(both_)) ++of_rank[slice.rank];
  ASSERT_GT(of_rank[0], 1u);
  ASSERT_GT(of_rank[1], 0u);
  v1::SealResponse::Pending pending = Missing(both_, 0, /*asker=*/0);
  EXPECT_EQ(pending.missing_count(), of_rank[0] + of_rank[1]);
  ASSERT_EQ(pending.missing_size(), static_cast<int>(of_rank[0] + 1)) << "and the first of each other rank";
  for (uint64_t i = 0; i < of_rank[0]; ++i) EXPECT_EQ(pending.missing(static_cast<int>(i)).rank(), 0);
  EXPECT_EQ(pending.missing(static_cast<int>(of_rank[0])).rank(), 1);

  const model::Slice first = Slices(both_)[0];
  Hold(first, 0);
  pending = Missing(both_, 0, first.rank);
  EXPECT_EQ(pending.missing_count(), of_rank[0] + of_rank[1] - 1);
  for (const v1::RankRange& range : pending.missing()) {
    EXPECT_FALSE(range.rank() == first.rank && range.unit() == first.unit && range.begin() == first.range.begin);
  }
  ledger_.Lose(kGradient, Place(first), 0);
  pending = Missing(both_, 0, first.rank);
  ASSERT_GT(pending.missing_size(), 0);
  EXPECT_EQ(pending.missing(0).begin(), first.range.begin) << "the search begins anew";
  EXPECT_EQ(Missing(both_, 0, /*asker=*/9).missing_size(), 2) << "whoever is no rank gets the first of each";
}

TEST_F(SliceLedgerTest, AServerHasItsOwnChunksAlone) {
  Open(2, 2);
  std::vector<uint64_t> own, others;
  for (const model::Chunk& chunk : plan_->layout().chunks()) {
    if (chunk.frozen == v1::FROZEN_UNSPECIFIED) {
      (plan_->holders_of(chunk.index)[0] == 0 ? own : others).push_back(chunk.index);
    }
  }
  ASSERT_FALSE(others.empty()) << "the routes of this job do not try the rule";
  EXPECT_EQ(ledger_.Chunks(both_), own);
  for (const model::Slice& slice : Slices(both_)) {
    const auto place = ledger_.FindPlace(Header(slice));
    EXPECT_EQ(place.ok(), plan_->holders_of(slice.chunk)[0] == 0) << place.status();
    if (place.ok()) {
      Hold(slice, 0);
    } else {
      EXPECT_THAT(place.status(), Fails(absl::StatusCode::kInvalidArgument, model::kBadRequest, "server 'b'"));
    }
  }
  EXPECT_TRUE(ledger_.Covered(kGradient, both_, 0)) << "the other server answers for the other slices";
}

TEST_F(SliceLedgerTest, FrozenTensorsTakeValuesAndNoGradient) {
  const std::vector<model::Slice> slices = Slices(frozen_);
  ASSERT_FALSE(slices.empty());
  EXPECT_THAT(ledger_.FindPlace(Header(slices[0])).status(),
              Fails(absl::StatusCode::kInvalidArgument, model::kBadRequest, "never change by a gradient"));
  EXPECT_TRUE(ledger_.FindPlace(Header(slices[0], kValue)).ok());
}

}  // namespace
}  // namespace ballast::services
