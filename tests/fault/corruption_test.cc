// Damage at rest: whatever bytes of a killed server's log or NVMe tier are lost, the server recovers the job with every
// bit unchanged, or refuses the job and names the damaged file. Never wrong bits, never an older step.
//
//   corruption_test [--damages N] [--seed S]
//
// A failure prints the seed of its damage. `--seed S --damages 1` repeats the damage, on a log whose batches differ
// from run to run.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <spdlog/sinks/ostream_sink.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <map>
#include <set>
#include <sstream>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "ballast/proto/base/status.h"
#include "ballast/tests/fault/job_image.h"
#include "ballast/tests/scratch_directory.h"
#include "ballast/tests/services/daemon.h"
#include "ballast/tests/sim/random.h"

namespace ballast {
namespace {

uint64_t damages = 500;
uint64_t first_seed = 1;

constexpr uint64_t kSector = 512;
constexpr char kTier[] = "nvme.tier";
const std::string kLog = absl::StrCat("log-", kImageJob);

enum class Kind { kBytes, kBit, kBlockOfZeros, kCut };
constexpr const char* kKindNames[] = {"bytes", "a bit", "a block", "a cut"};

// New content of a part of a file, or its new end.
struct Damage {
  Kind kind = Kind::kBytes;
  const FileImage* file = nullptr;
  uint64_t offset = 0;
  std::string bytes;

  std::string Describe() const {
    return absl::StrCat(kKindNames[static_cast<int>(kind)], " at ", offset, " of ", file->path, " (",
                        file->bytes.size(), " bytes)");
  }
  void Do(const std::string& directory) const {
    const std::string path = directory + "/" + file->path;
    if (kind == Kind::kCut) {
      ASSERT_EQ(::truncate(path.c_str(), static_cast<off_t>(offset)), 0);
      return;
    }
    Write(path, bytes);
  }
  void Undo(const std::string& directory) const {
    if (kind == Kind::kCut) return DirectoryImage::RestoreFile(*file, directory);
    Write(directory + "/" + file->path, file->bytes.substr(offset, bytes.size()));
  }

