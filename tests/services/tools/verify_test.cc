// `ballastctl verify` on directories that a server really wrote: clean ones, and ones with a seeded damage each.
#include <filesystem>
#include <fstream>

#include "absl/time/clock.h"
#include "ballast/proto/base/status.h"
#include "ballast/storage/catalog/directory_format.h"
#include "ballast/storage/io/small_file.h"
#include "ballast/tests/directory_content.h"
#include "ballast/tests/services/daemon.h"
#include "ballast/tests/services/logged_slices.h"
#include "ballast/tests/services/tools/verify_fixture.h"

namespace ballast::services {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

TEST_F(VerifyTest, FindsNothingInACleanDirectory) {
  Train(20);
  const ScrubReport report = Scrub();
  EXPECT_THAT(report.findings, IsEmpty()) << report.findings[0].what << " " << report.findings[0].found;
  EXPECT_EQ(report.counts.durable_jobs, 1u);
  EXPECT_GT(report.counts.extents, 0u);
  EXPECT_GT(report.counts.payloads_needed, 0u);
  ExpectRecovered();
}

TEST_F(VerifyTest, WritesNothing) {
  Train(8);
  const auto list = [&] {
    std::map<std::string, std::pair<uint64_t, fs::file_time_type>> files;
    for (const auto& entry : fs::recursive_directory_iterator(directory_.path())) {
      if (entry.is_regular_file() && entry.path().filename() != "LOCK.ballast") {
        files[entry.path()] = {entry.file_size(), entry.last_write_time()};
      }
    }
    return files;
  };
  const auto before = list();
  EXPECT_THAT(Scrub().findings, IsEmpty());
  EXPECT_TRUE(list() == before);
}

TEST_F(VerifyTest, FindsNothingAfterACrash) {
  StartServer();
  ASSERT_EQ(group_->Initialise(Values), absl::OkStatus());
  Continue(9);
  for (uint32_t slice = 0; slice < 3; ++slice) {  // of a step that nobody finishes
    ASSERT_EQ(group_->PushSlice(slice, v1::SLICE_KIND_GRADIENT, Gradients(group_->step())), absl::OkStatus());
  }
  // The server is idle then: a copy is what a crash leaves.
  AwaitIdle(server_.get(), "job");
  const absl::Time patience = absl::Now() + absl::Minutes(1);
  while (LoggedSlices(group_->step(), directory_ / "log-job").size() < 3 && absl::Now() < patience) {
    absl::SleepFor(absl::Milliseconds(5));
  }
  ScratchDirectory crashed;
  fs::copy(directory_.path(), crashed.path(), fs::copy_options::recursive);
  StopServer();
  const auto report = Verify(crashed.path(), nullptr);
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_THAT(report->findings, IsEmpty());
}

TEST_F(VerifyTest, RebuildsALostCatalog) {
  Train(20);
  fs::remove_all(directory_ / "catalog");
  ExpectFound(Harm::kServerRefused, "the catalog cannot be opened");
  server_id_.clear();  // the rebuilt catalog knows it
  ExpectRebuilt();
}

TEST_F(VerifyTest, RebuildsBeforeTheFirstFlushAndAfterManyRestarts) {
  Train(1);
  fs::remove_all(directory_ / "catalog");
  ExpectRebuilt();
  for (int i = 0; i < 6; ++i) {
    StartServer();
    Continue(7);
    StopServer();
    EXPECT_THAT(Scrub().findings, IsEmpty());
  }
  fs::remove_all(directory_ / "catalog");
  ExpectRebuilt();
}

TEST_F(VerifyTest, MovesADamagedCatalogAside) {
  Train(12);
  for (const auto& entry : fs::directory_iterator(directory_ / "catalog")) {
    if (entry.path().filename().string().starts_with("MANIFEST")) {
      std::ofstream(entry.path(), std::ios::trunc) << "not what RocksDB wrote";
    }
  }
  ExpectFound(Harm::kServerRefused, "the catalog cannot be opened");
  ExpectRebuilt();
  EXPECT_TRUE(fs::exists(directory_ / "catalog.damaged-1/CURRENT"));
}

TEST_F(VerifyTest, FindsThatCurrentIsMissing) {
  Train(12);
  fs::remove(directory_ / "catalog/CURRENT");
  ExpectFound(Harm::kServerRefused, "CURRENT is missing");
  ExpectRebuilt();
}

TEST_F(VerifyTest, FindsADamagedArrayAndLabel) {
  Train(20);
  const storage::DurableChunk chunk = Chunks()[2];
  const storage::StateLayout layout;
  Flip("nvme.tier", chunk.offset + layout.ArrayAt(storage::StateArray::kMoment1, chunk.elements) + 77);
  ExpectFound(Harm::kJobRefused, absl::StrCat("the moment 1 array of chunk 2 at version ", chunk.version));
  // Its older versions are behind what the log begins with.
  ExpectNotRebuilt("job 'job': ");
  EXPECT_EQ(Chunks()[2].Encode(), chunk.Encode());
  Flip("nvme.tier", chunk.offset + layout.LabelAt(chunk.elements) + 9);
  ExpectFound(Harm::kJobRefused, absl::StrCat("the label of chunk 2 at version ", chunk.version));
}

TEST_F(VerifyTest, KnowsDurablePins) {
  StartServer();
  ASSERT_EQ(group_->Initialise(Values), absl::OkStatus());
  Continue(3);
  PinDurably(3);
  Continue(20);
  StopServer();
  ScrubReport report = Scrub();
  EXPECT_THAT(report.findings, IsEmpty());
  EXPECT_GT(report.counts.extents, Chunks().size());
  // A catalog's entry that is gone is made anew, and the pin stays.
  Erase("job/job/chunk-2");
  const RebuildResult rebuilt = Remake();
  EXPECT_TRUE(rebuilt.written);
  EXPECT_EQ(Scrub().counts.extents, report.counts.extents);
  ExpectRecovered();

  StartServer();
  EXPECT_THAT(server_->Status().jobs(0).durable_versions(), ::testing::ElementsAre(3));
  StopServer();
  // Where a pin alone keeps it, damage refuses nobody but its restore.
  auto opened = DataDirectory::Open(directory_.path());
  ASSERT_TRUE(opened.ok()) << opened.status();
  std::vector<Finding> findings;
  const JobEntry entry = (*opened)->ReadJobs(&findings)->at("job").entry;
  opened->reset();
  ASSERT_EQ(entry.pins.size(), 1u);
  const auto any = [](const storage::DurableChunk&) { return storage::StateLayout(); };
  const auto kept = PinnedExtents("job", any, entry.chunks, entry.pins);
  ASSERT_FALSE(kept.empty());
  Flip("nvme.tier", kept[0].chunk.offset + 77);
  ExpectFound(Harm::kNone, "which the pin of version 3 keeps");
  ASSERT_EQ(Scrub().findings.size(), 1u);
}

// An old copy of the catalog has a pin that was unpinned since, so its extents now belong to newer versions. With
// chunks of equal size, whole extents do.
TEST_F(VerifyTest, ForgetsAPinWhoseStatesAreGone) {
  for (const bool uniform : {false, true}) {
    if (uniform) {
      fs::remove_all(directory_.path());
      fs::create_directory(directory_.path());
      spec_ = MakeSpec(
          "job", {{"a", "u0", 131072, 0}, {"b", "u1", 131072, 1}, {"c", "u2", 131072, 0}, {"d", "u3", 131072, 1}});
      spec_.set_durability(v1::DURABILITY_STEP);
    }
    StartServer();
    ASSERT_EQ(group_->Initialise(Values), absl::OkStatus());
    Continue(3);
    PinDurably(3);
    Continue(12);
    StopServer();
    fs::copy(directory_ / "catalog", directory_ / "old", fs::copy_options::recursive);
    StartServer();
    ASSERT_EQ(UnpinDurably(server_.get(), "job", group_->epoch(), 3), absl::OkStatus());
    Continue(40);
    StopServer();
    fs::remove_all(directory_ / "catalog");
    fs::rename(directory_ / "old", directory_ / "catalog");
    const RebuildResult rebuilt = Remake();
    EXPECT_TRUE(rebuilt.written);
    EXPECT_THAT(rebuilt.done, ::testing::Contains(HasSubstr("forgot the pin of version 3")));
    EXPECT_THAT(Scrub().findings, IsEmpty());
    ExpectRecovered();
  }
}

TEST_F(VerifyTest, FindsThatARestoreHasNoPin) {
  StartServer();
  ASSERT_EQ(group_->Initialise(Values), absl::OkStatus());
  Continue(3);
  PinDurably(3);
  Continue(2);
  StopServer();
  StartServer();
  v1::StepHeader restore;
  restore.set_kind(v1::STEP_KIND_RESTORE);
  restore.set_restored_version(3);
  restore.set_gradient_presence(std::string(1, 0));
  restore.set_value_presence(std::string(1, 0));
  ASSERT_EQ(group_->SealAll(restore).status(), absl::OkStatus());
  StopServer();
  EXPECT_THAT(Scrub().findings, IsEmpty());
  Erase("job/job/pin-");
  ExpectFound(Harm::kJobRefused, "the pin that step 6 restores chunk 0");
  ExpectRefusedAtStart("version 3, which step 6 restores, is not pinned");
}

TEST_F(VerifyTest, FindsATierThatWasCutOff) {
  Train(20);
  uint64_t last = 0;
  for (const storage::DurableChunk& chunk : Chunks()) last = std::max(last, chunk.offset);
  fs::resize_file(directory_ / "nvme.tier", last + 4096);
  ExpectFound(Harm::kJobRefused, "the place of chunk");
  ExpectRefusedAtStart(directory_ / "nvme.tier");
  fs::remove(directory_ / "nvme.tier");
  ExpectFound(Harm::kJobRefused, "in a file of 0 bytes");
  ExpectRefusedAtStart(directory_ / "nvme.tier");
}

TEST_F(VerifyTest, FindsAndRebuildsWrongCatalogEntries) {
  Train(20);
  const std::vector<storage::DurableChunk> chunks = Chunks();
  ASSERT_EQ(chunks.size(), 5u);

  storage::DurableChunk moved = chunks[1];
  moved.offset = chunks[3].offset;
  Put("job/job/chunk-1", moved.Encode());
  ExpectFound(Harm::kJobRefused, "an overlap with chunk");
  ExpectFound(Harm::kJobRefused, "no label, or a damaged one");
  ExpectRefusedAtStart("another entry says the same");
  ExpectRebuilt();

  Put("job/job/chunk-1", "rubbish");
  ExpectFound(Harm::kJobRefused, "'chunk-1' cannot be read");
  ExpectRefusedAtStart("the catalog's 'chunk-1' of job 'job'");
  ExpectRebuilt();

  Erase("job/job/chunk-1");
  ExpectFound(Harm::kJobRefused, "chunk 1 has no durable version");
  ExpectRebuilt();

  Erase("job/job/open");
  ExpectFound(Harm::kUnnoticed, "chunks of a job without its Open");
  ExpectRebuilt();

  Erase("job/");
  ExpectFound(Harm::kJobRefused, "the catalog does not know the job of this log");
  ExpectRefusedAtStart("the catalog does not know the job of ");
  ExpectRebuilt();

  Erase("server_id");
  ExpectFound(Harm::kJobRefused, "no 'server_id'");
  ExpectRebuilt();
}

// If an entry cannot be read, its extent is unknown. So other jobs leave the whole file alone until a rebuild.
TEST_F(VerifyTest, RebuildsAJobAfterOthersWentOn) {
  Train(20);
  const uint64_t file_bytes = fs::file_size(directory_ / "nvme.tier");
  Put("job/job/chunk-1", "rubbish");
  Put("job/job/chunk-3", "rubbish");
  for (int start = 0; start < 2; ++start) {
    auto server = StateServer::Start(Options());
    ASSERT_TRUE(server.ok()) << server.status();
    v1::JobSpec spec = MakeSpec("other", SmallModel());
    spec.set_durability(v1::DURABILITY_STEP);
    TrainerGroup other({server->get()}, spec, 2, 100 + start);
    ASSERT_EQ(other.Start(), absl::OkStatus());
    if (start == 0) {
      ASSERT_EQ(other.Initialise(Values), absl::OkStatus());
    }
    for (int i = 0; i < 20; ++i) {
      ASSERT_EQ(other.PushAll(v1::SLICE_KIND_GRADIENT, AllTensors(kTensors), Gradients(other.step())),
                absl::OkStatus());
      ASSERT_EQ(other.Finish(UpdateHeader(kTensors)).status(), absl::OkStatus());
    }
  }
  EXPECT_GT(fs::file_size(directory_ / "nvme.tier"), file_bytes);
  ExpectRebuilt();
}

TEST_F(VerifyTest, FindsAStaleEntryOfAChunk) {
  Train(20);
  const std::string before = Chunks()[4].Encode();
  StartServer();
  Continue(20);
  StopServer();
  Put("job/job/chunk-4", before);
  const ScrubReport report = Scrub();
  EXPECT_GE(report.worst(), Harm::kJobRefused);
  ExpectRebuilt();
}

TEST_F(VerifyTest, FindsAChunkThatIsNewerThanTheLog) {
  Train(6);
  fs::copy(directory_ / "log-job", directory_ / "kept");
  StartServer();
  Continue(20);
  StopServer();
  fs::rename(directory_ / "kept", directory_ / "log-job");
  ExpectFound(Harm::kJobRefused, "is newer than its job's log");
  ExpectFound(Harm::kJobRefused, "the log ends before the step that the catalog knows as applied");
  ExpectRefusedAtStart("and the server had applied step 26");
  ExpectNotRebuilt("the log is an older copy");
}

// Only the number in the catalog tells of steps that changed no chunk, such as skips.
TEST_F(VerifyTest, ARebuildBelievesTheNumberOfTheLastStepApplied) {
  Train(6);
  const auto [key, value] = CommittedPair("job", 9);
  Put(key, value);
  ExpectFound(Harm::kJobRefused, "the log ends before the step that the catalog knows as applied");
  ExpectNotRebuilt("step 9 was applied, and its log ends at step 6");
}

TEST_F(VerifyTest, ExtentsWithoutACatalogAreNotTakenForFree) {
  Train(20);
  fs::remove_all(directory_ / "catalog");
  fs::remove(directory_ / "log-job");
  const auto bytes = fs::file_size(directory_ / "nvme.tier");
  EXPECT_GT(bytes, 0);
  ExpectFound(Harm::kServerRefused, "the catalog cannot be opened");
  const absl::Status refused = StateServer::Start(Options()).status();
  EXPECT_TRUE(absl::IsDataLoss(refused)) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("move nvme.tier away"));
  EXPECT_EQ(fs::file_size(directory_ / "nvme.tier"), bytes);
  EXPECT_FALSE(fs::exists(directory_ / "catalog/CURRENT"));
  ExpectNotRebuilt("no log names the job of the state there");
  EXPECT_FALSE(fs::exists(directory_ / "catalog/CURRENT"));
  fs::remove(directory_ / "nvme.tier");
  EXPECT_EQ(StateServer::Start(Options()).status(), absl::OkStatus());
}

