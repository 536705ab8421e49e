// Slices of a step, found in a log after a restart.
#include "ballast/services/job/logged_slices.h"

#include <memory>
#include <utility>
#include <vector>

#include "ballast/proto/base/status.h"
#include "ballast/services/job/replay.h"
#include "ballast/tests/services/job_part.h"

namespace ballast::services {
namespace {

using Use = LoggedSlices::Use;

// The payloads lie end to end in a file, which stands for the log.
class LoggedSlicesTest : public JobPartTest {
 protected:
  LoggedSlicesTest() { replay_.progress = &progress_; }
  // Appends all slices of the step.
  void Log(v1::SliceKind kind, float value) {
    for (uint32_t i = 0; i < plan().slices().size(); ++i) Log(PushOf(i, kind, value));
  }
  void Log(const Push& push) {
    storage::PayloadPlace place{
        .offset = content_.size(), .bytes = push.payload.size(), .crc32c = push.header.crc32c()};
    content_.insert(content_.end(), push.payload.begin(), push.payload.end());
    content_.resize(storage::AlignUp(content_.size()));
    slices_.push_back({.header = push.header, .payload = place, .index = slices_.size()});
  }
  absl::Status Load(Use use) {
    disk_.SetContent("log", content_);
    file_ = *disk_.Open("log", storage::Disk::Mode::kShared);
    replay_.file = file_.get();
    std::vector<const LoggedSlice*> slices;
    for (const LoggedSlice& slice : slices_) slices.push_back(&slice);
    return logged_.Load(slices, use, &replay_);
  }
  double SquaredNorm() {
    double sum = 0;
    Locked([&] {
      for (const auto& chunk : core_.state.chunks()) {
        const v1::ChunkNorm norm = chunk->intake.Norm(AllTensors(tensors()));
        for (const v1::SegmentNorm& segment : norm.segments()) sum += segment.squared_norm();
      }
    });
    return sum;
  }
  // Chunks that have all that the step needs.
  int Holding(const v1::StepHeader& header) {
    int holding = 0;
    Locked([&] {
      for (const auto& chunk : core_.state.chunks()) holding += chunk->intake.Holds(header, 0) ? 1 : 0;
    });
    return holding;
  }
  int AllChunks() const { return static_cast<int>(chunks_.size()); }

  std::vector<std::byte> content_;
  std::vector<LoggedSlice> slices_;
  std::unique_ptr<storage::BlockFile> file_;
  RecoveryProgress progress_;
  Replay replay_;
  LoggedSlices logged_{&core_, &room_};
};

TEST_F(LoggedSlicesTest, APreparedStepsSlicesAreReadIntoTheirChunks) {
  Open();
  Log(kGradient, 3);
  ASSERT_EQ(Load(Use::kPrepared), absl::OkStatus());
  EXPECT_EQ(Holding(UpdateHeader(tensors())), AllChunks());
  uint64_t elements = 0;
  for (const TestTensor& tensor : SmallModel()) elements += tensor.elements;
  EXPECT_DOUBLE_EQ(SquaredNorm(), 9.0 * static_cast<double>(elements));
  uint64_t bytes = 0;
  for (const LoggedSlice& slice : slices_) bytes += slice.payload.bytes;
  EXPECT_EQ(replay_.replayed_bytes, bytes);
  EXPECT_EQ(progress_.done_bytes, bytes);
}

TEST_F(LoggedSlicesTest, ADecidedStepsOnlySliceIsTakenByItsPlace) {
  Open();
  Log(kGradient, 3);
  ASSERT_EQ(Load(Use::kDecided), absl::OkStatus());
  EXPECT_EQ(Holding(UpdateHeader(tensors())), AllChunks());
  EXPECT_EQ(replay_.replayed_bytes, 0) << "the update reads them";
  storage::ChunkUpdate update;
  Intake::Buffers buffers;
  Locked([&] { chunks_[0]->intake.TakeGradient(&update, &buffers); });
  ASSERT_TRUE(update.logged_gradient.has_value());
  EXPECT_EQ(update.logged_gradient->offset, slices_[0].payload.offset);
  EXPECT_EQ(update.logged_gradient->crc32c, slices_[0].payload.crc32c);
}

TEST_F(LoggedSlicesTest, ValuesThatUpdatesDoNotReadBackAreReadAtOnce) {
  Open();
  Log(kValue, 5);
  ASSERT_EQ(Load(Use::kDecided), absl::OkStatus());
  EXPECT_EQ(Holding(ValuesHeader(tensors())), AllChunks());
  EXPECT_GT(replay_.replayed_bytes, 0);
}

TEST_F(LoggedSlicesTest, ARottenSliceOfAPreparedStepRefusesTheJob) {
  Open();
  Log(kGradient, 3);
  content_[slices_[1].payload.offset + 9] ^= std::byte{1};
  const absl::Status refused = Load(Use::kPrepared);
  EXPECT_EQ(refused.code(), absl::StatusCode::kDataLoss) << refused;
}

TEST_F(LoggedSlicesTest, ChunksThatHaveTheStepArePassedOver) {
  Open();
  Log(kGradient, 3);
  Locked([&] { chunks_[0]->Reach(0); });
  content_[slices_[0].payload.offset] ^= std::byte{1};  // nobody reads it
  ASSERT_EQ(Load(Use::kPrepared), absl::OkStatus());
  EXPECT_EQ(replay_.passed_bytes, slices_[0].payload.bytes);
  EXPECT_EQ(Holding(UpdateHeader(tensors())), AllChunks() - 1);
}

TEST_F(LoggedSlicesTest, ASliceThatTheTilingDoesNotHaveRefusesTheJob) {
  Open();
  Push push = PushOf(0, kGradient, 3);
  push.header.set_end(push.header.end() - 1);
  Log(push);
  EXPECT_EQ(model::ReasonOf(Load(Use::kPushed)), model::kDiverged);
}

TEST_F(LoggedSlicesTest, ASliceOfAnotherLengthRefusesTheJob) {
  Open();
  Push push = PushOf(0, kGradient, 3);
  push.payload.remove_suffix(2);
  Log(push);
  EXPECT_EQ(model::ReasonOf(Load(Use::kPushed)), model::kBadLength);
}

}  // namespace
}  // namespace ballast::services