 private:
  void Write(const std::string& path, const std::string& content) const {
    const int fd = ::open(path.c_str(), O_WRONLY | O_CLOEXEC);
    ASSERT_GE(fd, 0) << path;
    EXPECT_EQ(::pwrite(fd, content.data(), content.size(), static_cast<off_t>(offset)),
              static_cast<ssize_t>(content.size()));
    ::close(fd);
  }
};

uint64_t ChoosePlace(sim::Random& random, const FileImage& file) {
  const auto any_of = [&](const std::vector<uint64_t>& blocks) { return blocks[random.Below(blocks.size())]; };
  const uint64_t choice = random.Below(100);
  if (choice < 40 && !file.headed.empty()) return any_of(file.headed);
  if (choice < 95) return any_of(file.written);
  return random.Below(file.bytes.size() / kBlock) * kBlock;
}

Damage ChooseDamage(sim::Random& random, const DirectoryImage& image) {
  Damage damage;
  const std::string second = absl::StrCat(kImageDevice, "/", kTier);
  const bool devices = image.has(second) && random.Percent(50);
  damage.file = &image.file(random.Percent(70) ? kLog : devices ? second : kTier);
  const std::string& before = damage.file->bytes;
  damage.offset = ChoosePlace(random, *damage.file);
  const uint64_t kind = random.Below(100);
  if (kind < 40) {
    damage.offset += random.Below(kBlock - 64);
    for (int i = 0; i < 64; ++i) damage.bytes.push_back(static_cast<char>(random.Below(256)));
  } else if (kind < 65) {
    damage.kind = Kind::kBit;
    damage.offset += random.Percent(50) ? random.Below(128) : random.Below(kBlock);
    damage.bytes.assign(1, static_cast<char>(before[damage.offset] ^ (1 << random.Below(8))));
  } else if (kind < 90) {
    damage.kind = Kind::kBlockOfZeros;
    damage.bytes.assign(std::min<uint64_t>(kBlock, before.size() - damage.offset), '\0');
  } else {
    damage.kind = Kind::kCut;
    damage.offset += random.Below(kBlock / kSector) * kSector;
  }
  return damage;
}

enum class Outcome { kUntouched, kRepaired, kCommittedAgain, kJobRefused, kServerRefused };
constexpr const char* kOutcomeNames[] = {"untouched", "repaired", "committed again", "job refused", "server refused"};

// One life of a server on a directory that may be damaged.
struct Life {
  absl::StatusOr<JobSnapshot> snapshot = absl::UnknownError("did not start");
  bool started = false;
  bool repaired = false;
  bool committed_again = false;
};

// A commit is not synced on its own (services/step, rule 8). Where nothing was synced after it, damage is a torn tail:
// the step is prepared again, and a client sends its decision again.
bool CommitAgain(services::StateServer& server, const v1::Decision& decision) {
  v1::GetJobRequest get;
  get.set_job(kImageJob);
  services::Answer<v1::GetJobResponse> got;
  server.GetJob(get, got.reply());
  const auto job = got.Wait();
  if (!job.ok() || job->state_lost() || job->committed() != decision.step() - 1) return false;
  if (job->prepared().step() != decision.step()) return false;
  v1::CommitRequest request;
  request.set_job(kImageJob);
  *request.mutable_decision() = decision;
  services::Answer<v1::CommitResponse> committed;
  server.Commit(request, committed.reply());
  EXPECT_EQ(committed.Wait().status(), absl::OkStatus());
  return true;
}

class CorruptionTest : public ::testing::TestWithParam<InFlight> {
 protected:
  void SetUp() override {
    spdlog::set_default_logger(
        std::make_shared<spdlog::logger>("server", std::make_shared<spdlog::sinks::ostream_sink_mt>(said_)));
    // A commit is not synced on its own: on a disk that stalls the last one may go with the process.
    for (int tries = 0; tries < 5 && !HasLastCommit(); ++tries) {
      ASSERT_NO_FATAL_FAILURE(TakeImages(absl::StrCat(scratch_.path(), "/", tries)));
    }
    for (const JobSnapshot& whole : whole_) {
      EXPECT_EQ(whole.job.committed(), kImageSteps);
      EXPECT_EQ(whole.job.has_prepared(), GetParam() == InFlight::kPrepared);
    }
  }

  // Of servers that were killed in `directory`.
  void TakeImages(const std::string& directory) {
    images_.clear();
    whole_.clear();
    std::filesystem::create_directories(directory);
    const std::string stage = absl::StrCat(static_cast<int>(GetParam()));
    const services::Finished trained = services::RunProcess({"/proc/self/exe", "--train-and-die", directory, stage});
    ASSERT_EQ(trained.code, -1) << trained.err;
    for (int i = 0; i < kImageServers; ++i) {
      images_.emplace_back(absl::StrCat(directory, "/", i));
      images_[i].Restore(work_.path());
      Life life = Start(i);
      ASSERT_TRUE(life.snapshot.ok()) << life.snapshot.status();
      whole_.push_back(*std::move(life.snapshot));
      EXPECT_FALSE(life.repaired);
    }
  }

  bool HasLastCommit() const {
    return !whole_.empty() && std::all_of(whole_.begin(), whole_.end(), [](const JobSnapshot& whole) {
      return whole.job.committed() == kImageSteps;
    });
  }

  Life Start(int server) {
    said_.str("");
    auto started = StartImageServer(work_.path(), server);
    if (!started.ok()) return {.snapshot = started.status()};
    Life life{.started = true};
    if (whole_.size() > static_cast<size_t>(server) && GetParam() == InFlight::kHalfPushed) {
      life.committed_again = CommitAgain(**started, whole_[server].job.decision());
    }
    life.snapshot = TakeSnapshot(**started);
    started->reset();
    life.repaired = absl::StrContains(said_.str(), "damaged blocks of the log read from their copies");
    return life;
  }

