// A rank's gradients: its own slices, to the servers that have them, with the right bytes.
#include "ballast/client/transfers/gradients.h"

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "ballast/proto/base/status.h"
#include "ballast/tests/client/transfers/transfers_fixture.h"
#include "gmock/gmock.h"

namespace ballast::client {
namespace {

using ::testing::HasSubstr;

class GradientsTest : public TransfersTest {
 protected:
  GradientsTest() { gradients_.Resize(); }
  void ExpectSent(uint32_t unit, const std::vector<kernels::bf16>& gradient) {
    const auto received = Received(v1::SLICE_KIND_GRADIENT);
    for (const OwnedSlice& owned : view(unit).slices) {
      const auto found = received.find({unit, owned.slice.range.begin});
      ASSERT_NE(found, received.end());
      const std::string expected(reinterpret_cast<const char*>(gradient.data() + owned.offset),
                                 owned.slice.range.size() * sizeof(kernels::bf16));
      EXPECT_EQ(found->second == expected, true) << "slice from " << owned.slice.range.begin;
    }
  }
  void ExpectRefused(const absl::Status& status, const char* reason, const char* words) {
    EXPECT_EQ(model::ReasonOf(status), reason) << status;
    EXPECT_THAT(status.ToString(), HasSubstr(words));
  }