TEST_F(VerifyTest, RefusesToMixTwoLivesOfAName) {
  Train(20);
  const std::vector<storage::DurableChunk> before = Chunks();
  fs::copy(directory_ / "log-job", directory_ / "kept");
  DropAndTrain(20);
  fs::copy(directory_ / "log-job", directory_ / "newest");

  fs::copy(directory_ / "kept", directory_ / "log-job", fs::copy_options::overwrite_existing);
  ExpectFound(Harm::kJobRefused, "the catalog's 'log' is of another life of the job than its log");
  ExpectNotRebuilt("one of the two is an older copy");
  fs::copy(directory_ / "newest", directory_ / "log-job", fs::copy_options::overwrite_existing);
  EXPECT_THAT(Scrub().findings, IsEmpty());

  const std::vector<storage::DurableChunk> after = Chunks();
  Put("job/job/chunk-1", before[1].Encode());
  ExpectFound(Harm::kJobRefused, "the catalog's chunk 1 is of another life of the job than its log");
  ExpectNotRebuilt("one of the two is an older copy");
  Put("job/job/chunk-1", after[1].Encode());
  ExpectRecovered();
}

// The labels of the job that was dropped are of versions that the log of its successor does not reach.
TEST_F(VerifyTest, RebuildsAJobWhoseNameHadAnotherBefore) {
  Train(30);
  DropAndTrain(12);
  fs::remove_all(directory_ / "catalog");
  ExpectRebuilt();
}

