// How ranks agree, and how a group takes a job over.
#include "ballast/client/group/group.h"

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "ballast/client/collective/loopback_collective.h"
#include "ballast/client/group/fencing.h"
#include "ballast/client/group/job_spec.h"
#include "ballast/client/group/sight.h"
#include "ballast/client/group/tensor_union.h"
#include "ballast/client/session_types.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/model/tiling.h"
#include "ballast/proto/model/verdict.h"
#include "ballast/tests/client/fake_server.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ballast::client {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// Each rank's answer to one Agree.
std::vector<absl::StatusOr<std::vector<std::string>>> AgreeAll(const std::vector<absl::Status>& statuses,
                                                               const std::vector<std::string>& parts) {
  const int world = static_cast<int>(statuses.size());
  auto seats = MakeLoopbackGroup(world);
  FakeServers servers(1);
  std::vector<absl::StatusOr<std::vector<std::string>>> answers(statuses.size());
  std::vector<std::thread> ranks;
  for (size_t r = 0; r < statuses.size(); ++r) {
    ranks.emplace_back([&, r] {
      Group group(seats[r].get(), servers.router.get());
      answers[r] = group.Agree("Try", statuses[r], parts[r]);
    });
  }
  for (std::thread& rank : ranks) rank.join();
  return answers;
}

TEST(GroupTest, EveryRankGetsEveryPart) {
  // Larger than a collective takes at once, and of different sizes.
  const std::vector<std::string> parts = {"", std::string(1'300'000, 'x'), std::string("\0+-", 3)};
  for (const auto& answer : AgreeAll({{}, {}, {}}, parts)) {
    ASSERT_TRUE(answer.ok()) << answer.status();
    EXPECT_TRUE(*answer == parts);
  }
}

TEST(GroupTest, TheLowestFailedRanksErrorIsEverybodys) {
  absl::Status first = model::Error(absl::StatusCode::kInvalidArgument, model::kBadSpec, "wrong shape");
  model::SetDetail("tensor", "w", &first);
  const auto answers = AgreeAll({{}, first, absl::DataLossError("rotten")}, {"a", "b", "c"});
  EXPECT_EQ(answers[1].status(), first) << "its own, as it is";
  for (const size_t other : {0, 2}) {
    const absl::Status status = answers[other].status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(model::ReasonOf(status), model::kBadSpec) << status;
    EXPECT_EQ(status.message(), "rank 1: wrong shape");
    EXPECT_EQ(model::DetailsOf(status).at("tensor"), "w");
  }
}

class FencingTest : public ::testing::Test {
 protected:
  // Each server answers a fence with the epoch that it was fenced to.
  FencingTest() {
    for (size_t i = 0; i < 2; ++i) {
      servers_[i].on_fence = [this, i](const v1::FenceRequest& request) {
        fences_[i].push_back(request);
        v1::FenceResponse response;
        *response.mutable_job()->mutable_promised() = request.epoch();
        return response;
      };
    }
  }
  std::vector<uint64_t> Counters(size_t server) const {
    std::vector<uint64_t> counters;
    for (const v1::FenceRequest& fence : fences_[server]) counters.push_back(fence.epoch().counter());
    return counters;
  }

  FakeServers servers_{2};
  std::vector<v1::FenceRequest> fences_[2];
};

TEST_F(FencingTest, AnEpochIsAboveAllPromises) {
  std::vector<v1::GetJobResponse> jobs(2);
  jobs[0].mutable_promised()->set_counter(4);
  jobs[1].mutable_promised()->set_counter(9);
  EXPECT_THAT(Fencing::Promised(jobs), ElementsAre(4, 9));
  Fencing fencing(servers_.router.get(), "job", Fencing::Promised(jobs), std::vector<v1::Peer>(2));
  EXPECT_EQ(fencing.epoch().counter(), 10);
  const auto answers = fencing.Fence(/*expect_empty=*/true, absl::InfiniteFuture());
  ASSERT_TRUE(answers.ok()) << answers.status();
  for (size_t i = 0; i < 2; ++i) {
    EXPECT_THAT(Counters(i), ElementsAre(10));
    EXPECT_EQ(fences_[i][0].epoch().nonce(), fencing.epoch().nonce());
    EXPECT_TRUE(fences_[i][0].expect_empty());
    EXPECT_EQ(fences_[i][0].job(), "job");
    EXPECT_EQ(fences_[i][0].protocol_version(), model::kProtocolVersion);
    EXPECT_EQ(fences_[i][0].peers_size(), 2);
    EXPECT_EQ((*answers)[i].promised().counter(), 10);
  }
}

