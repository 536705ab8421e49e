// How much memory reading a log takes: counts what is allocated, whatever allocates it.
#include <malloc.h>

#include <atomic>
#include <cstdlib>
#include <memory>
#include <new>
#include <string>

#include "ballast/storage/io/disk.h"
#include "ballast/storage/io/disk_counters.h"
#include "ballast/storage/log/gradient_log.h"
#include "ballast/storage/log/logged_records.h"
#include "ballast/tests/scratch_directory.h"
#include "gtest/gtest.h"

namespace {

std::atomic<uint64_t> live_bytes{0}, peak_bytes{0};

void Count(void* memory) {
  const uint64_t live = live_bytes += malloc_usable_size(memory);
  uint64_t peak = peak_bytes;
  while (peak < live && !peak_bytes.compare_exchange_weak(peak, live)) {
  }
}

}  // namespace

void* operator new(size_t bytes) {
  void* const memory = std::malloc(bytes);
  if (memory == nullptr) std::abort();
  Count(memory);
  return memory;
}
void operator delete(void* memory) noexcept {
  if (memory != nullptr) live_bytes -= malloc_usable_size(memory);
  std::free(memory);
}
void operator delete(void* memory, size_t) noexcept { operator delete(memory); }

namespace ballast::storage {
namespace {

struct Reading {
  uint64_t peak_bytes = 0;  // allocated meanwhile
  uint64_t reads = 0;       // of the disk
};

uint64_t ReadsSoFar() {
  const DurationHistogram& reads = ProcessDiskCounters().operations[0].seconds;
  uint64_t count = 0;
  for (size_t i = 0; i <= reads.bounds_seconds().size(); ++i) count += reads.count(i);
  return count;
}

// Writes so many records, and reads them again after a restart.
Reading ReadBack(uint64_t records, uint64_t body_bytes, const std::string& path) {
  constexpr uint64_t kSegmentBytes = uint64_t{8} << 20;
  // A record of its own batch is the most that a segment must hold.
  const uint64_t segments = 3 + records * RecordCostMax(body_bytes, 0) / (kSegmentBytes / 2);
  auto created = GradientLog::Create(
      SystemDisk(), {.path = path, .job = "job", .segment_bytes = kSegmentBytes, .segment_count = segments});
  EXPECT_TRUE(created.ok()) << created.status();
  std::unique_ptr<GradientLog> log = *std::move(created);
  EXPECT_TRUE(log->Roll());
  for (uint64_t lsn = 1; lsn <= records; ++lsn) {
    if (!log->HasRoom(body_bytes, 0)) {
      EXPECT_TRUE(log->Roll());
    }
    log->Append({.lsn = lsn, .type = 1, .body = std::string(body_bytes, static_cast<char>('a' + lsn % 26))});
    if (lsn % 16 == 0) log->Pump(/*wait=*/false);
  }
  log->Sync(records);
  while (log->durable_lsn() < records && log->status().ok()) log->Pump(/*wait=*/true);
  log.reset();

  const uint64_t before = live_bytes, reads_before = ReadsSoFar();
  peak_bytes = before;
  ScannedLog scanned;
  log = *GradientLog::Recover(SystemDisk(), path, &scanned);
  LoggedRecords source(&log->file(), &scanned);
  uint64_t read = 0;
  for (auto record = source.Next(); record.ok() && *record != nullptr; record = source.Next()) {
    EXPECT_EQ((*record)->lsn, ++read);
    EXPECT_EQ((*record)->body, std::string(body_bytes, static_cast<char>('a' + read % 26)));
  }
  EXPECT_EQ(read, records);
  EXPECT_EQ(scanned.record_count, records);
  return {.peak_bytes = peak_bytes - before, .reads = ReadsSoFar() - reads_before};
}

TEST(ScanMemory, DoesNotGrowWithTheRecords) {
  constexpr uint64_t kBodyBytes = 4000;
  const ScratchDirectory directory;
  const uint64_t few = ReadBack(500, kBodyBytes, directory / "few").peak_bytes,
                 many = ReadBack(4000, kBodyBytes, directory / "many").peak_bytes;
  std::printf("%llu bytes for 500 records of %llu, %llu for 4000\n", static_cast<unsigned long long>(few),
              static_cast<unsigned long long>(kBodyBytes), static_cast<unsigned long long>(many));
  // Places of batches, of which eight times as many come, are the only thing that grows.
  EXPECT_LT(many, 4000 * kBodyBytes / 16);
  EXPECT_LT(many, 2 * few);
}

TEST(ScanMemory, BatchesThatLieCloseTogetherComeInOneRead) {
  constexpr uint64_t kRecords = 16000, kBatches = kRecords / kBatchRecordsMax;
  const ScratchDirectory directory;
  const Reading reading = ReadBack(kRecords, /*body_bytes=*/100, directory / "log");
  // Once by the scan, and once for their records.
  std::printf("%llu reads of %llu batches\n", static_cast<unsigned long long>(reading.reads),
              static_cast<unsigned long long>(kBatches));
  EXPECT_LT(reading.reads, kBatches / 4);
}

}  // namespace
}  // namespace ballast::storage
