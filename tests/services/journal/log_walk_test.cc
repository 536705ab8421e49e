#include "ballast/services/journal/log_walk.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ballast/services/journal/log_records.h"

namespace ballast::services {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// A log made by hand: record 1 is the first.
class Log : public storage::RecordSource {
 public:
  // The next record begins a log segment.
  Log& Segment() {
    ++segments_;
    return *this;
  }
  Log& Add(const StepRecord& record) {
    storage::LogRecord encoded = EncodeRecord(record);
    const uint64_t lsn = records_.size() + 1;
    records_.push_back({lsn, encoded.type, std::move(encoded.body), {.offset = lsn << 12, .bytes = 4}});
    segment_of_.push_back(segments_ - 1);
    return *this;
  }
  Log& Promise(uint64_t counter) {
    PromiseRecord record;
    record.epoch.set_counter(counter);
    return Add(record);
  }
  Log& Open(int64_t base) {
    const auto open = std::make_shared<v1::OpenRequest>();
    open->set_base(base);
    return Add(OpenRecord{open});
  }
  Log& Slice(int64_t step, uint64_t attempt, uint64_t begin, v1::SliceKind kind = v1::SLICE_KIND_GRADIENT) {
    SliceRecord record;
    record.header.set_step(step);
    record.header.set_attempt(attempt);
    record.header.set_begin(begin);
    record.header.set_kind(kind);
    return Add(record);
  }
  Log& Prepared(int64_t step, v1::StepKind kind = v1::STEP_KIND_UPDATE) {
    PreparedStepRecord record;
    record.prepared.set_step(step);
    record.prepared.mutable_header()->set_kind(kind);
    return Add(record);
  }
  Log& Decision(int64_t step, uint64_t attempt = 0) {
    DecisionRecord record;
    record.decision.set_step(step);
    record.decision.set_attempt(attempt);
    return Add(record);
  }
  Log& Snapshot(int64_t committed, bool open) {
    SnapshotRecord record;
    record.snapshot.set_committed(committed);
    if (open) record.snapshot.mutable_open()->set_base(committed);
    return Add(record);
  }
  std::vector<storage::ReadRecord>& records() { return records_; }
  size_t segments() const { return segments_; }

  absl::StatusOr<const storage::ReadRecord*> Next() override {
    return next_ == records_.size() ? nullptr : &records_[next_++];
  }
  size_t segment() const override { return segment_of_[next_ - 1]; }

 private:
  std::vector<storage::ReadRecord> records_;
  std::vector<size_t> segment_of_;
  size_t segments_ = 0;
  size_t next_ = 0;
};

// Writes down what it hears.
class Diary : public LogVisitor {
 public:
  absl::Status VisitOther(const StepRecord&) override { return Note("other"); }
  absl::Status VisitPromise(const v1::Epoch& promised, const StepRecord& record) override {
    EXPECT_TRUE(std::holds_alternative<PromiseRecord>(record));
    return Note(absl::StrCat("promise ", promised.counter()));
  }
  absl::Status VisitOpen(const v1::OpenRequest& open, const StepRecord& record) override {
    EXPECT_TRUE(std::holds_alternative<OpenRecord>(record));
    return Note(absl::StrCat("open ", open.base()));
  }
  absl::Status VisitSnapshot(const v1::LogSnapshot& snapshot, bool begins, const StepRecord& record) override {
    EXPECT_TRUE(std::holds_alternative<SnapshotRecord>(record));
    return Note(absl::StrCat("snapshot ", snapshot.committed(), begins ? " begins" : ""));
  }
  absl::Status VisitSlice(const LoggedSlice& slice, const StepRecord& record) override {
    EXPECT_TRUE(std::holds_alternative<SliceRecord>(record));
    return Note(absl::StrCat("slice ", slice.index, " of ", slice.header.step(), " at ", slice.payload.offset >> 12));
  }
  absl::Status VisitPrepared(const v1::PreparedRecord& prepared, const StepRecord& record) override {
    EXPECT_TRUE(std::holds_alternative<PreparedStepRecord>(record));
    return Note(absl::StrCat("prepared ", prepared.step()));
  }
  absl::Status VisitDecision(const v1::Decision& decision, const StepRecord& record) override {
    EXPECT_TRUE(std::holds_alternative<DecisionRecord>(record));
    return Note(absl::StrCat("decision ", decision.step(), Slices(decision.attempt(), decision.step())));
  }

