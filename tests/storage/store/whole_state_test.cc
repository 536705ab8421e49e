// A chunk's whole state goes from one server to another: the copy has the same bits, survives a restart, and goes on as
// the original does.
#include "ballast/storage/store/whole_state.h"

#include <fcntl.h>
#include <unistd.h>

#include <fstream>

#include "ballast/proto/base/status.h"
#include "ballast/tests/storage/store/copied_chunks.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ballast::storage {
namespace {

using kernels::MomentFormat;
using kernels::OptimizerSpec;
using ::testing::HasSubstr;

using enum TierKind;

struct CopyShape {
  const char* name;
  MomentFormat moments;
  bool durable;
};

class WholeStateTest : public ::testing::TestWithParam<CopyShape> {
 protected:
  static OptimizerSpec Spec() { return {.moments = GetParam().moments}; }
  static CopyingServer Server(std::vector<CopiedChunk> chunks) {
    return {Spec(), std::move(chunks), GetParam().durable};
  }
};
INSTANTIATE_TEST_SUITE_P(
    Formats, WholeStateTest,
    ::testing::Values(CopyShape{"F32", MomentFormat::kF32, false}, CopyShape{"F32Durable", MomentFormat::kF32, true},
                      CopyShape{"Bf16Durable", MomentFormat::kBf16, true}, CopyShape{"I8", MomentFormat::kI8, false},
                      CopyShape{"I8Durable", MomentFormat::kI8, true}, CopyShape{"F8Durable", MomentFormat::kF8, true}),
    [](const auto& info) { return info.param.name; });

// Each tier to each other, with working copies in either memory and without; and what is frozen.
TEST_P(WholeStateTest, ACopyHasTheSameBitsAndGoesOnAsTheOriginal) {
  std::vector<CopiedChunk> from, to;
  for (const TierKind one : {kHbm, kDram, kNvme}) {
    for (const CopiedChunk& other : {CopiedChunk{kHbm, StateForm::kFull, kHbm}, CopiedChunk{kHbm}, CopiedChunk{kDram},
                                     CopiedChunk{kDram, StateForm::kFull, std::nullopt}, CopiedChunk{kNvme}}) {
      from.push_back({one});
      to.push_back(other);
    }
  }
  for (const StateForm form : {StateForm::kWorking, StateForm::kQ8, StateForm::kMaster}) {
    from.insert(from.end(), {{kDram, form}, {kNvme, form}});
    to.insert(to.end(), {{kNvme, form}, {kDram, form}});
  }
  CopyingServer original(Spec(), from, GetParam().durable), copy(Spec(), to, GetParam().durable);
  for (uint64_t i = 0; i < from.size(); ++i) {
    SCOPED_TRACE(i);
    for (int64_t version = 0; version < 3; ++version)
      ASSERT_EQ(original.Step(i, version, i % 2 == 0), absl::OkStatus());
    if (i % 3 == 0) {
      ASSERT_EQ(copy.Step(i, 0), absl::OkStatus());  // what the import replaces
    }
    const WholeState whole = original.Whole(i);
    ASSERT_EQ(whole.arrays.size(), StateLayout(Spec()).Of(from[i].form).array_count());
    ASSERT_EQ(copy.Import(i, whole, 2), absl::OkStatus());
    EXPECT_TRUE(SameState(copy.Whole(i), whole));
    EXPECT_EQ(copy.Working(i), original.Working(i));
    ASSERT_EQ(original.Step(i, 3), absl::OkStatus());
    ASSERT_EQ(copy.Step(i, 3), absl::OkStatus());
    EXPECT_FALSE(SameState(copy.Whole(i), whole));
    EXPECT_TRUE(SameState(copy.Whole(i), original.Whole(i)));
    EXPECT_EQ(copy.Working(i), original.Working(i));
  }
}

TEST_P(WholeStateTest, AChunkThatWasNeverUpdatedIsZero) {
  CopyingServer original = Server({{kDram}, {kNvme}, {kHbm}}), copy = Server({{kNvme}, {kHbm}, {kDram}});
  for (uint64_t i = 0; i < 3; ++i) {
    ASSERT_EQ(copy.Step(i, 0), absl::OkStatus());
    ASSERT_EQ(copy.Import(i, original.Whole(i), 5), absl::OkStatus());
    EXPECT_TRUE(SameState(copy.Whole(i), original.Whole(i)));
    EXPECT_EQ(copy.Working(i), original.Working(i));
  }
}

// Of this process, in bytes.
uint64_t Resident() {
  uint64_t pages = 0, resident = 0;
  std::ifstream("/proc/self/statm") >> pages >> resident;
  return resident * static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
}

TEST(ImportedLaterTest, MemoryBecomesResidentWithTheImport) {
  constexpr uint64_t kChunks = 48;
  CopyingServer original({}, {{}}, false), copy({}, {}, false, /*gpu=*/false);
  ASSERT_EQ(original.Step(0, 0), absl::OkStatus());
  const WholeState whole = original.Whole(0);
  const uint64_t bytes = kChunks * StateLayout(OptimizerSpec()).StateBytes(CopyingServer::kElements);
  const uint64_t before = Resident();
  ASSERT_EQ(copy.Add(CopyingServer::Chunks(kChunks, {.imported = true})), absl::OkStatus());
  EXPECT_LT(Resident(), before + bytes / 4);
  EXPECT_GE(copy.tiers().used().dram, bytes) << "it is taken";
  for (uint64_t i = 0; i < kChunks; ++i) ASSERT_EQ(copy.Import(i, whole, 0), absl::OkStatus());
  EXPECT_GT(Resident(), before + bytes);
  EXPECT_TRUE(SameState(copy.Whole(kChunks - 1), whole));
  EXPECT_EQ(copy.Working(0), original.Working(0));
}

TEST_P(WholeStateTest, AnImportDoesNotReadTheStateThatItReplaces) {
  CopyingServer original = Server({{kDram}}), copy = Server({{kNvme}});
  ASSERT_EQ(original.Step(0, 0), absl::OkStatus());
  ASSERT_EQ(copy.Step(0, 0), absl::OkStatus());
  ASSERT_EQ(copy.Step(0, 1), absl::OkStatus());
  const WholeState whole = original.Whole(0);
  const uint64_t read = copy.tiers().traffic().read.nvme;
  ASSERT_EQ(copy.Import(0, whole, 2), absl::OkStatus());
  EXPECT_EQ(copy.tiers().traffic().read.nvme, read);
  EXPECT_TRUE(SameState(copy.Whole(0), whole));
}

TEST_P(WholeStateTest, AWrongStateIsRefusedBeforeAnythingChanges) {
  CopyingServer original = Server({{kDram}}), copy = Server({{kDram}, {kNvme}});
  ASSERT_EQ(original.Step(0, 0), absl::OkStatus());
  ASSERT_EQ(original.Step(0, 1), absl::OkStatus());
  const WholeState whole = original.Whole(0);
  for (const uint64_t chunk : {0, 1}) {
    SCOPED_TRACE(chunk);
    ASSERT_EQ(copy.Step(chunk, 0), absl::OkStatus());
    const WholeState before = copy.Whole(chunk);
    const auto refused = [&](const WholeState& wrong) { return copy.Import(chunk, wrong, 1); };
    WholeState fewer = whole;
    fewer.arrays.pop_back();
    EXPECT_EQ(refused(fewer).code(), absl::StatusCode::kInvalidArgument);
    WholeState shorter = whole;
    shorter.arrays[1].bytes.resize(shorter.arrays[1].bytes.size() - 4096);
    EXPECT_EQ(model::ReasonOf(refused(shorter)), model::kBadLength);
    WholeState damaged = whole;
    damaged.arrays[2].bytes[1000] ^= std::byte{4};
    const absl::Status status = refused(damaged);
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
    EXPECT_EQ(model::ReasonOf(status), model::kChecksum);
    std::vector<float> values;
    std::vector<std::byte> gradient;
    ChunkUpdate both = copy.UpdateOf(chunk, 1, &values, &gradient);
    both.imported = &whole;
    EXPECT_EQ(copy.Run(both).code(), absl::StatusCode::kInvalidArgument);
    EXPECT_TRUE(SameState(copy.Whole(chunk), before));
    ASSERT_EQ(refused(whole), absl::OkStatus()) << "the store goes on";
    EXPECT_TRUE(SameState(copy.Whole(chunk), whole));
  }
}

TEST_P(WholeStateTest, EarlierPinsForReadingLoseTheChunk) {
  CopyingServer original = Server({{kDram}}), copy = Server({{kDram}, {kNvme}, {kHbm}});
  for (int64_t version = 0; version < 4; ++version) ASSERT_EQ(original.Step(0, version), absl::OkStatus());
  const WholeState whole = original.Whole(0);
  const auto read = [&](int64_t pin, uint64_t chunk) {
    std::vector<float> to(CopyingServer::kElements);
    return copy.store().ReadPinnedState(pin, chunk, StateArray::kMaster, 0, absl::MakeSpan(to));
  };
  for (uint64_t i = 0; i < 3; ++i) {
    SCOPED_TRACE(i);
    ASSERT_EQ(copy.Step(i, 0), absl::OkStatus());
    ASSERT_EQ(copy.store().Pin(0), absl::OkStatus());
    ASSERT_EQ(copy.Step(i, 1), absl::OkStatus());  // the first pin has a copy of its own
    ASSERT_EQ(copy.store().Pin(1), absl::OkStatus());
    EXPECT_EQ(read(0, i), absl::OkStatus());
    EXPECT_EQ(read(1, i), absl::OkStatus());
    ASSERT_EQ(copy.Import(i, whole, 3), absl::OkStatus());
    EXPECT_EQ(model::ReasonOf(read(0, i)), model::kVersionGone);
    EXPECT_EQ(model::ReasonOf(read(1, i)), model::kVersionGone);
    ASSERT_EQ(copy.store().Pin(3), absl::OkStatus());
    ASSERT_EQ(copy.Step(i, 4), absl::OkStatus());
    EXPECT_EQ(model::ReasonOf(read(1, i)), model::kVersionGone);
    std::vector<float> master(CopyingServer::kElements);
    ASSERT_EQ(copy.store().ReadPinnedState(3, i, StateArray::kMaster, 0, absl::MakeSpan(master)), absl::OkStatus());
    EXPECT_EQ(std::memcmp(master.data(), whole.arrays[0].bytes.data(), master.size() * sizeof(float)), 0);
    for (const int64_t pin : {0, 1, 3}) copy.store().Unpin(pin);
  }
}

// Durable stores alone.
class ImportedTest : public ::testing::TestWithParam<TierKind> {
 protected:
  ImportedTest() {
    for (int64_t version = 0; version < 6; ++version) EXPECT_EQ(original_.Step(0, version), absl::OkStatus());
    whole_ = original_.Whole(0);
    // Few enough versions are written that nothing records them but Harden.
    for (uint64_t i = 0; i < kChunks; ++i) EXPECT_EQ(copy_.Step(i, 0, /*flush=*/true), absl::OkStatus());
    EXPECT_EQ(copy_.store().Harden(), absl::OkStatus());
    old_ = copy_.Whole(0);
  }
  static constexpr uint64_t kChunks = 6;
  CopyingServer original_{{}, {{kDram}}, false};
  CopyingServer copy_{{}, std::vector<CopiedChunk>(kChunks, {GetParam()}), true};
  WholeState whole_, old_;
};
INSTANTIATE_TEST_SUITE_P(Tiers, ImportedTest, ::testing::Values(kHbm, kDram, kNvme),
                         [](const auto& info) { return std::string(TierName(info.param)); });

TEST_P(ImportedTest, TheRecordedVersionIsThereAfterARestart) {
  ASSERT_EQ(copy_.Import(0, whole_, 5), absl::OkStatus());
  EXPECT_FALSE(copy_.store().dirty(0));
  ASSERT_EQ(copy_.store().Harden(), absl::OkStatus());
  EXPECT_EQ(copy_.store().durable_version(0), 5);
  EXPECT_EQ(copy_.store().recoverable_from(0), std::nullopt);
  EXPECT_EQ(copy_.recorded()[0].version, 5);
  for (size_t i = 0; i < whole_.arrays.size(); ++i) {
    EXPECT_EQ(copy_.recorded()[0].digests[i], whole_.arrays[i].crc32c);
  }
  copy_.Restart();
  EXPECT_EQ(copy_.store().durable_version(0), 5);
  EXPECT_TRUE(SameState(copy_.Whole(0), whole_)) << "moments are still on the disk";
  ASSERT_EQ(copy_.Step(0, 6, /*flush=*/true), absl::OkStatus());
  ASSERT_EQ(original_.Step(0, 6), absl::OkStatus());
  EXPECT_TRUE(SameState(copy_.Whole(0), original_.Whole(0)));
}

TEST_P(ImportedTest, WithoutARecordTheOldVersionIsThereAfterARestart) {
  ASSERT_EQ(copy_.Import(0, whole_, 5), absl::OkStatus());
  ASSERT_EQ(copy_.recorded()[0].version, 0);
  EXPECT_TRUE(copy_.store().recoverable_from(0).has_value());
  copy_.Restart();
  EXPECT_EQ(copy_.store().durable_version(0), 0);
  EXPECT_TRUE(SameState(copy_.Whole(0), old_));
  ASSERT_EQ(copy_.Import(0, whole_, 5), absl::OkStatus());
  EXPECT_TRUE(SameState(copy_.Whole(0), whole_));
}

TEST_P(ImportedTest, ReplacesAStateThatTheLogHasNotBroughtToTheDisk) {
  ASSERT_EQ(copy_.Step(0, 1), absl::OkStatus());  // dirty, where state is in memory
  ASSERT_EQ(copy_.Import(0, whole_, 5), absl::OkStatus());
  EXPECT_FALSE(copy_.store().dirty(0));
  ASSERT_EQ(copy_.store().Harden(), absl::OkStatus());
  EXPECT_EQ(copy_.recorded()[0].version, 5);
  EXPECT_EQ(copy_.store().recoverable_from(0), std::nullopt);
}

TEST_P(ImportedTest, EarlierDurablePinsKeepWhatTheyHaveOfTheChunk) {
  const uint64_t nvme = copy_.tiers().used().nvme;
  ASSERT_TRUE(copy_.store().PinDurably(0).ok());
  ASSERT_EQ(copy_.Import(0, whole_, 5), absl::OkStatus());
  ASSERT_EQ(copy_.store().Harden(), absl::OkStatus());
  EXPECT_EQ(copy_.store().VerifyPin(0, Uninterrupted), absl::OkStatus());
  for (uint64_t i = 0; i < kChunks; ++i) {
    ChunkUpdate restore;
    restore.chunk = i;
    restore.version = 6;
    restore.flush = true;
    restore.restored = 0;
    ASSERT_EQ(copy_.Run(restore), absl::OkStatus()) << i;
  }
  EXPECT_TRUE(SameState(copy_.Whole(0), old_));
  ASSERT_EQ(copy_.Import(0, whole_, 6), absl::OkStatus());
  ASSERT_EQ(copy_.store().Harden(), absl::OkStatus());
  ASSERT_TRUE(copy_.store().PinDurably(6).ok());
  ASSERT_EQ(copy_.Step(0, 7, /*flush=*/true), absl::OkStatus());
  ChunkUpdate restore;
  restore.version = 8;
  restore.flush = true;
  restore.restored = 6;
  ASSERT_EQ(copy_.Run(restore), absl::OkStatus());
  EXPECT_TRUE(SameState(copy_.Whole(0), whole_)) << "a later pin has it";
  copy_.store().UnpinDurably(0);
  copy_.store().UnpinDurably(6);
  EXPECT_EQ(copy_.tiers().used().nvme, nvme);
}

// A crash after the import: the entry of the pin still names its extent, which is still the pin's.
TEST_P(ImportedTest, TheExtentsOfEarlierPinsStayUntilTheyAreDropped) {
  const auto kept = copy_.store().PinDurably(0);
  ASSERT_TRUE(kept.ok()) << kept.status();
  ASSERT_EQ(copy_.Import(0, whole_, 5), absl::OkStatus());
  for (int64_t version = 6; version < 12; ++version) {
    for (uint64_t i = 0; i < kChunks; ++i) ASSERT_EQ(copy_.Step(i, version, /*flush=*/true), absl::OkStatus());
    ASSERT_EQ(copy_.store().Harden(), absl::OkStatus());
    EXPECT_NE(copy_.recorded()[0].offset, kept->front().offset);
  }
}

class DamagedTest : public ImportedTest {
 protected:
  void Damage(uint64_t offset) {
    const int fd = open(copy_.file().c_str(), O_RDWR);
    ASSERT_GE(fd, 0);
    char byte;
    ASSERT_EQ(pread(fd, &byte, 1, static_cast<off_t>(offset)), 1);
    byte ^= 0x10;
    ASSERT_EQ(pwrite(fd, &byte, 1, static_cast<off_t>(offset)), 1);
    close(fd);
  }
};
INSTANTIATE_TEST_SUITE_P(Tiers, DamagedTest, ::testing::Values(kDram, kNvme),
                         [](const auto& info) { return std::string(TierName(info.param)); });

TEST_P(DamagedTest, ADamagedStateDoesNotLeaveItsServerAndIsReplaced) {
  // After a restart the moments are on the disk, of state in DRAM too.
  Damage(copy_.recorded()[0].offset + StateLayout().ArrayAt(StateArray::kMoment2, CopyingServer::kElements) + 777);
  copy_.Restart();
  const absl::Status status = copy_.store().ReadWhole(0).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
  EXPECT_EQ(model::ReasonOf(status), model::kChecksum);
  EXPECT_THAT(status.ToString(), HasSubstr("chunk 0: moment2"));
  ASSERT_EQ(copy_.Import(0, whole_, 5), absl::OkStatus());
  EXPECT_TRUE(SameState(copy_.Whole(0), whole_));
}

TEST(NotWholeTest, APartOfAMasterDoesNotGoAlone) {
  for (const kernels::MasterFormat master : {kernels::MasterFormat::kRemainder, kernels::MasterFormat::kLent}) {
    const ScratchDirectory directory;
    const auto tiers = *Tiers::Open({.budget = {.dram = 64 << 20}, .directory = directory.path()});
    const bool copies = master == kernels::MasterFormat::kRemainder;
    ChunkStore store(tiers.get(), StateLayout({.master = master}, copies));
    Plan plan;
    plan.chunks.push_back({.state = kDram, .working = copies ? std::optional(kDram) : std::nullopt});
    ASSERT_EQ(store.Add(std::vector<uint64_t>{4096}, plan), absl::OkStatus());
    EXPECT_EQ(store.ReadWhole(0).status().code(), absl::StatusCode::kUnimplemented);
    const WholeState none;
    ChunkUpdate update;
    update.imported = &none;
    EXPECT_EQ(store.Run({&update, 1}, [](size_t) {}).code(), absl::StatusCode::kUnimplemented);
    EXPECT_EQ(store.ReadWhole(1).status().code(), absl::StatusCode::kInvalidArgument);
  }
}

}  // namespace
}  // namespace ballast::storage
