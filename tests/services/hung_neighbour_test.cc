// Whatever a job has, in memory or on the disk, with a log or without: a neighbour whose disk hangs delays none of its
// steps, pulls, fences and dry runs.
#include <set>
#include <string>
#include <thread>

#include "absl/synchronization/mutex.h"
#include "ballast/tests/services/hung_disk.h"

namespace ballast::services {
namespace {

struct Kind {
  const char* name;
  v1::Durability durability;
  bool on_disk;  // its state
};
void PrintTo(const Kind& kind, std::ostream* out) { *out << kind.name; }

class HungNeighbourTest : public HungDiskTest, public ::testing::WithParamInterface<Kind> {
 protected:
  HungNeighbourTest()
      : other_({server_.get()}, Spec("other", GetParam().durability), 1),
        slow_({server_.get()}, SmallSpec("slow"), 1),
        hung_({server_.get()}, Spec("hung", v1::DURABILITY_NONE), 1) {}

  static v1::JobSpec SmallSpec(const std::string& name) {
    v1::JobSpec spec = MakeSpec(name, {{"small", "u", 256, 0}});
    spec.set_durability(v1::DURABILITY_STEP);
    return spec;
  }
  void StartOther() {
    if (GetParam().on_disk) {
      ASSERT_EQ(SetDram(server_.get(), 7 * kMiB / 2), absl::OkStatus());
    }
    ASSERT_NO_FATAL_FAILURE(Start(other_));
    ASSERT_EQ(NvmeStateBytes(server_.get(), "other") > 0, GetParam().on_disk);
  }
  static void Start(TrainerGroup& group) {
    ASSERT_EQ(group.Start(), absl::OkStatus());
    ASSERT_EQ(group.Initialise(Ones), absl::OkStatus());
    ASSERT_EQ(Step(group), absl::OkStatus());
  }
  // More steps than the log holds: chunks in memory are flushed, chunks on the disk get new versions.
  void ExpectTrainsOn() {
    for (int i = 0; i < 24; ++i) ASSERT_EQ(Step(other_), absl::OkStatus()) << i;
    ExpectGoesOn(other_);
  }
  // The offsets that a pull of every chunk's state of `hung_` reads.
  std::set<uint64_t> OffsetsOfHung() {
    std::set<uint64_t> offsets;
    absl::Mutex mu;
    disk_.Hold([&](const std::string& path, GatedOperation operation, uint64_t offset) {
      absl::MutexLock lock(&mu);
      if (absl::EndsWith(path, "/nvme.tier") && operation == GatedOperation::kRead) offsets.insert(offset);
      return false;
    });
    StateReads reads;
    reads.Ask(server_.get(), hung_, hung_.step() - 1);
    reads.ExpectOk();
    disk_.Release();
    return offsets;
  }
  void AwaitMoves() {
    for (;;) {
      uint64_t moving = 0;
      const v1::GetServerStatusResponse all = server_->Status();
      for (const v1::JobStatus& job : all.jobs()) moving += job.chunks_moving();
      if (moving == 0) return;
      absl::SleepFor(absl::Milliseconds(1));
    }
  }

  TrainerGroup other_, slow_, hung_;
};

INSTANTIATE_TEST_SUITE_P(Kinds, HungNeighbourTest,
                         ::testing::Values(Kind{"memory", v1::DURABILITY_NONE, false},
                                           Kind{"memory_and_log", v1::DURABILITY_STEP, false},
                                           Kind{"disk", v1::DURABILITY_NONE, true},
                                           Kind{"disk_and_log", v1::DURABILITY_STEP, true}),
                         [](const auto& info) { return info.param.name; });

TEST_P(HungNeighbourTest, AnOpenWhoseSpaceIsBeingReserved) {
  ASSERT_NO_FATAL_FAILURE(StartOther());
  HoldTier(GatedOperation::kReserve);
  Answer<v1::OpenResponse> opened;
  ASSERT_NO_FATAL_FAILURE(OpenFirst(slow_, &opened));
  disk_.AwaitWaiting();
  ExpectTrainsOn();
  EXPECT_FALSE(opened.arrived());
  disk_.Release();
  EXPECT_EQ(opened.Wait().status(), absl::OkStatus());
}

TEST_P(HungNeighbourTest, AnOpenWhoseLogIsBeingWritten) {
  ASSERT_NO_FATAL_FAILURE(StartOther());
  HoldLog("slow");
  Answer<v1::OpenResponse> opened;
  ASSERT_NO_FATAL_FAILURE(OpenFirst(slow_, &opened));
  disk_.AwaitWaiting();
  ExpectTrainsOn();
  EXPECT_FALSE(opened.arrived());
  disk_.Release();
  EXPECT_EQ(opened.Wait().status(), absl::OkStatus());
}

// Only the neighbour's part of the shared file hangs.
TEST_P(HungNeighbourTest, AJobWhoseStateCannotBeRead) {
  ASSERT_NO_FATAL_FAILURE(Start(other_));
  if (GetParam().on_disk) {
    ASSERT_NO_FATAL_FAILURE(Start(hung_));
    ASSERT_EQ(SetDram(server_.get(), 6 * kMiB), absl::OkStatus());
    AwaitMoves();
  } else {
    ASSERT_EQ(SetDram(server_.get(), 13 * kMiB / 2), absl::OkStatus());
    ASSERT_NO_FATAL_FAILURE(Start(hung_));
  }
  ASSERT_EQ(NvmeStateBytes(server_.get(), "other") > 0, GetParam().on_disk);
  ASSERT_GT(NvmeStateBytes(server_.get(), "hung"), 0u);
  ASSERT_EQ(PinForReading(hung_, hung_.step() - 1), absl::OkStatus());  // its worker is idle
  const std::set<uint64_t> offsets = OffsetsOfHung();
  ASSERT_FALSE(offsets.empty());
  disk_.Hold([&](const std::string& path, GatedOperation operation, uint64_t offset) {
    return absl::EndsWith(path, "/nvme.tier") && operation == GatedOperation::kRead && offsets.contains(offset);
  });
  StateReads reads;
  reads.Ask(server_.get(), hung_, hung_.step() - 1);
  disk_.AwaitWaiting();
  // The update waits for the reads of its pin.
  ASSERT_EQ(hung_.PushAll(v1::SLICE_KIND_GRADIENT, AllTensors(Tensors()), Ones), absl::OkStatus());
  ASSERT_TRUE(hung_.Finish(UpdateHeader(Tensors())).ok());
  ExpectTrainsOn();
  disk_.Release();
  reads.ExpectOk();
}

}  // namespace
}  // namespace ballast::services
