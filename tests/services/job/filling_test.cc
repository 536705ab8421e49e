// A server that begins in the middle of a job copies its chunks from the holders while steps go on.
#include "ballast/services/job/filling.h"

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ballast/proto/base/status.h"
#include "ballast/services/job/damaged_chunks.h"
#include "ballast/services/job/fill_sources.h"
#include "ballast/services/job/kept_copies.h"
#include "ballast/services/job/kept_versions.h"
#include "ballast/services/job/read_pins.h"
#include "ballast/services/job/updates.h"
#include "ballast/services/job_state/import_pace.h"
#include "ballast/services/journal/flushes.h"
#include "ballast/services/space/chunk_moves.h"
#include "ballast/services/space/prediction.h"
#include "ballast/tests/services/job_part.h"

namespace ballast::services {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::UnorderedElementsAre;

constexpr uint64_t kFilledLife = 77;
constexpr int64_t kJoinedAt = 5;

// Server "s" fills all chunks; "t" and "u" hold them.
v1::Table MakeTable() {
  v1::Table table;
  for (const char* id : {"s", "t", "u"}) {
    v1::Member* const member = table.add_members();
    member->set_server_id(id);
    member->set_weight(1);
    member->set_disk(id[0] == 's' ? 0 : 9);
    member->set_address(id + std::string(":7070"));
  }
  table.set_replicas(2);
  table.set_life(kFilledLife);
  v1::Shard* const shard = table.add_shards();
  shard->add_holders(1);
  shard->add_holders(2);
  shard->add_fillers(0);
  return table;
}

// The same chunks on a holder, whose masters all have one value.
class Holder {
 public:
  explicit Holder(const HeldChunks& chunks, const storage::StateLayout& layout) : store_(tiers_.get(), layout) {
    std::vector<uint64_t> elements;
    storage::Plan placed;
    for (const auto& chunk : chunks) {
      elements.push_back(chunk->elements);
      placed.chunks.push_back({.state = storage::TierKind::kDram});
    }
    EXPECT_EQ(store_.Add(elements, placed), absl::OkStatus());
    elements_ = elements;
  }
  v1::ExportResponse Export(uint64_t chunk, int64_t version, float value) {
    const std::vector<float> values(elements_[chunk], value);
    storage::ChunkUpdate update;
    update.chunk = chunk;
    update.values.push_back({.values = values});
    EXPECT_EQ(store_.Run({&update, 1}, [](size_t) {}), absl::OkStatus());
    absl::StatusOr<storage::WholeState> state = store_.ReadWhole(chunk);
    EXPECT_TRUE(state.ok()) << state.status();
    v1::ExportResponse response;
    response.set_version(version);
    response.set_changed(version);
    response.set_elements(elements_[chunk]);
    for (const storage::WholeState::Array& array : state->arrays) {
      v1::ExportResponse::Array* const out = response.add_arrays();
      out->set_payload(reinterpret_cast<const char*>(array.bytes.data()), array.bytes.size());
      out->set_crc32c(array.crc32c);
    }
    return response;
  }

 private:
  storage::SimDisk disk_{2};
  const std::unique_ptr<storage::Tiers> tiers_ = *storage::Tiers::Open(
      {.budget = {.dram = uint64_t{64} << 20}, .directory = std::filesystem::temp_directory_path(), .disk = &disk_});
  storage::ChunkStore store_;
  std::vector<uint64_t> elements_;
};

class FillingTest : public JobPartTest {
 protected:
  ~FillingTest() override {
    EndTimers();
    asked_chunks_.questions.clear();
    core_.JoinThreads();
  }
  // StepHost: as a job does.
  bool ChangesChunks() const override { return true; }
  void Apply(const v1::PreparedRecord& prepared, const v1::Decision& decision) override {
    core_.mu.AssertHeld();
    updates_.Post(updates_.Prepare(prepared, decision));
  }
  void Opened(std::shared_ptr<const model::EpochPlan> plan, const OpenChange& change) override {
    core_.mu.AssertHeld();
    JobPartTest::Opened(std::move(plan), change);
    for (const auto& chunk : core_.state.chunks()) {
      if (core_.machine->unfilled().contains(chunk->id)) chunk->Void(core_.machine->committed());
    }
  }

