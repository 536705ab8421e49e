// The simulations are worth as much as the bugs they notice. Each bug in the table, planted alone, must break a promise
// within a bounded number of seeds of its harness.
//
//   seeded_storage_bugs_test [--gtest_filter=*/BUG]
//
// Prints bug, harness, seed and broken promise. A search begins at the seed in its row and goes on from there, so the
// search is short as long as schedules do not change.
#include <spdlog/spdlog.h>

#include <cstdio>
#include <cstdlib>
#include <initializer_list>
#include <string>

#include "ballast/tests/scratch_directory.h"
#include "ballast/tests/seeded/step_bugs.h"
#include "ballast/tests/seeded/storage_bugs.h"
#include "ballast/tests/sim_server/change_cuts.h"
#include "ballast/tests/sim_server/server_schedule.h"
#include "ballast/tests/storage/log/crash_run.h"
#include "ballast/tests/storage/store/remainder_run.h"
#include "ballast/tests/storage/store/store_crash_run.h"
#include "gtest/gtest.h"

namespace ballast::sim {
namespace {

using services::SeededBug;
using storage::StorageBug;

enum class Harness {
  kLogLives,
  kLogVoid,
  kLogVoidCut,
  kLogCreation,
  kStoreLives,
  kRemainders,
  kCrashes,
  kGoesOn,
  kIoErrors,
  kFullDisk,
  kRot,
  kChanges
};
constexpr const char* kHarnessNames[] = {"log_crash_test: lives",
                                         "log_crash_test: void batches",
                                         "log_crash_test: a void cut",
                                         "log_crash_test: creation",
                                         "store_crash_test",
                                         "remainder_life_test",
                                         "server_simulation_test: crashes",
                                         "server_simulation_test: groups that go on",
                                         "server_simulation_test: I/O errors",
                                         "server_simulation_test: full disks",
                                         "server_simulation_test: rot",
                                         "change_cuts_test"};
constexpr uint64_t kStorageSeedsMax = 2000;
constexpr uint64_t kServerSeedsMax = 400;
constexpr uint64_t kChangeSeedsMax = 12;
constexpr uint64_t kChangeCuts = 100;

struct Planted {
  const char* name = "";
  StorageBug bug = StorageBug::kNone;
  Harness harness = Harness::kLogLives;
  uint64_t first_seed = 1;
  SeededBug step_bug = SeededBug::kNone;
  uint64_t place = 0;  // of change_cuts_test, in the first seed; 0: so many places as kChangeCuts says
};

// A bug of changes is demanded of tests/sim_members alone. kLeastVersionForgotten: a server that restarts ends the
// epoch in change_cuts_test, and the next Open decides the step that was passed over, or voids it.
constexpr Planted kPlanted[] = {
    {"SyncDropped", StorageBug::kSyncDropped, Harness::kLogLives},
    {"SyncBeforeWritten", StorageBug::kSyncBeforeWritten, Harness::kLogLives},
    {"SyncBeforeHead", StorageBug::kSyncBeforeHead, Harness::kLogLives, 7},
    {"FailedSyncIgnored", StorageBug::kFailedSyncIgnored, Harness::kLogLives},
    {"FailedSyncRetried", StorageBug::kFailedSyncRetried, Harness::kLogLives, 12},
    {"ExtensionSyncForgiven", StorageBug::kExtensionSyncForgiven, Harness::kLogLives, 42},
    {"FailedWriteIgnored", StorageBug::kFailedWriteIgnored, Harness::kLogLives, 15},
    {"MarkBeforeSync", StorageBug::kMarkBeforeSync, Harness::kLogLives, 3},
    {"SaltConstant", StorageBug::kSaltConstant, Harness::kLogVoid},
    {"VoidCutBelieved", StorageBug::kVoidCutBelieved, Harness::kLogVoidCut},
    {"SegmentEndIgnored", StorageBug::kSegmentEndIgnored, Harness::kLogVoid},
    {"IncarnationReused", StorageBug::kIncarnationReused, Harness::kLogLives},
    {"CutOneStepEarly", StorageBug::kCutOneStepEarly, Harness::kLogLives},
    {"CutBeforeSnapshot", StorageBug::kCutBeforeSnapshot, Harness::kLogLives},
    {"FreedBeforeCutDurable", StorageBug::kFreedBeforeCutDurable, Harness::kLogLives},
    {"ReleasedTooMuch", StorageBug::kReleasedTooMuch, Harness::kCrashes, 79},
    {"ReopenSyncDropped", StorageBug::kReopenSyncDropped, Harness::kLogLives, 15},
    {"HeadBeforeContent", StorageBug::kHeadBeforeContent, Harness::kLogCreation, 7},
    {"FailedCreationLeft", StorageBug::kFailedCreationLeft, Harness::kLogCreation},
    {"BatchDigestUnchecked", StorageBug::kBatchDigestUnchecked, Harness::kLogLives},
    {"TornPayloadAccepted", StorageBug::kTornPayloadAccepted, Harness::kLogLives},
    {"RottenTakenForTorn", StorageBug::kRottenTakenForTorn, Harness::kLogLives},
    {"RottenPayloadServed", StorageBug::kRottenPayloadServed, Harness::kLogLives, 3},
    {"PayloadLeaseDropped", StorageBug::kPayloadLeaseDropped, Harness::kCrashes, 260},
    {"ExtentSyncDropped", StorageBug::kExtentSyncDropped, Harness::kStoreLives},
    {"FailedExtentSyncIgnored", StorageBug::kFailedExtentSyncIgnored, Harness::kStoreLives, 12},
    {"FailedExtentWriteIgnored", StorageBug::kFailedExtentWriteIgnored, Harness::kStoreLives, 7},
    {"FailedRecordIgnored", StorageBug::kFailedRecordIgnored, Harness::kStoreLives},
    {"OldFreedBeforeRecord", StorageBug::kOldFreedBeforeRecord, Harness::kStoreLives},
    {"OverwrittenInPlace", StorageBug::kOverwrittenInPlace, Harness::kStoreLives},
    {"LabelWithoutVersion", StorageBug::kLabelWithoutVersion, Harness::kStoreLives},
    {"RestoreDigestUnchecked", StorageBug::kRestoreDigestUnchecked, Harness::kStoreLives, 16},
    {"MomentsUnchecked", StorageBug::kMomentsUnchecked, Harness::kStoreLives, 230},
    {"LoadDigestUnchecked", StorageBug::kLoadDigestUnchecked, Harness::kStoreLives, 276},
    {"KeptExtentsGivenAgain", StorageBug::kKeptExtentsGivenAgain, Harness::kStoreLives},
    {"FlushedChunkStaysClean", StorageBug::kFlushedChunkStaysClean, Harness::kCrashes},
    {"UnrecordedCountsAsKept", StorageBug::kUnrecordedCountsAsKept, Harness::kCrashes, 441},
    {"PulledCopyOutlivesUpdate", StorageBug::kPulledCopyOutlivesUpdate, Harness::kStoreLives},
    {"CarryDropped", StorageBug::kCarryDropped, Harness::kRemainders},
    {"RemainderOutlivesValues", StorageBug::kRemainderOutlivesValues, Harness::kRemainders},
    {"PinInheritsRemainder", StorageBug::kPinInheritsRemainder, Harness::kRemainders},
    {"ReadBackUnchecked", StorageBug::kReadBackUnchecked, Harness::kStoreLives, 71},
    {"DeviceNotRecorded", StorageBug::kDeviceNotRecorded, Harness::kStoreLives},
    {"OtherDevicesUnsynced", StorageBug::kOtherDevicesUnsynced, Harness::kStoreLives},
    {"DeviceKnownByItsPath", StorageBug::kDeviceKnownByItsPath, Harness::kStoreLives},
    {"ScrubDigestUnchecked", StorageBug::kScrubDigestUnchecked, Harness::kStoreLives, 4},
    {"ScrubBelievesMovedOn", StorageBug::kScrubBelievesMovedOn, Harness::kStoreLives, 490},
    {"ScrubRewritesDirty", StorageBug::kScrubRewritesDirty, Harness::kStoreLives, 40},
    {"ScrubSyncDropped", StorageBug::kScrubSyncDropped, Harness::kStoreLives, 4},
    {"OldPlaceReadBack", StorageBug::kOldPlaceReadBack, Harness::kCrashes, 207},
    {"AckedUnsynced", StorageBug::kAckedUnsynced, Harness::kCrashes, 401},
    {"PromiseUnsynced", StorageBug::kPromiseUnsynced, Harness::kCrashes, 4},
    {"PromiseNotAwaited", StorageBug::kPromiseNotAwaited, Harness::kCrashes, 12},
    {"CutAtCommit", StorageBug::kCutAtCommit, Harness::kCrashes, 106},
    {"VersionAhead", StorageBug::kVersionAhead, Harness::kCrashes},
    {"ReplayedTwice", StorageBug::kReplayedTwice, Harness::kCrashes, 3},
    {"OldEpochReplayed", StorageBug::kOldEpochReplayed, Harness::kCrashes, 38},
    {"KeptReleased", StorageBug::kKeptReleased, Harness::kGoesOn, 7},
    {"KeptNotReplayed", StorageBug::kKeptNotReplayed, Harness::kGoesOn, 7},
    {"UndecidedForgotten", StorageBug::kUndecidedForgotten, Harness::kCrashes},
    {"SegmentsForgotten", StorageBug::kSegmentsForgotten, Harness::kCrashes, 84},
    {"CopyRecordedUnsynced", StorageBug::kExtentSyncDropped, Harness::kChanges, 1, SeededBug::kNone, 1},
    {"FilledBeforeDurable", StorageBug::kFilledBeforeDurable, Harness::kChanges, 2, SeededBug::kNone, 123},
    {"OldStateIsCopy", StorageBug::kOldStateIsCopy, Harness::kChanges, 5, SeededBug::kNone, 108},
    {"PassedOverIsCopy", StorageBug::kPassedOverIsCopy, Harness::kChanges, 15, SeededBug::kNone, 118},
    {"FreedBeforeErase", StorageBug::kFreedBeforeErase, Harness::kChanges, 1, SeededBug::kNone, 1},
    {"EntriesStay", StorageBug::kEntriesStay, Harness::kChanges, 1, SeededBug::kNone, 1},
    {"NothingFreed", StorageBug::kNone, Harness::kChanges, 1, SeededBug::kNothingFreed, 1},
    {"UnfilledForgotten", StorageBug::kNone, Harness::kChanges, 1, SeededBug::kUnfilledForgotten, 114},
    {"FilledUndecided", StorageBug::kNone, Harness::kChanges, 30, SeededBug::kFilledUndecided, 46},
    {"TableNotSynced", StorageBug::kNone, Harness::kChanges, 1, SeededBug::kTableNotSynced, 129},
    {"LeastVersionIgnored", StorageBug::kNone, Harness::kChanges, 2, SeededBug::kLeastVersionIgnored, 1}};

std::string RunCreation(uint64_t seed) {
  using storage::SimOperation;
  const SimOperation failing[] = {SimOperation::kWrite, SimOperation::kSync, SimOperation::kReserve};
  bool created = false;
  std::string violation;
  for (uint64_t n = 1; !created && violation.empty(); ++n) violation = storage::CrashInCreation(seed, n, &created);
  created = false;
  for (uint64_t n = 1; !created && violation.empty(); ++n) {
    violation = storage::ErrorInCreation(failing[seed % std::size(failing)], n, &created);
  }
  return violation;
}

// Runs a seed; returns the broken promise, or an empty string.
std::string RunSeed(const Planted& planted, uint64_t seed, const std::string& directory) {
  const Harness harness = planted.harness;
  switch (harness) {
    case Harness::kLogLives: {
      storage::CrashTally tally;
      return storage::RunLives(seed, &tally);
    }
    case Harness::kLogVoid:
      return storage::RunVoidBatches(seed);
    case Harness::kLogVoidCut:
      return storage::RunVoidCut(seed);
    case Harness::kLogCreation:
      return RunCreation(seed);
    case Harness::kStoreLives: {
      storage::StoreCrashTally tally;
      return storage::RunStoreLives(seed, directory, &tally);
    }
    case Harness::kRemainders: {
      storage::RemainderTally tally;
      return storage::RunRemainderLife(seed, directory, &tally);
    }
    case Harness::kChanges: {
      ChangeCutsTally tally;
      const uint64_t only = seed == planted.first_seed ? planted.place : 0;
      return SearchCuts({.seed = seed, .cuts_max = kChangeCuts, .only = only, .directory = directory}, &tally);
    }
    case Harness::kCrashes:
    case Harness::kGoesOn:
    case Harness::kIoErrors:
    case Harness::kFullDisk:
    case Harness::kRot:
      break;
  }
  const bool goes_on = harness == Harness::kGoesOn;
  const Faults faults = harness == Harness::kCrashes    ? Faults::kCrashes
                        : goes_on                       ? Faults::kCrashes
                        : harness == Harness::kIoErrors ? Faults::kIoErrors
                        : harness == Harness::kFullDisk ? Faults::kFullDisk
                                                        : Faults::kRot;
  return RunServerSchedule({.seed = seed, .faults = faults, .goes_on = goes_on, .directory = directory}).violation;
}

class SeededStorageBugTest : public testing::TestWithParam<Planted> {
 protected:
  ~SeededStorageBugTest() override { Plant({}); }
  static void Plant(const Planted& planted) {
    storage::seeded_bug = planted.bug;
    services::seeded_bug = planted.step_bug;
  }
  const ScratchDirectory directory_;
};

TEST_P(SeededStorageBugTest, IsCaught) {
  const Planted& planted = GetParam();
  const char* const harness = kHarnessNames[static_cast<size_t>(planted.harness)];
  const uint64_t seeds = planted.harness < Harness::kCrashes    ? kStorageSeedsMax
                         : planted.harness == Harness::kChanges ? kChangeSeedsMax
                                                                : kServerSeedsMax;
  Plant(planted);
  for (uint64_t seed = planted.first_seed; seed < planted.first_seed + seeds; ++seed) {
    const std::string violation = RunSeed(planted, seed, directory_.path());
    if (violation.empty()) continue;
    std::printf("  %s, %s, seed %llu: %s\n", planted.name, harness, static_cast<unsigned long long>(seed),
                violation.c_str());
    Plant({});
    EXPECT_EQ(RunSeed(planted, seed, directory_.path()), "") << "seed " << seed << " finds this without the bug";
    return;
  }
  FAIL() << planted.name << " broke no promise in " << seeds << " seeds of " << harness;
}

INSTANTIATE_TEST_SUITE_P(All, SeededStorageBugTest, testing::ValuesIn(kPlanted),
                         [](const auto& planted) { return planted.param.name; });

}  // namespace
}  // namespace ballast::sim

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  spdlog::set_level(std::getenv("SIM_LOG") != nullptr ? spdlog::level::debug : spdlog::level::off);
  return RUN_ALL_TESTS();
}