  // Empty, or what is wrong about the refusal.
  std::string CheckRefusal(const Damage& damage, const absl::Status& status) const {
    const std::string path = absl::StrCat(work_.path(), "/", damage.file->path);
    const std::set<std::string> reasons = {model::kStateLost, model::kChecksum, model::kIo};
    if (status.code() != absl::StatusCode::kDataLoss) return "not DATA_LOSS";
    if (!reasons.contains(model::ReasonOf(status))) return "not for that reason";
    return absl::StrContains(status.message(), path) ? "" : "does not name the file";
  }

  // Empty, or what was broken.
  std::string Suffer(int server, const Damage& damage, Outcome* outcome) {
    images_[server].Restore(work_.path());
    damage.Do(work_.path());
    const Life life = Start(server);
    if (life.snapshot.ok()) {
      *outcome = life.committed_again ? Outcome::kCommittedAgain
                 : life.repaired      ? Outcome::kRepaired
                                      : Outcome::kUntouched;
      return whole_[server].Difference(*life.snapshot);
    }
    *outcome = life.started ? Outcome::kJobRefused : Outcome::kServerRefused;
    if (const std::string wrong = CheckRefusal(damage, life.snapshot.status()); !wrong.empty()) {
      return absl::StrCat("refused, ", wrong, ": ", life.snapshot.status().ToString());
    }
    // A refusal changes nothing: once the damage is undone, the job recovers.
    damage.Undo(work_.path());
    const Life healed = Start(server);
    if (!healed.snapshot.ok()) {
      return absl::StrCat("refused although healed: ", healed.snapshot.status().ToString(),
                          "\nbefore: ", life.snapshot.status().ToString());
    }
    const std::string difference = whole_[server].Difference(*healed.snapshot);
    return difference.empty() ? "" : absl::StrCat("healed: ", difference);
  }

  void Note(const Damage& damage, Outcome outcome) {
    ++outcomes_[outcome];
    ++tally_[absl::StrCat(damage.file->path, " ", kKindNames[static_cast<int>(damage.kind)], " ",
                          kOutcomeNames[static_cast<int>(outcome)])];
  }
  void Print(absl::Duration took) const {
    std::printf("%.0f s:", absl::ToDoubleSeconds(took));
    for (const auto& [outcome, count] : outcomes_) {
      std::printf(" %s %d,", kOutcomeNames[static_cast<int>(outcome)], count);
    }
    std::printf(" of these");
    for (const auto& [what, count] : tally_) std::printf(" %s %d,", what.c_str(), count);
    std::printf("\n");
  }