TEST_F(FencingTest, GroupsThatSawTheSamePromisesDiffer) {
  const Fencing one(servers_.router.get(), "job", {4, 4}, {}), other(servers_.router.get(), "job", {4, 4}, {});
  EXPECT_EQ(one.epoch().counter(), other.epoch().counter());
  EXPECT_NE(one.epoch().nonce(), other.epoch().nonce());
}

TEST_F(FencingTest, AServerFarBehindIsFencedInSteps) {
  const uint64_t skipped = model::kEpochsSkippedMax;
  Fencing fencing(servers_.router.get(), "job", {2 * skipped + 5, 3}, {});
  ASSERT_TRUE(fencing.Fence(false, absl::InfiniteFuture()).ok());
  EXPECT_THAT(Counters(0), ElementsAre(2 * skipped + 6));
  EXPECT_THAT(Counters(1), ElementsAre(3 + skipped, 3 + 2 * skipped, 2 * skipped + 6));
  uint64_t before = 3;
  for (const uint64_t counter : Counters(1)) {
    EXPECT_LE(counter - before - 1, skipped) << "a server refuses to go farther";
    before = counter;
  }
}

TEST_F(FencingTest, PromisesTooFarApartFenceNobody) {
  Fencing fencing(servers_.router.get(), "job", {3, 100 * model::kEpochsSkippedMax}, {});
  const absl::Status refused = fencing.Fence(false, absl::InfiniteFuture()).status();
  EXPECT_EQ(model::ReasonOf(refused), model::kBadRequest) << refused;
  EXPECT_THAT(refused.ToString(), HasSubstr("server s0 has promised epoch 3 of job 'job'"));
  EXPECT_TRUE(fences_[0].empty() && fences_[1].empty());
}

TEST(SightTest, ALookIsTheNewestOfAllServers) {
  FakeServers servers(3);
  for (size_t i = 0; i < 3; ++i) {
    servers[i].on_get_job = [i](const v1::GetJobRequest& request) {
      EXPECT_EQ(request.job(), "job");
      v1::GetJobResponse job;
      job.set_server_id("s" + std::to_string(i));
      job.set_exists(i != 2);
      job.set_committed(i == 2 ? 99 : static_cast<int64_t>(10 + i));  // of a server that has no such job
      if (!request.without_open() && i != 2) job.mutable_open()->mutable_epoch()->set_counter(5 - i);
      return job;
    };
  }
  const auto sight = LookAt(servers.router.get(), "job", /*with_open=*/true, absl::InfiniteFuture());
  ASSERT_TRUE(sight.ok()) << sight.status();
  EXPECT_TRUE(sight->exists);
  EXPECT_EQ(sight->version, 11);
  ASSERT_NE(NewestOpen(sight->answers), nullptr);
  EXPECT_EQ(NewestOpen(sight->answers)->epoch().counter(), 5);
  const auto brief = LookAt(servers.router.get(), "job", /*with_open=*/false, absl::InfiniteFuture());
  ASSERT_TRUE(brief.ok()) << brief.status();
  EXPECT_EQ(NewestOpen(brief->answers), nullptr);
}

TensorSpec Tensor(const std::string& name, std::vector<uint64_t> shape = {4}) {
  TensorSpec tensor;
  tensor.name = name;
  tensor.unit = "u";
  tensor.shape = std::move(shape);
  return tensor;
}

v1::MeshCuts OnRanks(uint32_t first, std::vector<uint32_t> sizes, std::vector<uint32_t> strides) {
  v1::MeshCuts part;
  part.mutable_mesh()->set_first(first);
  part.mutable_mesh()->mutable_size()->Assign(sizes.begin(), sizes.end());
  part.mutable_mesh()->mutable_stride()->Assign(strides.begin(), strides.end());
  return part;
}

NamedAlike Ranks(std::vector<uint32_t> ranks, const std::vector<TensorSpec>& tensors) {
  return {.named = Named(MakeSpec(SessionOptions(), tensors), tensors), .ranks = std::move(ranks)};
}