// Damages every needed payload, because the disk may hold a newer version of a chunk than the catalog names, and a
// rebuild would find it.
TEST_F(VerifyTest, FindsDamagedPayloadsThatAreNeeded) {
  Train(20);
  std::string what;
  for (const LogReplay::Payload& payload : Payloads().payloads) {
    if (!payload.needed) continue;
    Flip("log-job", payload.place.offset + payload.place.bytes / 2);
    Flip("log-job", payload.place.parity_offset());
    what = absl::StrCat("the slice of step ", payload.step, " for chunk ", payload.chunk);
  }
  ASSERT_FALSE(what.empty()) << "no payload is needed";
  ExpectFound(Harm::kJobRefused, what);
  ExpectNotRebuilt("which is needed");
}

TEST_F(VerifyTest, ReportsPayloadsThatTheirParityRebuilds) {
  Train(20);
  std::string what;
  for (const LogReplay::Payload& payload : Payloads().payloads) {
    if (!payload.needed) continue;
    Flip("log-job", payload.place.offset + payload.place.bytes / 2);
    what = absl::StrCat("a block of the slice of step ", payload.step, " for chunk ", payload.chunk);
  }
  ASSERT_FALSE(what.empty()) << "no payload is needed";
  ExpectFound(Harm::kRepaired, what);
}