  // Numbers of the slices in the order in which the walk has them.
  std::string Slices(uint64_t attempt, int64_t step) const {
    std::string slices;
    for (const LoggedSlice* slice : walk_->Slices(attempt, step)) absl::StrAppend(&slices, " ", slice->index);
    return slices;
  }
  absl::Status Walk(Log& log) {
    walk_ = std::make_unique<LogWalk>(&log, log.segments());
    return walk_->Run(this);
  }
  const LogWalk& walk() const { return *walk_; }
  const std::vector<std::string>& heard() const { return heard_; }
  // After an Open slices of these attempts are still held.
  void HoldAttempts(std::set<uint64_t> attempts) { held_ = std::move(attempts); }
  bool Holds(const v1::PushRequest& slice) override { return held_.contains(slice.attempt()); }
  // The visitor fails at this record.
  void RefuseFrom(size_t record) { refused_ = record; }

 private:
  absl::Status Note(std::string what) {
    heard_.push_back(std::move(what));
    return heard_.size() == refused_ ? absl::DataLossError("refused") : absl::OkStatus();
  }

  std::unique_ptr<LogWalk> walk_;
  std::vector<std::string> heard_;
  std::set<uint64_t> held_;
  size_t refused_ = 0;
};

TEST(LogWalk, TellsEachRecordInOrder) {
  Log log;
  log.Segment().Promise(3).Open(-1).Slice(0, 0, 0).Prepared(0).Decision(0).Segment().Snapshot(0, true).Slice(1, 0, 0);
  Diary diary;
  ASSERT_EQ(diary.Walk(log), absl::OkStatus());
  EXPECT_THAT(diary.heard(), ElementsAre("promise 3", "open -1", "slice 0 of 0 at 3", "prepared 0", "decision 0 0",
                                         "snapshot 0", "slice 1 of 1 at 7"));
  EXPECT_EQ(diary.walk().lsn(), 7u);
}

TEST(LogWalk, KindsThatAVisitorDoesNotOverrideComeToOther) {
  struct Counter : LogVisitor {
    absl::Status VisitOther(const StepRecord&) override {
      ++count;
      return absl::OkStatus();
    }
    int count = 0;
  } counter;
  Log log;
  log.Segment().Promise(1).Open(-1).Slice(0, 0, 0).Prepared(0).Decision(0).Snapshot(0, true);
  ASSERT_EQ(LogWalk(&log, log.segments()).Run(&counter), absl::OkStatus());
  EXPECT_EQ(counter.count, 6);
}

TEST(LogWalk, AnEmptyLogTellsNothing) {
  Log log;
  Diary diary;
  EXPECT_EQ(diary.Walk(log), absl::OkStatus());
  EXPECT_THAT(diary.heard(), IsEmpty());
  EXPECT_EQ(diary.walk().lsn(), 0u);
  EXPECT_THAT(diary.walk().keep_for(), IsEmpty());
}

TEST(LogWalk, OnlyTheFirstSnapshotOfAnOpenBegins) {
  Log cut;
  cut.Segment().Snapshot(-1, false).Snapshot(7, true).Snapshot(7, true);
  Diary diary;
  ASSERT_EQ(diary.Walk(cut), absl::OkStatus());
  EXPECT_THAT(diary.heard(), ElementsAre("snapshot -1", "snapshot 7 begins", "snapshot 7"));
}

TEST(LogWalk, ADecisionHasTheSlicesOfItsAttempt) {
  Log log;
  log.Segment().Open(-1).Slice(0, 0, 0).Slice(0, 1, 0).Slice(0, 0, 8).Slice(0, 1, 8).Decision(0, 1);
  log.Slice(1, 1, 0).Decision(1, 1);
  Diary diary;
  ASSERT_EQ(diary.Walk(log), absl::OkStatus());
  EXPECT_EQ(diary.heard()[5], "decision 0 1 3");
  EXPECT_EQ(diary.heard()[7], "decision 1 4") << "slices of a decided step are gone";
  EXPECT_THAT(diary.walk().Attempts(), IsEmpty());
}

// A slice whose bytes were lost is pushed again, into the same attempt.
TEST(LogWalk, TheNewestRecordOfAPlaceCounts) {
  Log log;
  log.Segment().Open(-1).Slice(0, 0, 0).Slice(0, 0, 8).Slice(0, 0, 0, v1::SLICE_KIND_VALUE).Slice(0, 0, 0).Decision(0);
  Diary diary;
  ASSERT_EQ(diary.Walk(log), absl::OkStatus());
  EXPECT_EQ(diary.heard().back(), "decision 0 1 2 3") << "values and gradients have places of their own";
}

TEST(LogWalk, AnOpenVoidsSlicesOfOlderEpochs) {
  Log log;
  log.Segment().Open(-1).Slice(0, 0, 0).Slice(0, 2, 0).Open(-1).Slice(0, 1, 8);
  Diary diary;
  ASSERT_EQ(diary.Walk(log), absl::OkStatus());
  EXPECT_THAT(diary.walk().Attempts(), ElementsAre(1u));
  EXPECT_EQ(diary.Slices(0, 0), "");
  EXPECT_EQ(diary.Slices(1, 0), " 2") << "counted among all slices of the log";
}

TEST(LogWalk, AnOpenKeepsTheSlicesThatTheMachineHolds) {
  Log log;
  log.Segment().Open(-1).Slice(0, 0, 0).Decision(0).Slice(1, 2, 0).Segment().Snapshot(0, true).Slice(1, 1, 0);
  log.Segment().Snapshot(0, true).Open(0).Slice(1, 2, 8).Prepared(1).Decision(1, 2);
  Diary diary;
  diary.HoldAttempts({2});
  ASSERT_EQ(diary.Walk(log), absl::OkStatus());
  EXPECT_EQ(diary.heard().back(), "decision 1 1 3") << "before the Open and after it";
  EXPECT_THAT(diary.walk().keep_for(), ElementsAre(1, 0, 1)) << "the segment of attempt 1 may go";
}

TEST(LogWalk, UndecidedSlicesOutliveSnapshotsAndPromises) {
  Log log;
  log.Segment().Open(-1).Slice(0, 0, 0).Promise(2).Segment().Snapshot(-1, true).Prepared(0).Slice(0, 3, 8);
  Diary diary;
  ASSERT_EQ(diary.Walk(log), absl::OkStatus());
  EXPECT_THAT(diary.walk().Attempts(), ElementsAre(0u, 3u));
  EXPECT_EQ(diary.Slices(0, 0), " 0");
  EXPECT_EQ(diary.Slices(0, 1), "") << "of another step";
}

TEST(LogWalk, ASegmentStaysForTheHighestStepOfItsSlices) {
  Log log;
  log.Segment().Open(-1).Slice(0, 0, 0).Decision(0).Slice(1, 0, 0).Decision(1);
  log.Segment().Snapshot(1, true).Decision(2);
  log.Segment().Snapshot(2, true).Slice(3, 0, 0);
  Diary diary;
  ASSERT_EQ(diary.Walk(log), absl::OkStatus());
  EXPECT_THAT(diary.walk().keep_for(), ElementsAre(1, -1, 3));
}

TEST(LogWalk, ARestoreKeepsItsPreparedRecord) {
  Log log;
  log.Segment().Open(4).Prepared(5, v1::STEP_KIND_RESTORE).Decision(5).Segment().Snapshot(5, true).Prepared(6);
  Diary diary;
  ASSERT_EQ(diary.Walk(log), absl::OkStatus());
  EXPECT_THAT(diary.walk().keep_for(), ElementsAre(5, -1)) << "other prepared records are in the snapshot";
}

TEST(LogWalk, AnOpenReleasesSegmentsBeforeItFromStepsBehindItsBase) {
  Log log;
  log.Segment().Open(-1).Slice(0, 0, 0).Decision(0).Segment().Snapshot(0, true).Slice(1, 0, 0);
  log.Segment().Snapshot(0, true).Slice(1, 1, 0).Open(0).Segment().Snapshot(0, true).Slice(1, 0, 0);
  Diary diary;
  ASSERT_EQ(diary.Walk(log), absl::OkStatus());
  EXPECT_THAT(diary.walk().keep_for(), ElementsAre(0, 0, 0, 1));
}

TEST(LogWalk, ASegmentWithoutRecordsIsNotNeeded) {
  Log log;
  log.Segment().Segment().Open(-1).Slice(0, 0, 0).Segment();
  Diary diary;
  ASSERT_EQ(diary.Walk(log), absl::OkStatus());
  EXPECT_THAT(diary.walk().keep_for(), ElementsAre(-1, 0, -1));
}

TEST(LogWalk, TheFirstRecordOfASegmentIsItsOwn) {
  Log log;
  log.Segment().Open(-1).Segment().Slice(0, 0, 0);
  Diary diary;
  ASSERT_EQ(diary.Walk(log), absl::OkStatus());
  EXPECT_THAT(diary.walk().keep_for(), ElementsAre(-1, 0));
}

TEST(LogWalk, AVisitorsErrorEndsTheWalk) {
  Log log;
  log.Segment().Promise(1).Open(-1).Slice(0, 0, 0);
  Diary diary;
  diary.RefuseFrom(2);
  EXPECT_THAT(diary.Walk(log).message(), HasSubstr("refused"));
  EXPECT_THAT(diary.heard(), ElementsAre("promise 1", "open -1"));
  EXPECT_EQ(diary.walk().lsn(), 2u);
}

TEST(LogWalk, ARecordThatCannotBeDecodedEndsTheWalk) {
  Log log;
  log.Segment().Promise(1).Open(-1).Promise(2);
  log.records()[1].type = 99;
  Diary diary;
  EXPECT_THAT(diary.Walk(log).message(), HasSubstr("the log's record 2 of type 99"));
  EXPECT_THAT(diary.heard(), ElementsAre("promise 1"));
  EXPECT_EQ(diary.walk().lsn(), 2u);
}

}  // namespace
}  // namespace ballast::services