std::vector<std::string> NamesOf(const TensorUnion& all) {
  std::vector<std::string> names;
  for (const v1::TensorSpec& tensor : all.tensors()) names.push_back(tensor.name());
  return names;
}

TEST(TensorUnionTest, TensorsComeInTheOrderOfTheFirstRankThatNamesThem) {
  const std::vector<NamedAlike> all = {Ranks({0, 2}, {Tensor("b"), Tensor("a")}),
                                       Ranks({1}, {Tensor("c"), Tensor("a")})};
  const auto made = TensorUnion::Make(all);
  ASSERT_TRUE(made.ok()) << made.status();
  EXPECT_THAT(NamesOf(*made), ElementsAre("b", "a", "c"));
}

TEST(TensorUnionTest, RanksThatNameATensorAloneHaveAllOfIt) {
  const std::vector<NamedAlike> all = {Ranks({0, 2}, {Tensor("a")}), Ranks({1}, {Tensor("b"), Tensor("a")})};
  const auto made = TensorUnion::Make(all);
  ASSERT_TRUE(made.ok()) << made.status();
  v1::JobSpec spec = MakeSpec(SessionOptions(), {});
  spec.set_name("job");
  spec.clear_registrations();
  v1::Registration* batch = spec.add_registrations();
  batch->set_version(-1);
  for (const v1::TensorSpec& tensor : made->tensors()) *batch->add_tensors() = tensor;
  const auto layout = model::Layout::Make(spec);
  ASSERT_TRUE(layout.ok()) << layout.status();
  const v1::Tiling tiling = made->TilingOf(*layout, 3);
  EXPECT_EQ(tiling.division(), v1::DIVISION_PLACED);
  for (uint32_t rank = 0; rank < 3; ++rank) {
    const auto held = model::HeldBoxes(*layout, tiling, rank);
    EXPECT_TRUE(held[0].has_value()) << "all ranks have a";
    EXPECT_EQ(held[1].has_value(), rank == 1);
  }
}

TEST(TensorUnionTest, OneNameIsOneTensor) {
  const auto refused = [&](const TensorSpec& first, const TensorSpec& second, const char* words) {
    const std::vector<NamedAlike> all = {Ranks({0}, {first}), Ranks({1}, {second})};
    const absl::Status status = TensorUnion::Make(all).status();
    EXPECT_EQ(model::ReasonOf(status), model::kBadSpec) << status;
    EXPECT_THAT(status.ToString(), HasSubstr(words));
  };
  refused(Tensor("a", {4}), Tensor("a", {5}), "tensor 'a' differs: rank 0 has unit 'u', shape [4]");
  TensorSpec frozen = Tensor("a");
  frozen.frozen = v1::FROZEN_WORKING;
  refused(Tensor("a"), frozen, "tensor 'a' is FROZEN_WORKING on rank 1");
  const NamedAlike alike = Ranks({3}, {Tensor("a"), Tensor("a")});
  const absl::Status status = TensorUnion::Make({&alike, 1}).status();
  EXPECT_THAT(status.ToString(), HasSubstr("rank 3 names tensor 'a' twice"));
}

TEST(TensorUnionTest, EquallySpacedMeshesFoldIntoOne) {
  v1::Placement placement;
  for (const uint32_t first : {6, 0, 2, 4}) *placement.add_meshes() = OnRanks(first, {2}, {1});
  const v1::Placement folded = Fold(placement);
  ASSERT_EQ(folded.meshes_size(), 1);
  EXPECT_EQ(folded.meshes(0).mesh().first(), 0);
  EXPECT_THAT(folded.meshes(0).mesh().size(), ElementsAre(4, 2));
  EXPECT_THAT(folded.meshes(0).mesh().stride(), ElementsAre(2, 1));
  *placement.add_meshes() = OnRanks(9, {2}, {1});
  EXPECT_EQ(Fold(placement).meshes_size(), 2) << "9 does not follow 6";
}