TEST_F(VerifyTest, PassesADamagedPayloadThatIsNotNeeded) {
  Train(20);
  uint64_t damaged = 0;
  for (const LogReplay::Payload& payload : Payloads().payloads) {
    if (payload.needed) continue;
    Flip("log-job", payload.place.offset);
    ++damaged;
  }
  ASSERT_GT(damaged, 0u);
  EXPECT_EQ(Scrub().counts.payloads_not_needed, damaged);
  EXPECT_THAT(Scrub().findings, IsEmpty());
  ExpectRecovered();
}

TEST_F(VerifyTest, FindsSmallRecordsOfTheLog) {
  Train(20);
  const uint64_t batch = NewestDurableBatch();
  Flip("log-job", batch + 200);
  ExpectFound(Harm::kRepaired, "1 blocks of the log are damaged");
  Flip("log-job", batch + 4096 + 200);
  ExpectFound(Harm::kJobRefused, "the log cannot be read");
  ExpectNotRebuilt("its log cannot be read");
}

TEST_F(VerifyTest, FindsThatALogIsMissing) {
  Train(20);
  fs::remove(directory_ / "log-job");
  ExpectFound(Harm::kJobRefused, "there is no ");
  ExpectNotRebuilt("it has no log to be rebuilt from");
}

TEST_F(VerifyTest, LeavesJobsWithoutDurabilityAlone) {
  spec_.set_durability(v1::DURABILITY_NONE);
  Train(3);
  EXPECT_THAT(Scrub().findings, IsEmpty());
  const RebuildResult result = Remake();
  EXPECT_FALSE(result.written);
  EXPECT_THAT(result.refused, IsEmpty());
}