  // The server joins at step kJoinedAt, and begins to fill.
  void Join() {
    Fence();
    if (!table_.has_value()) table_ = MakeTable();
    v1::OpenRequest open = OpenOf(spec_, 1);
    open.clear_members();
    *open.mutable_table() = *table_;
    open.set_group("g");
    open.mutable_epoch()->set_counter(epoch_);
    open.set_base(kJoinedAt);
    open.mutable_base_decision()->set_step(kJoinedAt);
    open.mutable_base_decision()->mutable_epoch()->set_counter(1);
    for (int i = 0; i < spec_.registrations(0).tensors_size(); ++i) open.add_tensor_steps(kJoinedAt);
    SendOpen(open);
    step_ = kJoinedAt + 1;
    holder_.emplace(chunks_, Layout());
    Resume();
  }
  // Another epoch of the group, with the table as it is.
  void OpenAnew() {
    Open();
    Resume();
  }
  void Resume() {
    Locked([&] { filling_.Resume(); });
    RunAll();
  }
  storage::StateLayout Layout() {
    JobMutexLock lock(&core_.mu);
    return core_.state.store()->layout();
  }
  // All questions that are asked until none is, answered with the holder's state.
  std::vector<v1::ExportRequest> AnswerAll(int64_t version, float value) {
    std::vector<v1::ExportRequest> asked;
    for (auto questions = asked_chunks_.Take(); !questions.empty(); questions = asked_chunks_.Take()) {
      for (AskedChunks::Question& question : questions) {
        asked.push_back(question.request);
        question.reply(holder_->Export(question.request.chunk(), version, value));
      }
      RunAll();
    }
    return asked;
  }
  // The first question, which is then answered; the other one stays unanswered.
  AskedChunks::Question TakeOne() {
    std::vector<AskedChunks::Question> questions = asked_chunks_.Take();
    EXPECT_FALSE(questions.empty());
    kept_.insert(kept_.end(), questions.begin() + 1, questions.end());
    return questions[0];
  }
  void Answer(const AskedChunks::Question& question, int64_t version, float value) {
    question.reply(holder_->Export(question.request.chunk(), version, value));
  }
  // All slices of the step, its seal and its decision; the worker has not run.
  void Decide(float value) {
    for (uint32_t i = 0; i < plan().slices().size(); ++i) ASSERT_EQ(PushSlice(i, kValue, value), absl::OkStatus());
    DecidePushed();
  }
  void DecidePushed() {
    const std::optional<v1::PreparedRecord> record = Prepare(ValuesHeader(tensors()));
    ASSERT_TRUE(record.has_value());
    const auto decision = model::Decide({*record});
    ASSERT_TRUE(decision.ok()) << decision.status();
    Locked([&] {
      v1::CommitRequest commit;
      *commit.mutable_decision() = *decision;
      ASSERT_EQ(journal_.MakeRoom(1, commit.ByteSizeLong() + kSmallRecordBytesMax), absl::OkStatus());
      ASSERT_TRUE(core_.machine->Commit(commit).ok());
      core_.Moved();
    });
    ++step_;
  }
  size_t Unfilled() {
    JobMutexLock lock(&core_.mu);
    return core_.machine->unfilled().size();
  }
  float Master(uint64_t chunk) {
    float value = 0;
    JobMutexLock lock(&core_.mu);
    EXPECT_EQ(core_.state.store()->ReadState(chunk, storage::StateArray::kMaster, 0, {&value, 1}), absl::OkStatus());
    return value;
  }
  bool HoldsSteps() {
    JobMutexLock lock(&core_.mu);
    return filling_.HoldsSteps();
  }
  v1::JobStatus Status() {
    v1::JobStatus status;
    JobMutexLock lock(&core_.mu);
    filling_.Describe(&status);
    return status;
  }

