#include "ballast/proto/model/layout.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "ballast/proto/base/status.h"

namespace ballast::model {
namespace {

using ::testing::HasSubstr;

void AddTensor(v1::Registration* registration, const std::string& unit, const std::string& name, uint64_t elements,
               uint32_t group = 0) {
  v1::TensorSpec* tensor = registration->add_tensors();
  tensor->set_name(name);
  tensor->set_unit(unit);
  tensor->add_shape(elements);
  tensor->set_group(group);
}

v1::JobSpec TwoUnits() {
  v1::JobSpec spec;
  spec.set_name("job");
  spec.set_chunk_elements(1 << 16);
  spec.set_group_count(2);
  v1::Registration* registration = spec.add_registrations();
  AddTensor(registration, "a", "a.gain", 100, 1);
  AddTensor(registration, "a", "a.weight", 70000, 0);
  AddTensor(registration, "b", "b.weight", 300, 0);
  return spec;
}

TEST(LayoutTest, TensorsOfAGroupLieTogetherAtAlignedOffsets) {
  const auto layout = Layout::Make(TwoUnits());
  ASSERT_TRUE(layout.ok()) << layout.status();
  const Tensor& weight = layout->tensors()[*layout->FindTensor("a.weight")];
  const Tensor& gain = layout->tensors()[*layout->FindTensor("a.gain")];
  EXPECT_EQ(weight.range, (Range{0, 70000}));
  EXPECT_EQ(gain.range, (Range{70144, 70244}));
  EXPECT_EQ(layout->units()[0].elements, 70400u);
  EXPECT_EQ(layout->parameters(), 70400u);
}

TEST(LayoutTest, ChunksAreCutInsideOneUnitAndNameTheirSegments) {
  const auto layout = Layout::Make(TwoUnits());
  ASSERT_TRUE(layout.ok());
  ASSERT_EQ(layout->chunks().size(), 3u);
  const Chunk& tail = layout->chunks()[1];
  EXPECT_EQ(tail.range, (Range{65536, 70400}));
  ASSERT_EQ(tail.segments.size(), 2u);
  EXPECT_EQ(tail.segments[0].in_chunk, (Range{0, 70000 - 65536}));
  EXPECT_EQ(tail.segments[1].in_chunk, (Range{70144 - 65536, 70244 - 65536}));
  EXPECT_EQ(layout->chunks()[2].unit, 1u);
}

TEST(LayoutTest, TensorsThatAreFrozenAlikeLieTogetherBehindTheTrained) {
  v1::JobSpec spec = TwoUnits();
  AddTensor(spec.mutable_registrations(0), "a", "a.base", 66000);
  AddTensor(spec.mutable_registrations(0), "a", "a.quantized", 10);
  spec.mutable_registrations(0)->mutable_tensors(3)->set_frozen(v1::FROZEN_WORKING);
  spec.mutable_registrations(0)->mutable_tensors(4)->set_frozen(v1::FROZEN_Q8);
  const auto layout = Layout::Make(spec);
  ASSERT_TRUE(layout.ok()) << layout.status();
  EXPECT_EQ(layout->tensors()[3].range, (Range{131072, 197072}));
  EXPECT_EQ(layout->tensors()[4].range, (Range{262144, 262154}));
  std::vector<v1::Frozen> frozen;
  for (const uint64_t chunk : layout->units()[0].chunks) frozen.push_back(layout->chunks()[chunk].frozen);
  EXPECT_THAT(frozen, ::testing::ElementsAre(v1::FROZEN_UNSPECIFIED, v1::FROZEN_UNSPECIFIED, v1::FROZEN_WORKING,
                                             v1::FROZEN_WORKING, v1::FROZEN_Q8));
  EXPECT_EQ(layout->chunks()[3].range, (Range{196608, 197120}));
}

TEST(LayoutTest, AssistedTensorsLieBetweenTheTrainedAndTheFrozen) {
  v1::JobSpec spec = TwoUnits();
  for (const char* const name : {"a.frozen", "a.state", "a.update"}) {
    AddTensor(spec.mutable_registrations(0), "a", name, 10);
  }
  auto* const tensors = spec.mutable_registrations(0)->mutable_tensors();
  tensors->Mutable(3)->set_frozen(v1::FROZEN_WORKING);
  tensors->Mutable(4)->set_assist(v1::ASSIST_STATE);
  tensors->Mutable(5)->set_assist(v1::ASSIST_UPDATE);
  const auto layout = Layout::Make(spec);
  ASSERT_TRUE(layout.ok()) << layout.status();
  std::vector<std::pair<v1::Frozen, v1::Assist>> kept;
  for (const uint64_t chunk : layout->units()[0].chunks) {
    kept.emplace_back(layout->chunks()[chunk].frozen, layout->chunks()[chunk].assist);
  }
  EXPECT_THAT(kept, ::testing::ElementsAre(std::pair(v1::FROZEN_UNSPECIFIED, v1::ASSIST_UNSPECIFIED),
                                           std::pair(v1::FROZEN_UNSPECIFIED, v1::ASSIST_UNSPECIFIED),
                                           std::pair(v1::FROZEN_UNSPECIFIED, v1::ASSIST_UPDATE),
                                           std::pair(v1::FROZEN_UNSPECIFIED, v1::ASSIST_STATE),
                                           std::pair(v1::FROZEN_WORKING, v1::ASSIST_UNSPECIFIED)));
  EXPECT_EQ(layout->parameters(), Layout::Make(TwoUnits())->parameters() + 20);
}

TEST(LayoutTest, LaterTensorsAreAppendedAndMoveNothing) {
  v1::JobSpec spec = TwoUnits();
  const auto before = Layout::Make(spec);
  v1::Registration* later = spec.add_registrations();
  AddTensor(later, "a", "a.extra", 10);
  AddTensor(later, "b", "b.weight", 600);
  const auto after = Layout::Make(spec);
  ASSERT_TRUE(after.ok()) << after.status();
  for (size_t i = 0; i < before->chunks().size(); ++i) EXPECT_EQ(before->chunks()[i].range, after->chunks()[i].range);
  EXPECT_EQ(after->tensors()[*after->FindTensor("a.extra")].range, (Range{131072, 131082}));
  const uint32_t resized = *after->FindTensor("b.weight");
  EXPECT_EQ(resized, 4u);
  EXPECT_TRUE(after->live(resized));
  EXPECT_FALSE(after->live(2));
  EXPECT_EQ(after->parameters(), 70100u + 10 + 600);
}

TEST(LayoutTest, CutFindsTheChunksOfARange) {
  const auto layout = Layout::Make(TwoUnits());
  const auto pieces = layout->Cut(0, {65000, 66000});
  ASSERT_TRUE(pieces.ok());
  ASSERT_EQ(pieces->size(), 2u);
  EXPECT_EQ((*pieces)[0].range, (Range{65000, 65536}));
  EXPECT_EQ((*pieces)[1].range, (Range{65536, 66000}));
  EXPECT_EQ(ReasonOf(layout->Cut(0, {70000, 80000}).status()), kBadRange);
  EXPECT_EQ(ReasonOf(layout->Cut(0, {5, 5}).status()), kBadRange);
  EXPECT_EQ(ReasonOf(layout->Cut(7, {0, 1}).status()), kUnknownUnit);
}

TEST(LayoutTest, RefusesBadSpecsByName) {
  const auto refused = [](v1::JobSpec spec, const std::string& words) {
    const auto layout = Layout::Make(spec);
    EXPECT_EQ(ReasonOf(layout.status()), kBadSpec);
    EXPECT_THAT(layout.status().message(), HasSubstr(words));
  };
  v1::JobSpec spec = TwoUnits();
  spec.set_chunk_elements(1000);
  refused(spec, "power of two from 65536 to 1048576, got 1000");
  for (const uint32_t groups : {uint32_t{0}, kGroupsMax + 1, ~uint32_t{0}}) {
    spec = TwoUnits();
    spec.set_group_count(groups);
    refused(spec, absl::StrCat("group_count must be from 1 to 16384, got ", groups));
  }
  spec = TwoUnits();
  AddTensor(spec.mutable_registrations(0), "a", "a.gain", 3);
  refused(spec, "'a.gain' is given to two tensors");
  spec = TwoUnits();
  AddTensor(spec.mutable_registrations(0), "a", "a.z", 3, 9);
  refused(spec, "parameter group 9 but the job has 2");
  spec = TwoUnits();
  AddTensor(spec.mutable_registrations(0), "a", "a.z", 0);
  refused(spec, "extent of 0");
  spec = TwoUnits();
  AddTensor(spec.mutable_registrations(0), "a", "a.z", uint64_t{1} << 63);
  refused(spec, "more than 2^42 elements");
  spec = TwoUnits();
  AddTensor(spec.mutable_registrations(0), "a", "a.z", uint64_t{1} << 41);
  refused(spec, "more than 1048576 chunks; raise chunk_elements");
  spec = TwoUnits();
  spec.clear_registrations();
  refused(spec, "no tensors");
}

TEST(LayoutTest, NamesBelongToOneTensorOverAllRegistrations) {
  v1::JobSpec spec = TwoUnits();
  spec.mutable_registrations(0)->mutable_tensors(2)->add_aliases("head.weight");
  const auto refused = [&](const char* name, const char* alias, const std::string& words) {
    v1::JobSpec grown = spec;
    v1::Registration* later = grown.add_registrations();
    AddTensor(later, "c", name, 3);
    if (*alias != 0) later->mutable_tensors(0)->add_aliases(alias);
    const auto layout = Layout::Make(grown);
    EXPECT_EQ(ReasonOf(layout.status()), kBadSpec);
    EXPECT_THAT(layout.status().message(), HasSubstr(words));
  };
  refused("head.weight", "", "the name 'head.weight' is an alias of tensor 'b.weight'");
  refused("c.weight", "head.weight",
          "the name 'head.weight' of tensor 'c.weight' belongs to tensor 'b.weight' already");
  refused("c.weight", "b.weight", "belongs to tensor 'b.weight' already");
  // Replacing a tensor frees the names that it no longer has.
  v1::Registration* later = spec.add_registrations();
  AddTensor(later, "b", "b.weight", 7);
  AddTensor(later, "c", "head.weight", 3);
  const auto layout = Layout::Make(spec);
  ASSERT_TRUE(layout.ok()) << layout.status();
  EXPECT_NE(*layout->FindTensor("head.weight"), *layout->FindTensor("b.weight"));
}

TEST(LayoutTest, RefusesOtherDtypes) {
  v1::JobSpec spec = TwoUnits();
  spec.set_working_dtype(v1::DTYPE_BF16);
  spec.mutable_registrations(0)->mutable_tensors(1)->set_dtype(v1::DTYPE_F32);
  const auto layout = Layout::Make(spec);
  EXPECT_EQ(ReasonOf(layout.status()), kBadDtype);
  EXPECT_THAT(layout.status().message(),
              HasSubstr("to be DTYPE_F32 (1); all working parameters of this job are DTYPE_BF16"));
}

TEST(LayoutTest, AliasesNameTheSameTensor) {
  v1::JobSpec spec = TwoUnits();
  spec.mutable_registrations(0)->mutable_tensors(2)->add_aliases("head.weight");
  const auto layout = Layout::Make(spec);
  ASSERT_TRUE(layout.ok());
  EXPECT_EQ(*layout->FindTensor("head.weight"), *layout->FindTensor("b.weight"));
  EXPECT_EQ(ReasonOf(layout->FindTensor("nobody").status()), kUnknownTensor);
}

}  // namespace
}  // namespace ballast::model