// The disk fills up at any byte written by the rebuild. The pins must survive, because only the catalog has them.
TEST_F(VerifyTest, ARebuildThatIsCutOffKeepsThePins) {
  StartServer();
  ASSERT_EQ(group_->Initialise(Values), absl::OkStatus());
  Continue(3);
  PinDurably(3);
  Continue(20);
  StopServer();
  // Large beside all that opening the catalog writes, and in a table by then: so the limits cut what the rebuild
  // writes.
  v1::PinnedVersion pin;
  {
    auto opened = DataDirectory::Open(directory_.path());
    ASSERT_TRUE(opened.ok()) << opened.status();
    std::vector<Finding> findings;
    pin = (*opened)->ReadJobs(&findings)->at("job").entry.pins.at(0);
  }
  pin.mutable_decision()->add_blobs(std::string(30000, 'b'));
  Put(PinPair("job", pin).first, PinPair("job", pin).second);
  Erase("job/job/chunk-2");
  Erase("nothing/");
  fs::copy(directory_ / "catalog", directory_ / "before", fs::copy_options::recursive);
  int cut_off = 0;
  bool written = false;
  for (int limit = 512; !written && limit < 100000; limit += 512) {
    fs::remove_all(directory_ / "catalog");
    fs::copy(directory_ / "before", directory_ / "catalog", fs::copy_options::recursive);
    const Finished rebuilt = RunProcess({"/usr/bin/prlimit", "--core=0", absl::StrCat("--fsize=", limit), CtlPath(),
                                         "verify", "--rebuild", "--data-directory", directory_.path()});
    auto opened = DataDirectory::Open(directory_.path());
    ASSERT_TRUE(opened.ok()) << opened.status();
    std::vector<Finding> findings;
    const JobEntry entry = (*opened)->ReadJobs(&findings)->at("job").entry;
    ASSERT_EQ(entry.pins.size(), 1u) << limit << " bytes: " << rebuilt.err;
    written = rebuilt.code == 0;
    if (!written) ++cut_off;
    EXPECT_EQ(entry.chunks.size(), written ? 5u : 4u);
  }
  EXPECT_TRUE(written);
  EXPECT_GT(cut_off, 2);
  fs::remove_all(directory_ / "before");
  ExpectRecovered();
}

