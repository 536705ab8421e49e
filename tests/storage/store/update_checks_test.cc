// Updates that a chunk cannot take are refused before anything changes.
#include "ballast/storage/store/update_checks.h"

#include <optional>
#include <vector>

#include "ballast/storage/store/chunk_update.h"
#include "ballast/storage/store/stored_chunk.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ballast::storage {
namespace {

using kernels::MasterFormat;
using kernels::OptimizerSpec;
using ::testing::HasSubstr;

class UpdateChecksTest : public ::testing::Test {
 protected:
  static constexpr uint64_t kElements = 1024;

  UpdateChecksTest() { Use(StateLayout(OptimizerSpec())); }
  void Use(const StateLayout& layout, bool working_copy = false) {
    const SharedMemory memory{.state = nullptr, .working = working_copy ? bytes_.data() : nullptr};
    chunk_.emplace(layout, 7, kElements, 42, ChunkMemory({}, {}, memory), NvmeExtent());
  }
  void ExpectTaken(const ChunkUpdate& update) { EXPECT_EQ(CheckUpdate(*chunk_, update), absl::OkStatus()); }
  void ExpectRefused(const ChunkUpdate& update, const char* reason, const char* words) {
    const absl::Status status = CheckUpdate(*chunk_, update);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_EQ(model::ReasonOf(status), reason) << status;
    EXPECT_THAT(status.ToString(), HasSubstr(words));
  }
  absl::Span<const float> Floats(uint64_t count) const { return absl::MakeConstSpan(floats_).subspan(0, count); }
  // A gradient in bf16.
  absl::Span<const std::byte> Gradient(uint64_t elements) const {
    return absl::MakeConstSpan(bytes_).subspan(0, 2 * elements);
  }

