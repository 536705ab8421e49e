// Pushed slices: whole and right, or not held at all.
#include "ballast/services/job/pushes.h"

#include <limits>
#include <memory>
#include <vector>

#include "absl/strings/escaping.h"
#include "ballast/proto/base/status.h"
#include "ballast/services/journal/log_records.h"
#include "ballast/services/threads/reply.h"
#include "ballast/storage/log/gradient_log.h"
#include "ballast/tests/services/job_part.h"
#include "ballast/tests/storage/log/all_records.h"

namespace ballast::services {
namespace {

using ::testing::HasSubstr;

class PushesTest : public JobPartTest {
 protected:
  // Whether the machine holds the slice: an equal push needs no bytes then.
  bool Held(const Push& push) {
    bool held = false;
    Locked([&] {
      const auto admission = core_.machine->Admit(push.header, [](uint32_t) { return false; });
      held = admission.ok() && *admission == StepMachine::Admission::kHeld;
    });
    return held;
  }
  // The sum of squares of the slice's chunk, with all tensors present.
  double SquaredNorm(uint32_t slice) {
    double sum = 0;
    Locked([&] {
      const v1::ChunkNorm norm = Norm(core_.state.plan()->slices()[slice].chunk, AllTensors(tensors()));
      for (const v1::SegmentNorm& segment : norm.segments()) sum += segment.squared_norm();
    });
    return sum;
  }
  // Elements of tensors in the slice: the rest is padding.
  uint64_t Elements(uint32_t slice) {
    uint64_t elements = 0;
    const model::Slice& s = plan().slices()[slice];
    for (const model::Segment& segment : plan().layout().chunks()[s.chunk].segments) {
      elements += segment.in_chunk.size();
    }
    return elements;
  }
  void ExpectRefused(Push push, absl::StatusCode code, const char* reason, const char* words) {
    Send(&push);
    RunAll();
    const absl::Status status = push.answer.Wait().status();
    EXPECT_EQ(status.code(), code) << status;
    EXPECT_EQ(model::ReasonOf(status), reason) << status;
    EXPECT_THAT(status.ToString(), HasSubstr(words));
    EXPECT_FALSE(Held(push));
  }
  void StartLog() {
    auto log = storage::GradientLog::Create(
        &disk_, {.path = kLog, .job = "job", .segment_bytes = uint64_t{1} << 20, .segment_count = 8});
    ASSERT_TRUE(log.ok()) << log.status();
    ASSERT_EQ(journal_.Start(*std::move(log), /*logged=*/true), absl::OkStatus());
  }
  // The slices that the log has.
  std::vector<v1::PushRequest> Logged() {
    std::vector<v1::PushRequest> slices;
    const auto file = *disk_.Open(kLog, storage::Disk::Mode::kShared);
    const auto scanned = storage::ScanLog(*file);
    EXPECT_TRUE(scanned.ok()) << scanned.status();
    const auto all = storage::RecordsOf(*file, *scanned);
    EXPECT_TRUE(all.ok()) << all.status();
    for (const storage::ReadRecord& read : all->records) {
      const auto record = DecodeRecord(read);
      EXPECT_TRUE(record.ok()) << record.status();
      if (const auto* slice = std::get_if<SliceRecord>(&*record)) slices.push_back(slice->header);
    }
    return slices;
  }

  // Opens the job as a table gives it to this server alone.
  void OpenWithTable() {
    v1::Table table;
    v1::Member* const member = table.add_members();
    member->set_server_id("s");
    member->set_weight(1);
    table.set_replicas(1);
    table.set_life(1);
    table.add_shards()->add_holders(0);
    table_ = table;
    Open();
  }
  // Slice 0 is held, and the bytes of slice 1 are coming when the group opens its next epoch.
  void OpenAmidPushes(Push* held, Push* coming) {
    OpenWithTable();
    *held = PushOf(0, kGradient, 3);
    Send(held);
    RunAll();
    ASSERT_EQ(held->answer.Wait().status(), absl::OkStatus());
    *coming = PushOf(1, kGradient, 4);
    services::Run({[&] {
      Send(coming);
      EXPECT_FALSE(coming->answer.arrived());
      OpenWithTable();
      Push again = PushOf(1, kGradient, 4);
      Send(&again);
      EXPECT_FALSE(again.answer.arrived()) << "the place has its writer";
      again_ = again.answer;
    }});
    RunAll();
    EXPECT_EQ(model::ReasonOf(coming->answer.Wait().status()), model::kStaleEpoch);
    EXPECT_EQ(again_.Wait().status(), absl::OkStatus());
    EXPECT_DOUBLE_EQ(SquaredNorm(1), 16.0 * static_cast<double>(Elements(1)));
    EXPECT_EQ(PushSlice(0, kGradient, 3), absl::OkStatus());
    EXPECT_EQ(core_.counters.duplicate_pushes, 1);
    EXPECT_EQ(model::ReasonOf(PushSlice(0, kGradient, 4)), model::kDigestConflict);
    EXPECT_DOUBLE_EQ(SquaredNorm(0), 9.0 * static_cast<double>(Elements(0)));
  }
  Answer<v1::PushResponse> again_;