// An older program would free what a later one keeps.
TEST_F(VerifyTest, ADirectoryOfALaterVersionIsUntouched) {
  Train(4);
  ASSERT_EQ(storage::WriteSmallFile(directory_ / storage::kFormatFile, "version: 3\nleast_reader: 3\n"),
            absl::OkStatus());
  const auto before = ContentOf(directory_.path());
  for (const absl::Status& status :
       {StateServer::Start(Options()).status(), Verify(directory_.path(), nullptr).status(),
        Rebuild(directory_.path(), nullptr).status()}) {
    EXPECT_EQ(model::ReasonOf(status), model::kLaterVersion) << status;
  }
  const Finished command = RunProcess({CtlPath(), "verify", "--data-directory", directory_.path()});
  EXPECT_EQ(command.code, 2);
  EXPECT_THAT(command.err, AllOf(HasSubstr("has format 3"), Not(HasSubstr("a server runs on this directory"))));
  EXPECT_TRUE(ContentOf(directory_.path()) == before);
  fs::remove(directory_ / storage::kFormatFile);
  ExpectRecovered();  // of the first format
}

TEST_F(VerifyTest, AnUnknownKeyOfTheCatalogIsRefusedAndStays) {
  Train(4);
  for (const std::string key : {"job/job/lent-5", "job/job/pin", "further", "nvme/x", "job/job/a/b"}) {
    Put(key, "what a later version keeps");
    for (const absl::Status& status :
         {StateServer::Start(Options()).status(), Verify(directory_.path(), nullptr).status(),
          Rebuild(directory_.path(), nullptr).status()}) {
      EXPECT_EQ(model::ReasonOf(status), model::kLaterVersion) << key << ": " << status;
      EXPECT_THAT(std::string(status.message()), HasSubstr("'" + key + "'"));
    }
    auto catalog = storage::Catalog::Open(directory_.path());
    ASSERT_TRUE(catalog.ok()) << catalog.status();
    EXPECT_EQ(**(*catalog)->Get(key), "what a later version keeps");
    ASSERT_EQ((*catalog)->ErasePrefix(key), absl::OkStatus());
  }
  ExpectRecovered();
}

TEST_F(VerifyTest, IsACommandWithExitCodes) {
  const auto run = [&](const std::vector<std::string>& extra) {
    std::vector<std::string> command = {CtlPath(), "verify", "--data-directory", directory_.path()};
    command.insert(command.end(), extra.begin(), extra.end());
    return RunProcess(command);
  };
  EXPECT_EQ(RunProcess({CtlPath(), "verify"}).code, 2);
  const Finished nothing = run({});
  EXPECT_EQ(nothing.code, 2);
  EXPECT_THAT(nothing.err, HasSubstr("is no state server's data directory"));
  EXPECT_FALSE(fs::exists(directory_ / "LOCK.ballast"));
  Train(12);
  const Finished clean = run({});
  EXPECT_EQ(clean.code, 0) << clean.out << clean.err;
  EXPECT_THAT(clean.out, HasSubstr("CLEAN: "));
  EXPECT_THAT(run({"--json"}).out, HasSubstr("{\"verdict\":\"clean\",\"recovery\":\"succeeds\""));

  StartServer();
  const Finished running = run({});
  EXPECT_EQ(running.code, 3);
  EXPECT_THAT(running.err, HasSubstr("in use"));
  EXPECT_EQ(run({"--rebuild"}).code, 3);
  StopServer();

  Erase("job/");
  const Finished damaged = run({});
  EXPECT_EQ(damaged.code, 1);
  EXPECT_THAT(damaged.out, HasSubstr("job_refused: job 'job': the catalog does not know the job of this log"));
  EXPECT_THAT(run({"--json"}).out, HasSubstr("\"recovery\":\"job_refused\""));
  const Finished rebuilt = run({"--rebuild"});
  EXPECT_EQ(rebuilt.code, 0);
  EXPECT_THAT(rebuilt.out, HasSubstr("rebuild: job 'job': rebuilt its entries, up to step 12"));
  EXPECT_EQ(run({}).code, 0);
}

}  // namespace
}  // namespace ballast::services