  std::vector<float> floats_ = std::vector<float>(2 * kElements);
  std::vector<std::byte> bytes_ = std::vector<std::byte>(4 * kElements);
  std::optional<StoredChunk> chunk_;
};

TEST_F(UpdateChecksTest, ARangeNeverLeavesTheChunk) {
  EXPECT_EQ(CheckRange(0, 10, 0, 10), absl::OkStatus());
  EXPECT_EQ(CheckRange(0, 10, 10, 0), absl::OkStatus());
  EXPECT_FALSE(CheckRange(0, 10, 11, 0).ok());
  EXPECT_FALSE(CheckRange(0, 10, 9, 2).ok());
  EXPECT_FALSE(CheckRange(0, 10, 1, ~uint64_t{0}).ok()) << "their sum is 0";
}

TEST_F(UpdateChecksTest, ValuesLieInTheChunk) {
  ExpectTaken({.values = {{.begin = 0, .values = Floats(kElements)}}});
  ExpectTaken({.values = {{.begin = 3, .values = Floats(kElements - 3)}}});
  ExpectRefused({.values = {{.begin = 3, .values = Floats(kElements - 2)}}}, model::kBadRange,
                "leave chunk 7 of 1024 elements");
  ExpectRefused({.values = {{.begin = 3, .narrow = Gradient(kElements - 2)}}}, model::kBadRange, "leave chunk 7");
}

TEST_F(UpdateChecksTest, ASegmentIsWholeBlocksFromItsBegin) {
  ExpectTaken({.segments = {{.begin = 256, .end = 300}}, .gradient = Gradient(kElements)});
  ExpectRefused({.segments = {{.begin = 255, .end = 300}}, .gradient = Gradient(kElements)}, model::kBadRange,
                "expected a multiple of 256");
  ExpectRefused({.segments = {{.begin = 256, .end = 255}}, .gradient = Gradient(kElements)}, model::kBadRange,
                "leave chunk 7");
  ExpectRefused({.segments = {{.begin = 768, .end = 1025}}, .gradient = Gradient(kElements)}, model::kBadRange,
                "leave chunk 7");
}

TEST_F(UpdateChecksTest, TheGradientCoversTheSegments) {
  ExpectTaken({.segments = {{.begin = 256, .end = 512}}, .gradient = Gradient(256), .gradient_begin = 256});
  ExpectRefused({.segments = {{.begin = 256, .end = 512}}, .gradient = Gradient(255), .gradient_begin = 256},
                model::kBadLength, "has 510 bytes");
  ExpectRefused({.segments = {{.begin = 256, .end = 512}}, .gradient = Gradient(256), .gradient_begin = 257},
                model::kBadLength, "from element 257");
  ExpectRefused({.segments = {{.begin = 0, .end = 256}}}, model::kBadLength, "has 0 bytes");
  ExpectRefused({.segments = {{.begin = 0, .end = 256}}, .gradient = Gradient(kElements + 1)}, model::kBadLength,
                "gradient of chunk 7");
  ChunkUpdate odd{.segments = {{.begin = 0, .end = 256}}, .gradient = Gradient(257)};
  odd.gradient.remove_suffix(1);
  ExpectRefused(odd, model::kBadLength, "has 513 bytes");
}

TEST_F(UpdateChecksTest, ALoggedGradientIsMeasuredAsLogged) {
  ChunkUpdate update{.segments = {{.begin = 0, .end = 256}}, .logged_gradient = PayloadPlace{.bytes = 512}};
  ExpectTaken(update);
  update.logged_gradient->bytes = 510;
  update.gradient = Gradient(kElements);  // it does not count
  ExpectRefused(update, model::kBadLength, "has 510 bytes");
}

TEST_F(UpdateChecksTest, ALentGradientNeedsNoOther) {
  ExpectTaken({.segments = {{.begin = 0, .end = 256, .gradient = bytes_.data()}}});
  ExpectRefused({.segments = {{.begin = 0, .end = 256, .gradient = bytes_.data()}, {.begin = 256, .end = 257}}},
                model::kBadLength, "gradient of chunk 7");
}

TEST_F(UpdateChecksTest, PartsOfALoggedSliceLieInTheSlice) {
  const auto logged = [](uint64_t begin, uint64_t end) {
    ChunkUpdate update;
    update.logged_values = {{.place = {.bytes = 400}, .begin = 100, .parts = {{.begin = begin, .end = end}}}};
    return update;
  };
  ExpectTaken(logged(100, 200));
  ExpectTaken(logged(150, 150));
  ExpectRefused(logged(99, 200), model::kBadRange, "not in the slice of 100 from 100 on");
  ExpectRefused(logged(100, 201), model::kBadRange, "not in the slice");
  ExpectRefused(logged(150, 149), model::kBadRange, "not in the slice");
  ChunkUpdate beyond = logged(1000, 1020);
  beyond.logged_values[0].begin = 1000;
  ExpectRefused(beyond, model::kBadRange, "leave chunk 7");
}

TEST_F(UpdateChecksTest, TheTrainersMemoryIsNamedOnlyWhereThereIsNoWorkingCopy) {
  const ChunkUpdate lent{.segments = {{.begin = 0, .end = 256, .working = bytes_.data()}}, .gradient = Gradient(256)};
  ExpectTaken(lent);
  Use(StateLayout(OptimizerSpec()), /*working_copy=*/true);
  ExpectRefused(lent, model::kBadRequest, "has a working copy of its own");
  ExpectRefused({.values = {{.values = Floats(4), .working = bytes_.data()}}}, model::kBadRequest, "working copy");
  ExpectRefused({.values = {{.narrow = Gradient(4)}}}, model::kBadRequest, "working copy");
  ChunkUpdate logged;
  logged.logged_values = {{.place = {.bytes = 16}, .parts = {{.begin = 0, .end = 4, .working = bytes_.data()}}}};
  ExpectRefused(logged, model::kBadRequest, "working copy");
  ExpectTaken({.values = {{.values = Floats(4)}}});
}

TEST_F(UpdateChecksTest, ALentMasterIsNamedByEverySegment) {
  Use(StateLayout(OptimizerSpec{.master = MasterFormat::kLent}, /*working_copies=*/false));
  ExpectTaken({.segments = {{.begin = 0, .end = 256, .working = bytes_.data()}}, .gradient = Gradient(256)});
  ExpectRefused({.segments = {{.begin = 0, .end = 256}}, .gradient = Gradient(256)}, model::kBadRequest,
                "does not name that memory");
  ChunkUpdate logged;
  logged.logged_values = {{.place = {.bytes = 16}, .parts = {{.begin = 0, .end = 4}}}};
  ExpectRefused(logged, model::kBadRequest, "does not name that memory");
}

TEST_F(UpdateChecksTest, AFrozenChunkTakesValuesAlone) {
  for (const StateForm form : {StateForm::kWorking, StateForm::kQ8}) {
    Use(StateLayout(OptimizerSpec(), /*working_copies=*/true, form));
    ExpectTaken({.values = {{.begin = 0, .values = Floats(256)}}});
    ExpectRefused({.segments = {{.begin = 0, .end = 256}}, .gradient = Gradient(256)}, model::kBadRequest,
                  "is frozen: values are all that it takes");
    ExpectRefused({.values_of = StateArray::kMoment1, .values = {{.values = Floats(256)}}}, model::kBadRequest,
                  "is frozen");
  }
}

TEST_F(UpdateChecksTest, CodedValuesCoverWholeBlocks) {
  Use(StateLayout(OptimizerSpec(), /*working_copies=*/true, StateForm::kQ8));
  ExpectTaken({.values = {{.begin = 256, .values = Floats(100)}, {.begin = 512, .values = Floats(10)}}});
  ExpectTaken({.values = {{.begin = 100, .values = Floats(10)}, {.begin = 0, .values = Floats(100)}}});
  ExpectRefused({.values = {{.begin = 10, .values = Floats(100)}}}, model::kBadRange, "from element 10 of chunk 7");
  ExpectRefused({.values = {{.begin = 0, .values = Floats(100)}, {.begin = 99, .values = Floats(4)}}}, model::kBadRange,
                "or the end of others, 100");
  Use(StateLayout(OptimizerSpec(), /*working_copies=*/true, StateForm::kWorking));
  ExpectTaken({.values = {{.begin = 10, .values = Floats(100)}}});
}

TEST_F(UpdateChecksTest, ValuesOfAMomentComeAlone) {
  ExpectTaken({.values_of = StateArray::kMoment2, .values = {{.begin = 512, .values = Floats(100)}}});
  ExpectRefused({.values_of = StateArray::kMoment3, .values = {{.values = Floats(1)}}}, model::kBadRequest,
                "the job's optimizer keeps 2");
  ExpectRefused({.values_of = StateArray::kMoment1, .segments = {{.begin = 0, .end = 256}}, .gradient = Gradient(256)},
                model::kBadRequest, "moments and gradients in one update");
  ExpectRefused({.values_of = StateArray::kMoment1, .values = {{.narrow = Gradient(256)}}}, model::kBadRequest,
                "are fp32, and no parameters");
  ExpectRefused({.values_of = StateArray::kMoment1, .values = {{.begin = 3, .values = Floats(4)}}}, model::kBadRange,
                "moments from element 3");
}

}  // namespace
}  // namespace ballast::storage