  static constexpr char kLog[] = "/data/log-job";
};

TEST_F(PushesTest, AnAnsweredSliceIsHeldWithItsBytes) {
  Open();
  Push push = PushOf(0, kGradient, 3);
  Send(&push);
  RunAll();
  EXPECT_EQ(push.answer.Wait().status(), absl::OkStatus());
  EXPECT_TRUE(Held(push));
  EXPECT_DOUBLE_EQ(SquaredNorm(0), 9.0 * static_cast<double>(Elements(0)));
}

TEST_F(PushesTest, DamagedBytesAreNotHeldAndTheSliceMayComeAgain) {
  Open();
  Push damaged = PushOf(0, kGradient, 3);
  damaged.header.set_crc32c(damaged.header.crc32c() ^ 1);
  ExpectRefused(damaged, absl::StatusCode::kUnavailable, model::kChecksum, "send it again");
  EXPECT_EQ(PushSlice(0, kGradient, 2), absl::OkStatus());
  EXPECT_DOUBLE_EQ(SquaredNorm(0), 4.0 * static_cast<double>(Elements(0)));
}

TEST_F(PushesTest, WithinAProcessNoChecksumIsCompared) {
  Open();
  Push push = PushOf(0, kGradient, 3);
  push.header.set_crc32c(0);
  Send(&push, Checksum::kNone);
  RunAll();
  EXPECT_EQ(push.answer.Wait().status(), absl::OkStatus());
  EXPECT_DOUBLE_EQ(SquaredNorm(0), 9.0 * static_cast<double>(Elements(0)));
}

TEST_F(PushesTest, WhatIsNoSliceIsRefused) {
  Open();
  Push push = PushOf(0, kGradient, 1);
  push.header.set_kind(v1::SLICE_KIND_UNSPECIFIED);
  ExpectRefused(push, absl::StatusCode::kInvalidArgument, model::kBadRequest, "GRADIENT or VALUE");
  push = PushOf(0, kGradient, 1);
  push.header.set_end(push.header.begin());
  ExpectRefused(push, absl::StatusCode::kInvalidArgument, model::kBadRange, "is empty");
  push = PushOf(0, kGradient, 1);
  push.payload.remove_suffix(2);
  ExpectRefused(push, absl::StatusCode::kInvalidArgument, model::kBadLength, "DTYPE_BF16 (2 bytes each)");
  push = PushOf(0, kValue, 1);
  push.header.set_kind(kGradient);
  ExpectRefused(push, absl::StatusCode::kInvalidArgument, model::kBadLength, "is the dtype right?");
}

TEST_F(PushesTest, AValueThatIsNotFiniteIsNamed) {
  Open();
  Push push = PushOf(0, kValue, 1);
  float bad = std::numeric_limits<float>::infinity();
  std::memcpy(const_cast<std::byte*>(push.payload.data()) + 12 * sizeof(float), &bad, sizeof(bad));
  push.header.set_crc32c(kernels::Crc32c(push.payload));
  ExpectRefused(push, absl::StatusCode::kInvalidArgument, model::kBadRequest, "element 12 of tensor 'embed' is inf");
  EXPECT_EQ(PushSlice(0, kValue, 1), absl::OkStatus());
}

TEST_F(PushesTest, ARepeatedPushIsOneAndOtherBytesConflict) {
  Open();
  ASSERT_EQ(PushSlice(0, kGradient, 3), absl::OkStatus());
  EXPECT_EQ(PushSlice(0, kGradient, 3), absl::OkStatus());
  EXPECT_EQ(core_.counters.duplicate_pushes, 1);
  EXPECT_EQ(model::ReasonOf(PushSlice(0, kGradient, 4)), model::kDigestConflict);
  EXPECT_DOUBLE_EQ(SquaredNorm(0), 9.0 * static_cast<double>(Elements(0)));
}

TEST_F(PushesTest, AFenceDuringTheCopyVoidsTheSlice) {
  Open();
  Push old = PushOf(0, kGradient, 3);
  // The copy runs once the outermost call's replies do, which is after the fence.
  services::Run({[&] {
    Send(&old);
    EXPECT_FALSE(old.answer.arrived());
    Open();
  }});
  RunAll();
  EXPECT_EQ(model::ReasonOf(old.answer.Wait().status()), model::kStaleEpoch);
  EXPECT_EQ(PushSlice(0, kGradient, 5), absl::OkStatus());
  EXPECT_DOUBLE_EQ(SquaredNorm(0), 25.0 * static_cast<double>(Elements(0)));
}

TEST_F(PushesTest, ASliceOfAnOlderEpochIsNotLogged) {
  spec_.set_durability(v1::DURABILITY_STEP);
  StartLog();
  Open();
  Push old = PushOf(0, kGradient, 3);
  services::Run({[&] {
    Send(&old);
    Open();
  }});
  RunAll();
  EXPECT_EQ(model::ReasonOf(old.answer.Wait().status()), model::kStaleEpoch);
  EXPECT_EQ(PushSlice(0, kGradient, 5), absl::OkStatus());
  const std::vector<v1::PushRequest> logged = Logged();
  ASSERT_EQ(logged.size(), 1);
  EXPECT_EQ(logged[0].epoch().counter(), 2);
}

TEST_F(PushesTest, TheGroupsNextEpochKeepsWhatWasAccepted) {
  Push held, coming;
  ASSERT_NO_FATAL_FAILURE(OpenAmidPushes(&held, &coming));
  group_ = "another";
  OpenWithTable();
  EXPECT_EQ(PushSlice(0, kGradient, 4), absl::OkStatus()) << "nothing is held any more";
  EXPECT_DOUBLE_EQ(SquaredNorm(0), 16.0 * static_cast<double>(Elements(0)));
}

TEST_F(PushesTest, TheGroupsNextEpochKeepsWhatWasLogged) {
  spec_.set_durability(v1::DURABILITY_STEP);
  StartLog();
  Push held, coming;
  ASSERT_NO_FATAL_FAILURE(OpenAmidPushes(&held, &coming));
  const std::vector<v1::PushRequest> slices = Logged();
  ASSERT_EQ(slices.size(), 2);
  EXPECT_EQ(slices[0].begin(), held.header.begin());
  EXPECT_EQ(slices[0].epoch().counter() + 1, slices[1].epoch().counter());
}

TEST_F(PushesTest, AFenceEndsAPushThatWaits) {
  OpenWithTable();
  const std::shared_ptr<HeldChunk> chunk = chunks_[plan().slices()[0].chunk];
  Locked([&] { chunk->AwaitUpdate(); });
  Push push = PushOf(0, kGradient, 3);
  Send(&push);
  RunAll();
  EXPECT_FALSE(push.answer.arrived());
  group_ = "another";
  Fence();
  ASSERT_TRUE(push.answer.arrived());
  const absl::Status stale = push.answer.Wait().status();
  EXPECT_EQ(model::ReasonOf(stale), model::kStaleEpoch) << stale;
  EXPECT_EQ(model::DetailsOf(stale).at(model::kPromised), "2.0");
  EXPECT_EQ(model::DetailsOf(stale).at(model::kGroup), absl::BytesToHexString("another"));
  EXPECT_EQ(push_bytes_.used(), 0);
}

TEST_F(PushesTest, DamagedBytesAreNotLogged) {
  spec_.set_durability(v1::DURABILITY_STEP);
  StartLog();
  Open();
  Push damaged = PushOf(0, kGradient, 3);
  damaged.header.set_crc32c(damaged.header.crc32c() ^ 1);
  ExpectRefused(damaged, absl::StatusCode::kUnavailable, model::kChecksum, "send it again");
  EXPECT_TRUE(Logged().empty());
  EXPECT_EQ(PushSlice(0, kGradient, 3), absl::OkStatus());
  EXPECT_EQ(Logged().size(), 1);
}

TEST_F(PushesTest, ASliceWaitsForTheUpdateOfItsChunk) {
  Open();
  const std::shared_ptr<HeldChunk> chunk = chunks_[plan().slices()[0].chunk];
  Locked([&] { chunk->AwaitUpdate(); });
  Push push = PushOf(0, kGradient, 3);
  Send(&push);
  RunAll();
  EXPECT_FALSE(push.answer.arrived());
  EXPECT_EQ(push_bytes_.used(), push.payload.size());
  Locked([&](Replies* replies) {
    chunk->BeginUpdate();
    chunk->EndUpdate(-1);
    core_.WakePushes(chunk.get(), replies);
  });
  RunAll();
  EXPECT_EQ(push.answer.Wait().status(), absl::OkStatus());
  EXPECT_EQ(push_bytes_.used(), 0);
  EXPECT_DOUBLE_EQ(SquaredNorm(0), 9.0 * static_cast<double>(Elements(0)));
}

}  // namespace
}  // namespace ballast::services