class SameSpecTest : public ::testing::Test {
 protected:
  SameSpecTest() {
    options_.job = "job";
    options_.durability = v1::DURABILITY_NONE;
    job_ = MakeSpec(options_, {Tensor("a"), Tensor("b", {2, 3})});
  }
  void ExpectDiffers(const v1::JobSpec& given, const char* words) {
    const absl::Status status = CheckSameSpec(given, job_);
    EXPECT_EQ(model::ReasonOf(status), model::kBadSpec) << status;
    EXPECT_THAT(status.ToString(), HasSubstr(words));
  }

  SessionOptions options_;
  v1::JobSpec job_;
};

TEST_F(SameSpecTest, TheOrderOfTensorsAndWhatTheJobKeepsDoNotMatter) {
  EXPECT_EQ(CheckSameSpec(job_, job_), absl::OkStatus());
  options_.seed = 9;
  options_.chunk_elements = 1 << 16;
  TensorSpec frozen = Tensor("a");
  frozen.frozen = v1::FROZEN_Q8;
  EXPECT_EQ(CheckSameSpec(MakeSpec(options_, {Tensor("b", {2, 3}), frozen}), job_), absl::OkStatus());
}

TEST_F(SameSpecTest, EachDifferenceIsNamed) {
  const std::vector<TensorSpec> tensors = {Tensor("a"), Tensor("b", {2, 3})};
  SessionOptions other = options_;
  other.durability = v1::DURABILITY_STEP;
  ExpectDiffers(MakeSpec(other, tensors), "the job has durability none, this session asks for step");
  other = options_;
  other.group_count = 2;
  ExpectDiffers(MakeSpec(other, tensors), "room for 1 parameter groups");
  other = options_;
  other.optimizer.working = kernels::Dtype::kF32;
  ExpectDiffers(MakeSpec(other, tensors), "a job's optimizer and formats cannot change");
  ExpectDiffers(MakeSpec(options_, {Tensor("a"), Tensor("b", {3, 2})}),
                "tensor 'b' differs: the job has unit 'u', shape [2, 3]");
}

TEST_F(SameSpecTest, AJobWhoseExpertsAreInTheirLayersUnitHasAWayOut) {
  TensorSpec tensor = Tensor("layers.3.experts.7.up", {2, 3});
  tensor.unit = "layers.3";
  job_ = MakeSpec(options_, {tensor});
  tensor.unit = "layers.3.experts.7";
  ExpectDiffers(
      MakeSpec(options_, {tensor}),
      "this session gives unit 'layers.3.experts.7', shape [2, 3], group 0, aliases []. A job keeps its units, "
      "and an earlier version of Ballast had experts in the units of their layers: export the job's state "
      "and the model's by the version that made it (export_state, state_dict), and load both into a new job "
      "(load_state_dict, import_state)");
  // Another unit, or another shape too, has no way out.
  for (const auto& [unit, shape] :
       {std::pair<std::string, std::vector<uint64_t>>{"layers.33", {2, 3}}, {"layers.3.experts.7", {3, 2}}}) {
    tensor.unit = unit;
    tensor.shape = shape;
    EXPECT_THAT(std::string(CheckSameSpec(MakeSpec(options_, {tensor}), job_).message()),
                testing::Not(testing::HasSubstr("export_state")));
  }
}

TEST_F(SameSpecTest, NamesThatDifferAreToldOnBothSides) {
  const absl::Status status = CheckSameSpec(MakeSpec(options_, {Tensor("b", {2, 3}), Tensor("c"), Tensor("d")}), job_);
  EXPECT_EQ(model::ReasonOf(status), model::kTensorsDiffer) << status;
  EXPECT_EQ(model::DetailsOf(status).at(model::kMissing), "a");
  EXPECT_EQ(model::DetailsOf(status).at(model::kUnknown), std::string("c\0d", 3));
}

TEST_F(SameSpecTest, ALaterRegistrationReplacesATensor) {
  v1::Registration* later = job_.add_registrations();
  later->set_version(5);
  *later->add_tensors() = ToProto(Tensor("a", {7}));
  EXPECT_EQ(CheckSameSpec(MakeSpec(options_, {Tensor("a", {7}), Tensor("b", {2, 3})}), job_), absl::OkStatus());
  ExpectDiffers(MakeSpec(options_, {Tensor("a", {4}), Tensor("b", {2, 3})}), "the job has unit 'u', shape [7]");
}

}  // namespace
}  // namespace ballast::client