  std::ostringstream said_;  // by the servers
  ScratchDirectory scratch_, work_;
  std::vector<DirectoryImage> images_;
  std::vector<JobSnapshot> whole_;
  std::map<Outcome, int> outcomes_;
  std::map<std::string, int> tally_;
};

// The undamaged bytes are those of a run that nobody killed.
TEST_P(CorruptionTest, AKilledServerHasWhatAnUndisturbedOneHas) {
  ScratchDirectory directories[kImageServers];
  std::vector<std::unique_ptr<services::StateServer>> servers;
  std::vector<services::StateServer*> borrowed;
  for (int i = 0; i < kImageServers; ++i) {
    services::StateServerOptions options = ImageServer(directories[i].path(), i);
    options.budget.dram = uint64_t{64} << 20;
    auto server = services::StateServer::Start(options);
    ASSERT_TRUE(server.ok()) << server.status();
    servers.push_back(*std::move(server));
    borrowed.push_back(servers[i].get());
  }
  services::TrainerGroup group(borrowed, services::MakeSpec(kImageJob, ImageModel()), 1);
  ASSERT_EQ(group.Start(), absl::OkStatus());
  ASSERT_EQ(TrainTo(group, kImageSteps), absl::OkStatus());
  for (int i = 0; i < kImageServers; ++i) {
    const auto snapshot = TakeSnapshot(*servers[i]);
    ASSERT_TRUE(snapshot.ok()) << snapshot.status();
    EXPECT_TRUE(snapshot->contents == whole_[i].contents) << "server " << i;
  }
}

TEST_P(CorruptionTest, DamageIsRepairedOrRefused) {
  const absl::Time began = absl::Now();
  // What the log still holds when the servers are killed depends on the machine's load: a few damages may all miss it.
  const auto lacks_outcomes = [this] {
    return damages >= 50 && (outcomes_[Outcome::kRepaired] == 0 || outcomes_[Outcome::kJobRefused] == 0 ||
                             outcomes_[Outcome::kUntouched] == 0);
  };
  const uint64_t end = first_seed + damages;
  for (uint64_t seed = first_seed; seed < end || (seed < end + 4 * damages && lacks_outcomes()); ++seed) {
    sim::Random random(sim::Mix(seed, static_cast<uint64_t>(GetParam())));
    const int server = static_cast<int>(random.Below(kImageServers));
    const Damage damage = ChooseDamage(random, images_[server]);
    Outcome outcome = Outcome::kUntouched;
    EXPECT_EQ(Suffer(server, damage, &outcome), "")
        << damage.Describe() << " of server " << server << "; replay with --damages 1 --seed " << seed;
    Note(damage, outcome);
  }
  Print(absl::Now() - began);
  EXPECT_FALSE(lacks_outcomes());
}

TEST_P(CorruptionTest, ALogThatIsCutOffIsWholeOrRefused) {
  const absl::Time began = absl::Now();
  for (uint64_t seed = first_seed; seed < first_seed + damages / 10; ++seed) {
    sim::Random random(sim::Mix(seed, static_cast<uint64_t>(GetParam()), 1));
    const int server = static_cast<int>(random.Below(kImageServers));
    Damage damage{.kind = Kind::kCut, .file = &images_[server].file(kLog)};
    damage.offset = random.Below(damage.file->bytes.size() / kSector) * kSector;
    if (random.Percent(20)) damage.offset = random.Below(40) * kSector;  // the heads
    Outcome outcome = Outcome::kUntouched;
    EXPECT_EQ(Suffer(server, damage, &outcome), "")
        << damage.Describe() << " of server " << server << "; replay with --damages 10 --seed " << seed;
    Note(damage, outcome);
  }
  Print(absl::Now() - began);
}

INSTANTIATE_TEST_SUITE_P(Stages, CorruptionTest, ::testing::Values(InFlight::kPrepared, InFlight::kHalfPushed),
                         [](const auto& info) {
                           return info.param == InFlight::kPrepared ? "Prepared" : "HalfPushed";
                         });

}  // namespace
}  // namespace ballast

int main(int argc, char** argv) {
  if (argc == 4 && std::strcmp(argv[1], "--train-and-die") == 0) {
    ballast::TrainAndDie(argv[2], argv[3][0] == '0' ? ballast::InFlight::kPrepared : ballast::InFlight::kHalfPushed);
  }
  ::testing::InitGoogleTest(&argc, argv);
  for (int i = 1; i + 1 < argc; i += 2) {
    if (std::strcmp(argv[i], "--damages") == 0 && absl::SimpleAtoi(argv[i + 1], &ballast::damages)) continue;
    if (std::strcmp(argv[i], "--seed") == 0 && absl::SimpleAtoi(argv[i + 1], &ballast::first_seed)) continue;
    std::fprintf(stderr, "usage: corruption_test [--damages N] [--seed S]\n");
    return 2;
  }
  return RUN_ALL_TESTS();
}
