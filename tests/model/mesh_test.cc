// Boxes that meshes of ranks cut out of tensors, and the meshes that are refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "ballast/proto/base/status.h"
#include "ballast/proto/model/placement.h"

namespace ballast::model {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// 2 x 3 ranks from rank 1 on: rank 1 + 3 i + j has row part i and column part j.
v1::MeshCuts TwoByThree() {
  v1::MeshCuts part;
  v1::Mesh& mesh = *part.mutable_mesh();
  mesh.set_first(1);
  mesh.add_size(2);
  mesh.add_size(3);
  mesh.add_stride(3);
  mesh.add_stride(1);
  for (const uint32_t axis : {0, 1}) {
    v1::Cut& cut = *part.add_cuts();
    cut.set_axis(axis);
    cut.set_dimension(axis);
  }
  return part;
}

TEST(MeshTest, RanksAreInRowMajorOrder) {
  EXPECT_THAT(RanksOf(TwoByThree().mesh()), ElementsAre(1, 2, 3, 4, 5, 6));
  EXPECT_EQ(CheckMesh(TwoByThree(), 7), absl::OkStatus());
}

TEST(MeshTest, EveryElementIsInOneBox) {
  const std::vector<uint64_t> shape = {5, 7};
  std::vector<int> seen(35);
  for (uint64_t place = 0; place < 6; ++place) {
    const absl::StatusOr<Box> box = BoxAt(TwoByThree(), shape, place);
    ASSERT_TRUE(box.ok()) << box.status();
    uint64_t in_box = 0;
    for (const BoxRun& run : RunsOf(shape, *box)) {
      EXPECT_EQ(run.in_box, in_box);
      in_box += run.count;
      for (uint64_t i = 0; i < run.count; ++i) ++seen[run.in_tensor + i];
    }
    EXPECT_EQ(in_box, ElementsOf(*box));
  }
  EXPECT_EQ(seen, std::vector<int>(35, 1));
}

TEST(MeshTest, RefusalsSayWhatIsWrong) {
  const std::vector<std::pair<std::string, std::function<void(v1::MeshCuts*)>>> wrong = {
      {"at most 16",
       [](auto* part) {
         for (int i = 0; i < 20; ++i) part->mutable_mesh()->add_size(1);
       }},
      {"has no rank", [](auto* part) { part->mutable_mesh()->set_size(0, 0); }},
      {"2 axes and 1 strides", [](auto* part) { part->mutable_mesh()->mutable_stride()->RemoveLast(); }},
      {"lists 1 ranks and has sizes for 6", [](auto* part) { part->mutable_mesh()->add_ranks(0); }},
      {"names rank 7; the group has 7", [](auto* part) { part->mutable_mesh()->set_first(2); }},
      {"names rank 2 twice", [](auto* part) { part->mutable_mesh()->set_stride(0, 1); }},
      {"names rank 9; the group has 7",
       [](auto* part) {
         for (const uint32_t rank : {0, 1, 2, 3, 4, 9}) part->mutable_mesh()->add_ranks(rank);
       }},
      {"a cut names axis 2", [](auto* part) { part->mutable_cuts(1)->set_axis(2); }},
      {"cuts twice along axis 0", [](auto* part) { part->mutable_cuts(1)->set_axis(0); }},
  };
  for (const auto& [message, change] : wrong) {
    v1::MeshCuts part = TwoByThree();
    change(&part);
    const absl::Status refused = CheckMesh(part, 7);
    EXPECT_EQ(ReasonOf(refused), kBadRange) << message;
    EXPECT_THAT(std::string(refused.message()), HasSubstr(message));
  }
}

}  // namespace
}  // namespace ballast::model
