#include "ballast/services/job_state/promise_log.h"

#include <gtest/gtest.h>

#include <filesystem>

#include "ballast/services/job_state/job_entry.h"
#include "ballast/tests/scratch_directory.h"

namespace ballast::services {
namespace {

PromiseRecord Promise(uint64_t counter) {
  PromiseRecord record;
  record.epoch.set_counter(counter);
  return record;
}

TEST(PromiseLog, SyncOfVolatileRecordsCompletesAtOnce) {
  PromiseLog log("job");
  EXPECT_EQ(log.Append(SliceRecord{}), 1u);
  EXPECT_EQ(log.TakeSynced(), std::nullopt);
  const uint64_t lsn = log.Append(DecisionRecord{});
  log.Sync(lsn);
  EXPECT_EQ(log.TakeSynced(), lsn);
  EXPECT_EQ(log.TakeSynced(), std::nullopt);
  EXPECT_FALSE(log.NextToWrite().has_value());
}

TEST(PromiseLog, LaterRecordsDoNotOvertakeAPromiseBeingWritten) {
  PromiseLog log("job");
  const uint64_t promise = log.Append(Promise(3));
  EXPECT_FALSE(log.NextToWrite().has_value()) << "nobody asked for the sync yet";
  log.Sync(promise);
  const auto record = log.NextToWrite();
  ASSERT_TRUE(record.has_value());
  EXPECT_EQ(record->key, "job/job/promise");
  EXPECT_FALSE(log.NextToWrite().has_value()) << "one at a time";
  const uint64_t later = log.Append(SliceRecord{});
  log.Sync(later);
  EXPECT_EQ(log.TakeSynced(), std::nullopt);
  log.Written(promise);
  EXPECT_EQ(log.TakeSynced(), later);
}

TEST(PromiseLog, RecordsThatAreKeptInALogWaitForTheLog) {
  PromiseLog log("job");
  log.KeptElsewhere(7);
  EXPECT_TRUE(log.kept_elsewhere());
  const uint64_t lsn = log.Append(DecisionRecord{});
  EXPECT_EQ(lsn, 7u);
  log.Sync(lsn);
  EXPECT_EQ(log.TakeSynced(), std::nullopt);
  log.DurableElsewhere(6);
  EXPECT_EQ(log.TakeSynced(), 6u);
  log.DurableElsewhere(9);
  EXPECT_EQ(log.TakeSynced(), lsn) << "no further than somebody asked for";
  log.Append(PreparedStepRecord{});
  log.KeptHere();
  EXPECT_FALSE(log.kept_elsewhere());
  log.Sync(log.Append(DecisionRecord{}));
  EXPECT_EQ(log.TakeSynced(), 9u);
}

TEST(PromiseLog, PromisesThatWaitBehindAWriteBecomeOne) {
  PromiseLog log("job");
  log.Sync(log.Append(Promise(1)));
  ASSERT_EQ(log.NextToWrite()->lsn, 1u);
  // The disk hangs meanwhile.
  uint64_t newest = 0;
  for (uint64_t counter = 2; counter <= 100; ++counter) log.Sync(newest = log.Append(Promise(counter)));
  log.Written(1);
  const auto record = log.NextToWrite();
  ASSERT_TRUE(record.has_value());
  EXPECT_EQ(record->lsn, newest);
  v1::Epoch written;
  ASSERT_TRUE(written.ParseFromString(record->value));
  EXPECT_EQ(written.counter(), 100u);
  log.Written(newest);
  EXPECT_EQ(log.TakeSynced(), newest);
  EXPECT_FALSE(log.NextToWrite().has_value());
}

TEST(PromiseLog, FirstPreparedStepMarksTheJobAsHavingState) {
  ScratchDirectory directory;
  auto catalog = storage::Catalog::Open(directory.path() + "/catalog");
  ASSERT_TRUE(catalog.ok()) << catalog.status();
  PromiseLog log("a");
  log.Sync(log.Append(Promise(5)));
  const auto write_all = [&] {
    while (const auto record = log.NextToWrite()) {
      ASSERT_TRUE(PromiseLog::Write(catalog->get(), *record).ok());
      log.Written(record->lsn);
    }
  };
  write_all();
  auto entry = ReadJobEntry(**catalog, "a");
  ASSERT_TRUE(entry.ok()) << entry.status();
  EXPECT_EQ(entry->promised->counter(), 5u);
  EXPECT_FALSE(entry->had_state);

  const uint64_t prepared = log.Append(PreparedStepRecord{});
  log.Sync(prepared);
  EXPECT_NE(log.TakeSynced(), prepared) << "prepared must not be answered before the mark is on disk";
  write_all();
  EXPECT_EQ(log.TakeSynced(), prepared);
  ASSERT_TRUE(WriteCommitted(catalog->get(), "a", 4).ok());
  entry = ReadJobEntry(**catalog, "a");
  ASSERT_TRUE(entry.ok()) << entry.status();
  EXPECT_TRUE(entry->had_state);
  EXPECT_EQ(entry->committed, 4);

  log.Sync(log.Append(PreparedStepRecord{}));
  EXPECT_FALSE(log.NextToWrite().has_value()) << "one mark is enough";
}

// As after a crash: the end of the catalog's log is torn off.
TEST(PromiseLog, AWrittenPromiseOutlivesTheEndOfTheCatalogsLog) {
  ScratchDirectory directory;
  {
    auto catalog = storage::Catalog::Open(directory.path());
    ASSERT_TRUE(catalog.ok()) << catalog.status();
    PromiseLog log("a");
    log.Sync(log.Append(Promise(5)));
    ASSERT_TRUE(PromiseLog::Write(catalog->get(), *log.NextToWrite()).ok());
  }
  for (const auto& file : std::filesystem::directory_iterator(directory / "catalog")) {
    if (file.path().extension() == ".log" && file.file_size() > 0) {
      std::filesystem::resize_file(file, file.file_size() - 20);
    }
  }
  auto catalog = storage::Catalog::Open(directory.path());
  ASSERT_TRUE(catalog.ok()) << catalog.status();
  const auto entry = ReadJobEntry(**catalog, "a");
  ASSERT_TRUE(entry.ok()) << entry.status();
  ASSERT_TRUE(entry->promised.has_value());
  EXPECT_EQ(entry->promised->counter(), 5u);
}

}  // namespace
}  // namespace ballast::services