  Flushes flushes_{&core_, &journal_};
  ReadPins pins_{&core_};
  Prediction prediction_{&core_};
  ChunkMoves moves_{&core_, &flushes_, &prediction_};
  KeptCopies kept_copies_{&core_, &journal_};
  KeptVersions kept_versions_{&core_, &journal_, &flushes_, &kept_copies_};
  Filling filling_{&core_, &kept_copies_, &kept_versions_};
  DamagedChunks damaged_{&core_, &filling_, &kept_copies_};
  Updates updates_{&core_, &journal_, &room_, &flushes_, &pins_, &moves_, &damaged_};
  std::optional<Holder> holder_;
  std::vector<AskedChunks::Question> kept_;
};

TEST_F(FillingTest, AllChunksComeFromHoldersTwoAtATime) {
  Join();
  EXPECT_EQ(Unfilled(), chunks_.size());
  EXPECT_EQ(Status().unfilled_chunks(), chunks_.size());
  EXPECT_GT(Status().unfilled_bytes(), 0);
  ASSERT_EQ(asked_chunks_.questions.size(), Filling::kCopiesAtOnce);
  for (const AskedChunks::Question& question : asked_chunks_.questions) {
    EXPECT_EQ(question.request.job(), "job");
    EXPECT_EQ(question.request.life(), kFilledLife);
    EXPECT_EQ(question.request.spec_digest(), model::SpecDigest(spec_));
    EXPECT_EQ(question.request.least(), kJoinedAt);
    EXPECT_TRUE(question.from.server_id() == "t" || question.from.server_id() == "u");
    EXPECT_EQ(question.from.address(), question.from.server_id() + ":7070");
  }
  EXPECT_FALSE(chunks_[0]->filled());
  EXPECT_EQ(AnswerAll(kJoinedAt, 42).size(), chunks_.size());
  EXPECT_EQ(Unfilled(), 0u);
  EXPECT_EQ(Status().unfilled_chunks(), 0u);
  uint64_t bytes = 0;
  for (const auto& chunk : chunks_) {
    EXPECT_TRUE(chunk->filled());
    EXPECT_EQ(chunk->version(), kJoinedAt);
    EXPECT_EQ(chunk->first_version(), kJoinedAt);
    EXPECT_EQ(chunk->changed(), kJoinedAt);
    EXPECT_EQ(Master(chunk->store_index), 42);
    for (int array = 0; array < Layout().array_count(); ++array) {
      bytes += Layout().ArrayBytes(static_cast<storage::StateArray>(array), chunk->elements);
    }
  }
  EXPECT_EQ(core_.counters.imported_bytes, bytes);
  // A step changes them from there.
  Decide(7);
  RunAll();
  for (const auto& chunk : chunks_) {
    EXPECT_EQ(chunk->version(), kJoinedAt + 1);
    EXPECT_EQ(Master(chunk->store_index), 7);
  }
}

TEST_F(FillingTest, AStepThatTheCopyHasIsPassedOver) {
  Join();
  const AskedChunks::Question question = TakeOne();
  const uint64_t chunk = question.request.chunk();
  Answer(question, kJoinedAt + 1, 42);
  RunAll();
  EXPECT_FALSE(chunks_[chunk]->filled()) << "step 6 is not decided here";
  Decide(7);
  RunAll();
  EXPECT_TRUE(chunks_[chunk]->filled());
  EXPECT_EQ(chunks_[chunk]->version(), kJoinedAt + 1);
  EXPECT_EQ(Master(chunk), 42);
  Decide(8);
  RunAll();
  EXPECT_EQ(chunks_[chunk]->version(), kJoinedAt + 2);
  EXPECT_EQ(Master(chunk), 8);
}

TEST_F(FillingTest, AStepThatIsDecidedBeforeTheCopyIsStoredFollowsIt) {
  Join();
  const AskedChunks::Question question = TakeOne();
  const uint64_t chunk = question.request.chunk();
  for (uint32_t i = 0; i < plan().slices().size(); ++i) ASSERT_EQ(PushSlice(i, kValue, 7), absl::OkStatus());
  const std::optional<v1::PreparedRecord> record = Prepare(ValuesHeader(tensors()));
  ASSERT_TRUE(record.has_value());
  Answer(question, kJoinedAt, 42);  // the worker has it, and has not run
  Locked([&] {
    v1::CommitRequest commit;
    *commit.mutable_decision() = *model::Decide({*record});
    ASSERT_TRUE(core_.machine->Commit(commit).ok());
    core_.Moved();
  });
  EXPECT_FALSE(chunks_[chunk]->filled());
  RunAll();
  EXPECT_TRUE(chunks_[chunk]->filled());
  EXPECT_EQ(chunks_[chunk]->first_version(), kJoinedAt);
  EXPECT_EQ(chunks_[chunk]->version(), kJoinedAt + 1);
  EXPECT_EQ(chunks_[chunk]->changed(), kJoinedAt + 1);
  EXPECT_EQ(Master(chunk), 7);
}

TEST_F(FillingTest, ACopyThatComesAfterAStepWithoutTheChunkIsAskedForAgain) {
  Join();
  const AskedChunks::Question question = TakeOne();
  const uint64_t chunk = question.request.chunk();
  Decide(7);
  RunAll();
  Answer(question, kJoinedAt, 42);
  RunAll();
  EXPECT_FALSE(chunks_[chunk]->filled());
  const AskedChunks::Question again = TakeOne();
  EXPECT_EQ(again.request.chunk(), chunk);
  EXPECT_EQ(again.request.least(), kJoinedAt + 1);
  Answer(again, kJoinedAt + 1, 43);
  RunAll();
  EXPECT_TRUE(chunks_[chunk]->filled());
  EXPECT_EQ(Master(chunk), 43);
}

TEST_F(FillingTest, AStepPreparedWithoutItsSlicesMakesACopyVoid) {
  Join();
  const AskedChunks::Question question = TakeOne();
  const uint64_t chunk = question.request.chunk();
  ASSERT_EQ(chunk, 0u);
  // No slice of the chunk comes.
  for (uint32_t i = 0; i < plan().slices().size(); ++i) {
    if (plan().slices()[i].chunk == chunk) continue;
    ASSERT_EQ(PushSlice(i, kValue, 7), absl::OkStatus());
  }
  ASSERT_TRUE(Prepare(ValuesHeader(tensors())).has_value());
  Answer(question, kJoinedAt, 42);
  RunAll();
  EXPECT_FALSE(chunks_[chunk]->filled());
  EXPECT_EQ(TakeOne().request.least(), kJoinedAt + 1);
}

TEST_F(FillingTest, StepsThatOutrunCopiesAreHeldBack) {
  Join();
  for (int round = 0; round < 2; ++round) {
    EXPECT_FALSE(HoldsSteps());
    const std::vector<AskedChunks::Question> questions = asked_chunks_.Take();
    ASSERT_EQ(questions.size(), Filling::kCopiesAtOnce);
    Decide(7);
    RunAll();
    for (const AskedChunks::Question& question : questions) Answer(question, question.request.least(), 42);
    RunAll();
  }
  EXPECT_EQ(Unfilled(), chunks_.size());
  EXPECT_TRUE(HoldsSteps());
  std::vector<AskedChunks::Question> questions = asked_chunks_.Take();
  ASSERT_EQ(questions.size(), Filling::kCopiesAtOnce);
  for (const AskedChunks::Question& question : questions) {
    EXPECT_TRUE(HoldsSteps());
    EXPECT_EQ(question.request.least(), step_ - 1);
    Answer(question, step_ - 1, 42);
    RunAll();
  }
  EXPECT_EQ(Unfilled(), chunks_.size() - Filling::kCopiesAtOnce);
  EXPECT_FALSE(HoldsSteps()) << "a step passes";
  // The next copies come too late again, and hold back the step after that.
  questions = asked_chunks_.Take();
  Decide(7);
  RunAll();
  for (const AskedChunks::Question& question : questions) Answer(question, question.request.least(), 42);
  RunAll();
  EXPECT_TRUE(HoldsSteps());
  // For a while at most, if nobody answers.
  while (HoldsSteps()) {
    absl::SleepFor(absl::Milliseconds(10));
    RunAll();
  }
}

TEST_F(FillingTest, AnErrorIsFollowedByAnotherHolder) {
  Join();
  const AskedChunks::Question question = TakeOne();
  const std::string first = question.from.server_id();
  question.reply(absl::UnavailableError("nobody listens"));
  RunAll();
  const AskedChunks::Question second = TakeOne();
  EXPECT_EQ(second.request.chunk(), question.request.chunk());
  EXPECT_NE(second.from.server_id(), first);
  second.reply(absl::UnavailableError("nobody listens"));
  RunAll();
  EXPECT_TRUE(asked_chunks_.questions.empty()) << "both rest";
}

TEST_F(FillingTest, ADamagedCopyChangesNothing) {
  Join();
  const AskedChunks::Question question = TakeOne();
  v1::ExportResponse damaged = holder_->Export(question.request.chunk(), kJoinedAt, 42);
  (*damaged.mutable_arrays(0)->mutable_payload())[100] ^= 1;
  question.reply(damaged);
  RunAll();
  EXPECT_FALSE(chunks_[question.request.chunk()]->filled());
  EXPECT_EQ(core_.counters.imported_bytes, 0u);
  const AskedChunks::Question again = TakeOne();
  EXPECT_EQ(again.request.chunk(), question.request.chunk());
  EXPECT_NE(again.from.server_id(), question.from.server_id());
  v1::ExportResponse short_one = holder_->Export(question.request.chunk(), kJoinedAt, 42);
  short_one.mutable_arrays()->RemoveLast();
  again.reply(short_one);
  RunAll();
  EXPECT_FALSE(chunks_[question.request.chunk()]->filled());
  JobMutexLock lock(&core_.mu);
  EXPECT_EQ(core_.Refusal(), absl::OkStatus());
}

TEST_F(FillingTest, AnAnswerOfAnEarlierEpochDoesNotCount) {
  Join();
  const std::vector<AskedChunks::Question> earlier = asked_chunks_.Take();
  OpenAnew();
  const std::vector<AskedChunks::Question> later = asked_chunks_.Take();
  ASSERT_EQ(later.size(), Filling::kCopiesAtOnce) << "asked anew";
  for (const AskedChunks::Question& question : earlier) Answer(question, kJoinedAt, 42);
  RunAll();
  EXPECT_EQ(Unfilled(), chunks_.size());
  EXPECT_TRUE(asked_chunks_.questions.empty());
  for (const AskedChunks::Question& question : later) Answer(question, kJoinedAt, 42);
  RunAll();
  EXPECT_EQ(Unfilled(), chunks_.size() - Filling::kCopiesAtOnce);
}

TEST_F(FillingTest, AnAnswerThatComesAfterTheJobsEndIsDropped) {
  Join();
  const std::vector<AskedChunks::Question> questions = asked_chunks_.Take();
  core_.Locked([&](Replies* replies) {
    core_.mu.AssertHeld();
    core_.Refuse(absl::UnavailableError("stopping"), replies);
  });
  Answer(questions[0], kJoinedAt, 42);
  RunAll();
  EXPECT_EQ(Unfilled(), chunks_.size());
  EXPECT_TRUE(asked_chunks_.questions.empty());
  EndTimers();
  Answer(questions[1], kJoinedAt, 42);  // as after the job's destruction
  RunAll();
  EXPECT_EQ(Unfilled(), chunks_.size());
}

// Copies that move a chunk are paid for by one byte a second: none follows the first. All others may begin.
TEST_F(FillingTest, ChunksThatLackCopiesDoNotWaitForThoseThatMove) {
  import_pace_.emplace(ImportPace::Rates{.all = uint64_t{1} << 40, .moving = 1});
  Join();
  EXPECT_EQ(AnswerAll(kJoinedAt, 42).size(), 1u) << "t and u hold each chunk, and two are wanted";
  const size_t left = chunks_.size() - 1;
  EXPECT_EQ(Unfilled(), left);
  // Server "t" is lost.
  table_->mutable_shards(0)->clear_holders();
  table_->mutable_shards(0)->add_holders(2);
  OpenAnew();
  EXPECT_EQ(AnswerAll(kJoinedAt, 42).size(), left);
  EXPECT_EQ(Unfilled(), 0u);
  // This server is the second holder, and its state of the last chunk is damaged.
  table_->mutable_shards(0)->clear_fillers();
  table_->mutable_shards(0)->set_holders(0, 0);
  table_->mutable_shards(0)->add_holders(2);
  OpenAnew();
  Locked([&] {
    core_.machine->MarkUnfilled(left, kJoinedAt);
    chunks_[left]->Void(kJoinedAt);
  });
  Resume();
  EXPECT_EQ(Unfilled(), 1u);
  EXPECT_EQ(AnswerAll(kJoinedAt, 43).size(), 1u);
  EXPECT_EQ(Unfilled(), 0u);
  EXPECT_EQ(Master(left), 43);
}

TEST_F(FillingTest, ChunksThatLackCopiesComeFirst) {
  table_ = MakeTable();
  v1::Shard* const odd = table_->add_shards();  // of these only "t" has a copy
  odd->add_holders(1);
  odd->add_fillers(0);
  Join();
  std::vector<uint64_t> chunks;
  for (const v1::ExportRequest& asked : AnswerAll(kJoinedAt, 42)) chunks.push_back(asked.chunk());
  EXPECT_THAT(chunks, ElementsAre(1, 3, 0, 2, 4));
  EXPECT_EQ(Unfilled(), 0u);
}

// "t" is down, and "u" has the last chunk: it is asked for that one though many others come first.
TEST_F(FillingTest, ChunksThatNobodyTellsOfHideNoOther) {
  constexpr int kChunks = 1300;
  std::vector<TestTensor> many;
  for (int i = 0; i < kChunks; ++i) many.push_back({absl::StrCat("t", i), absl::StrCat("u", i), 10, 0});
  spec_ = MakeSpec("job", many);
  table_ = MakeTable();
  table_->clear_shards();
  for (uint32_t i = 0; i < kChunks; ++i) {
    v1::Shard* const shard = table_->add_shards();
    shard->add_holders(i + 1 < kChunks ? 1 : 2);
    shard->add_fillers(0);
  }
  Join();
  const absl::Time end = absl::Now() + absl::Seconds(30);
  for (bool asked = false; !asked && absl::Now() < end;) {
    for (const AskedChunks::Question& question : asked_chunks_.Take()) {
      asked = question.from.server_id() == "u";
      if (asked) Answer(question, kJoinedAt, 42);
      if (!asked) question.reply(absl::UnavailableError("nobody listens"));
    }
    RunAll();
    absl::SleepFor(absl::Milliseconds(10));
  }
  EXPECT_EQ(Unfilled(), kChunks - 1u);
  EXPECT_TRUE(chunks_.back()->filled());
}

TEST(FillSourcesTest, HoldersGoInTurnAndRestAfterErrors) {
  v1::OpenRequest open = OpenOf(MakeSpec("job", SmallModel()), 1);
  open.clear_members();
  *open.mutable_table() = MakeTable();
  const auto plan = model::EpochPlan::Make(open);
  ASSERT_TRUE(plan.ok()) << plan.status();
  FillSources sources;
  const absl::Time now = absl::UnixEpoch() + absl::Hours(1);
  absl::Time until = absl::InfiniteFuture();
  const std::optional<uint32_t> first = sources.Choose(*plan, 0, 0, now, &until);
  ASSERT_TRUE(first.has_value());
  EXPECT_EQ(first, plan->SourceFor(0, 0));
  const uint32_t second = 3 - *first;
  const std::string a = plan->members()[static_cast<int>(*first)].server_id();
  const std::string b = plan->members()[static_cast<int>(second)].server_id();
  const absl::Status down = absl::UnavailableError("down");
  EXPECT_TRUE(sources.Failed(a, down, now));
  EXPECT_EQ(sources.Choose(*plan, 0, 0, now, &until), second);
  EXPECT_EQ(until, now + FillSources::kRestMin) << "a holder that rests is asked again";
  EXPECT_TRUE(sources.Failed(b, down, now));
  EXPECT_EQ(sources.Choose(*plan, 0, 0, now, &until), std::nullopt);
  EXPECT_EQ(sources.Choose(*plan, 0, 0, now + FillSources::kRestMin, &until), first);
  // Each error makes the rest longer, up to a bound; the same cause is told once.
  absl::Time at = now;
  for (const int seconds : {2, 4, 8, 10, 10}) {
    at += absl::Hours(1);
    EXPECT_FALSE(sources.Failed(a, down, at));
    EXPECT_FALSE(sources.Failed(a, down, at)) << "one that was under way";
    until = absl::InfiniteFuture();
    EXPECT_EQ(sources.Choose(*plan, 0, 0, at, &until), second);
    EXPECT_EQ(until, at + absl::Seconds(seconds));
  }
  EXPECT_TRUE(sources.Failed(a, absl::DeadlineExceededError("slow"), at));
  sources.Answered(a);
  EXPECT_EQ(sources.Choose(*plan, 0, 0, at, &until), first);
  EXPECT_TRUE(sources.Failed(a, down, at)) << "told anew after an answer";
}

TEST(ImportPaceTest, ACopyWaitsUntilThoseBeforeItArePaid) {
  const absl::Time now = absl::UnixEpoch() + absl::Hours(1);
  ImportPace pace({.all = 1000, .moving = 1000});
  for (const CopyNeed need : {CopyNeed::kLacking, CopyNeed::kMoving}) {
    const absl::Time begin = now + absl::Hours(static_cast<int>(need));
    EXPECT_EQ(pace.Take(need, 500, begin), begin);
    const absl::Time free = pace.Take(need, 500, begin);
    EXPECT_EQ(free, begin + absl::Milliseconds(400)) << "a tenth of a second was saved up";
    EXPECT_EQ(pace.Take(need, 500, free - absl::Nanoseconds(1)), free);
    EXPECT_EQ(pace.Take(need, 500, free), free);
    EXPECT_EQ(pace.Take(need, 500, free), free + absl::Milliseconds(500)) << "nothing was";
  }
  ImportPace none({});
  EXPECT_EQ(none.Take(CopyNeed::kLacking, uint64_t{1} << 40, now), now);
  EXPECT_EQ(none.Take(CopyNeed::kMoving, uint64_t{1} << 40, now), now);
}

TEST(ImportPaceTest, MovesWaitForEachOtherAndNobodyElseWaitsForThem) {
  const absl::Time now = absl::UnixEpoch() + absl::Hours(1);
  ImportPace pace({.all = 1000, .moving = 100});
  EXPECT_EQ(pace.Take(CopyNeed::kMoving, 200, now), now);
  EXPECT_EQ(pace.Take(CopyNeed::kMoving, 200, now), now + absl::Milliseconds(1900));
  // What moves counts as any copy does, and no more.
  EXPECT_EQ(pace.Take(CopyNeed::kLacking, 200, now), now + absl::Milliseconds(100));
  const absl::Time free = now + absl::Milliseconds(100);
  EXPECT_EQ(pace.Take(CopyNeed::kLacking, 5000, free), free);
  EXPECT_EQ(pace.Take(CopyNeed::kMoving, 200, now + absl::Seconds(2)), now + absl::Milliseconds(5100))
      << "moves wait for all others";
}

TEST(ImportPaceTest, FewProcessorsMoveLess) {
  constexpr uint64_t kMiB = uint64_t{1} << 20;
  const auto rates = [](uint64_t bytes_per_s, int processors) {
    const ImportPace::Rates of = ImportPace::RatesOf(bytes_per_s, processors);
    return std::pair(of.all, of.moving);
  };
  EXPECT_EQ(rates(256 * kMiB, 2), std::pair(256 * kMiB, 6 * kMiB));
  EXPECT_EQ(rates(256 * kMiB, 128), std::pair(256 * kMiB, 256 * kMiB));
  EXPECT_EQ(rates(4 * kMiB, 2), std::pair(4 * kMiB, 4 * kMiB));
  EXPECT_EQ(rates(0, 2), std::pair(uint64_t{0}, uint64_t{0})) << "as fast as they can";
}

}  // namespace
}  // namespace ballast::services