  Gradients gradients_{&seat_};
};

TEST_F(GradientsTest, APushSendsEachOwnedSliceOnce) {
  const std::vector<kernels::bf16> gradient = GradientOf(0);
  ASSERT_EQ(gradients_.Push(0, BytesOf(gradient), {}), absl::OkStatus());
  ASSERT_EQ(gradients_.Flush(), absl::OkStatus());
  EXPECT_EQ(Count(), view(0).slices.size());
  ExpectSent(0, gradient);
  EXPECT_EQ(gradients_.pushed_bytes(), 2 * view(0).owned_elements);
  EXPECT_EQ(gradients_.presence(), model::MakeBitmap(3, {0, 1}));
  EXPECT_FALSE(gradients_.empty());
}

TEST_F(GradientsTest, TheCallersMemoryIsFreeAfterAPush) {
  std::vector<kernels::bf16> gradient = GradientOf(1);
  const std::vector<kernels::bf16> before = gradient;
  servers_[0].HoldPushes();
  servers_[1].HoldPushes();
  ASSERT_EQ(gradients_.Push(1, BytesOf(gradient), {}), absl::OkStatus());
  std::fill(gradient.begin(), gradient.end(), 9);
  servers_[0].AnswerPushes();
  servers_[1].AnswerPushes();
  ASSERT_EQ(gradients_.Flush(), absl::OkStatus());
  ASSERT_EQ(gradients_.Resend(view(1).slices[0]), absl::OkStatus());
  ASSERT_EQ(gradients_.Flush(), absl::OkStatus());
  ExpectSent(1, before);
}

TEST_F(GradientsTest, WhatDoesNotFitIsRefusedAndNothingIsSent) {
  std::vector<kernels::bf16> gradient = GradientOf(0);
  gradient.pop_back();
  ExpectRefused(gradients_.Push(0, BytesOf(gradient), {}), model::kBadLength, "expected 35");
  gradient = GradientOf(0);
  const std::vector<std::string> nobody = {"nobody"}, elsewhere = {"c"};
  ExpectRefused(gradients_.Push(0, BytesOf(gradient), nobody), model::kUnknownTensor, "nobody");
  ExpectRefused(gradients_.Push(0, BytesOf(gradient), elsewhere), model::kBadRequest, "is not in unit 'u'");
  ExpectRefused(gradients_.Push(2, BytesOf(gradient), {}), model::kUnknownUnit, "");
  EXPECT_EQ(Count(), 0);
  EXPECT_TRUE(gradients_.empty());
  ASSERT_EQ(gradients_.Push(0, BytesOf(gradient), {}), absl::OkStatus());
  ExpectRefused(gradients_.Push(0, BytesOf(gradient), {}), model::kBadRequest, "was pushed already in this step");
  gradients_.Forget();
  EXPECT_TRUE(gradients_.empty());
  EXPECT_EQ(gradients_.presence(), model::MakeBitmap(3, {}));
  EXPECT_EQ(gradients_.Push(0, BytesOf(gradient), {}), absl::OkStatus());
}

TEST_F(GradientsTest, AnAbsentTensorIsZerosAndNotPresent) {
  const std::vector<kernels::bf16> gradient = GradientOf(0);
  const std::vector<std::string> absent = {"a"};
  ASSERT_EQ(gradients_.Push(0, BytesOf(gradient), absent), absl::OkStatus());
  EXPECT_EQ(gradients_.presence(), model::MakeBitmap(3, {1}));
  ASSERT_EQ(gradients_.Cover(model::MakeBitmap(3, {0, 1})), absl::OkStatus()) << "another rank has a gradient of it";
  std::vector<kernels::bf16> expected = gradient;
  for (const OwnedSegment& segment : view(0).segments) {
    if (segment.tensor == 0) std::fill_n(expected.begin() + static_cast<int64_t>(segment.offset), segment.count, 0);
  }
  ExpectSent(0, expected);
}

TEST_F(GradientsTest, BorrowedRunsAreSentFromWhereTheyLie) {
  const std::vector<kernels::bf16> gradient = GradientOf(0);
  // Cut amid the first slice: that one is put together.
  const uint64_t cut = view(0).slices[0].slice.range.size() / 2, end = view(0).owned_elements;
  const std::vector<GradientRun> runs = {{0, BytesOf(gradient).subspan(0, 2 * cut)},
                                         {cut, BytesOf(gradient).subspan(2 * cut, 2 * (end - cut))}};
  ASSERT_EQ(gradients_.PushBorrowed(0, runs, {}, nullptr), absl::OkStatus());
  ASSERT_EQ(gradients_.Flush(), absl::OkStatus());
  ExpectSent(0, gradient);
  for (FakeServer* server : servers_.servers) {
    for (const FakeServer::Pushed& push : server->pushed()) {
      const OwnedSlice* owned = seat_.units->Find(0, {push.header.begin(), push.header.end()});
      if (owned->offset == 0) continue;
      EXPECT_EQ(push.from, BytesOf(gradient).data() + 2 * owned->offset) << "a copy";
    }
  }
}

TEST_F(GradientsTest, AGapBetweenRunsIsZeros) {
  std::vector<kernels::bf16> gradient = GradientOf(0);
  const std::vector<GradientRun> runs = {{0, BytesOf(gradient).subspan(0, 200)},
                                         {300, BytesOf(gradient).subspan(600, 2 * (view(0).owned_elements - 300))}};
  ASSERT_EQ(gradients_.PushBorrowed(0, runs, {}, nullptr), absl::OkStatus());
  ASSERT_EQ(gradients_.Flush(), absl::OkStatus());
  std::fill_n(gradient.begin() + 100, 200, 0);
  ExpectSent(0, gradient);
}

TEST_F(GradientsTest, RunsThatOverlapOrLeaveTheRankAreRefused) {
  const std::vector<kernels::bf16> gradient = GradientOf(0);
  const auto refused = [&](const std::vector<GradientRun>& runs) {
    ExpectRefused(gradients_.PushBorrowed(0, runs, {}, nullptr), model::kBadRange, "runs of a gradient");
  };
  refused({{0, BytesOf(gradient).subspan(0, 200)}, {99, BytesOf(gradient).subspan(0, 20)}});
  refused({{view(0).owned_elements - 9, BytesOf(gradient).subspan(0, 20)}});
  refused({{view(0).owned_elements + 1, {}}});
  refused({{0, BytesOf(gradient).subspan(0, 3)}});
  EXPECT_EQ(Count(), 0);
}

TEST_F(GradientsTest, MemoryWithAnOwnerIsLetGoOnceTheServersHaveIt) {
  const std::vector<kernels::bf16> gradient = GradientOf(1);
  auto owner = std::make_shared<int>();
  const std::weak_ptr<int> alive = owner;
  servers_[0].HoldPushes();
  servers_[1].HoldPushes();
  ASSERT_EQ(gradients_.PushBorrowed(1, {{0, BytesOf(gradient)}}, {}, std::move(owner)), absl::OkStatus());
  EXPECT_FALSE(alive.expired());
  servers_[0].AnswerPushes();
  servers_[1].AnswerPushes();
  ASSERT_EQ(gradients_.Flush(), absl::OkStatus());
  EXPECT_TRUE(alive.expired());
  ExpectRefused(gradients_.Resend(view(1).slices[0]), model::kStateLost, "which this rank had let go");
}

TEST_F(GradientsTest, AfterAFailedPushNothingMoreIsSent) {
  for (FakeServer* server : servers_.servers) {
    server->on_push = [](const v1::PushRequest&) {
      return model::Error(absl::StatusCode::kInvalidArgument, model::kBadRequest, "refused");
    };
  }
  ASSERT_EQ(gradients_.Push(0, BytesOf(GradientOf(0)), {}), absl::OkStatus());
  const absl::Status failed = gradients_.Flush();
  EXPECT_THAT(failed.ToString(), HasSubstr("refused"));
  EXPECT_EQ(Count(), 1) << "each slice more would wait for the same server";
}

TEST_F(GradientsTest, ReturnedGradientsWantADrop) {
  const std::vector<kernels::bf16> gradient = GradientOf(0);
  ASSERT_EQ(gradients_.PushBorrowed(0, {{0, BytesOf(gradient)}}, {}, nullptr), absl::OkStatus());
  gradients_.Return();
  ExpectRefused(gradients_.Flush(), model::kBadRequest, "Drop() comes before another step");
  ExpectRefused(gradients_.Push(0, BytesOf(gradient), {}), model::kBadRequest, "was returned");
  EXPECT_EQ(gradients_.Resend(view(0).slices[0]), absl::OkStatus());
  EXPECT_EQ(Count(), view(0).slices.size()) << "the memory is the caller's again";
  gradients_.Forget();
  EXPECT_EQ(gradients_.Flush(), absl::OkStatus());
}

TEST_F(GradientsTest, LentTensorsAreNotPushed) {
  EXPECT_EQ(gradients_.CheckLend(), absl::OkStatus());
  gradients_.Lend(model::MakeBitmap(3, {0, 1, 2}));
  EXPECT_EQ(gradients_.presence(), model::MakeBitmap(3, {0, 1, 2}));
  ASSERT_EQ(gradients_.Cover(gradients_.presence()), absl::OkStatus());
  EXPECT_EQ(Count(), 0);
  ExpectRefused(gradients_.Push(0, BytesOf(GradientOf(0)), {}), model::kBadRequest, "was lent in this step");
  ExpectRefused(gradients_.CheckLend(), model::kBadRequest, "already has gradients");
}

TEST_F(GradientsTest, ZerosCoverWhatOnlyOthersPushed) {
  ASSERT_EQ(gradients_.Cover(model::MakeBitmap(3, {2})), absl::OkStatus());
  EXPECT_EQ(Count(), view(1).slices.size());
  ExpectSent(1, std::vector<kernels::bf16>(view(1).owned_elements, 0));
  EXPECT_EQ(gradients_.presence(), model::MakeBitmap(3, {})) << "zeros are no contribution";
  ExpectRefused(gradients_.Push(1, BytesOf(GradientOf(1)), {}), model::kBadRequest, "was counted as zeros");
  ASSERT_EQ(gradients_.ResendAll(model::MakeBitmap(3, {2})), absl::OkStatus());
  ASSERT_EQ(gradients_.Flush(), absl::OkStatus());
  EXPECT_EQ(Count(), 2 * view(1).slices.size());
}

}  // namespace
}  // namespace ballast::client
