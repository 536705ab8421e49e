// The rows of many log segments and many chunks: see storage_bench.cc. The disk is memory, so that the time is the
// program's: a real disk takes several transfers for each segment, one after the other, which are minutes at 10^5.
#include <algorithm>
#include <array>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ballast/proto/base/status.h"
#include "ballast/storage/log/gradient_log.h"
#include "ballast/storage/memory/arena.h"
#include "ballast/storage/store/chunk_store.h"
#include "ballast/storage/tier/tiers.h"
#include "ballast/tests/bench/memory_disk.h"
#include "ballast/tests/bench/storage_rows.h"

namespace ballast::bench {
namespace {

constexpr std::array<uint64_t, 3> kCounts = {1000, 10000, 100000};
// The smallest chunk that has whole blocks of moments: its work is bookkeeping, and 16 KiB for the disk.
constexpr uint64_t kElements = 256;

// Per record or chunk. In the order of the phases.
struct Phase {
  const char* name = nullptr;
  double us = 0, disk_bytes = 0;
};
using Phases = std::vector<Phase>;

// Runs phases, each over `count` records or chunks. The disk's own time is taken off: what copies into new memory cost
// is the machine's, and grows with the bytes that were ever written.
class PhaseClock {
 public:
  PhaseClock(const MemoryDisk* disk, uint64_t count) : disk_(disk), count_(count) {}
  absl::Status Run(const char* phase, const Work& work) {
    const uint64_t before = disk_->totals().nanoseconds, bytes_before = disk_->totals().bytes;
    BALLAST_ASSIGN_OR_RETURN(const double seconds, Seconds(work));
    const double own = seconds - 1e-9 * static_cast<double>(disk_->totals().nanoseconds - before);
    const auto bytes = static_cast<double>(disk_->totals().bytes - bytes_before), count = static_cast<double>(count_);
    phases_.push_back({phase, 1e6 * own / count, bytes / count});
    return absl::OkStatus();
  }
  const Phases& phases() const { return phases_; }

 private:
  const MemoryDisk* const disk_;
  const uint64_t count_;
  Phases phases_;
};

absl::Status AwaitDurable(storage::GradientLog* log, uint64_t lsn) {
  log->Sync(lsn);
  while (log->durable_lsn() < lsn && log->status().ok()) log->Pump(/*wait=*/true);
  return log->status();
}

// A record for each of `count` segments, all waiting for one sync as a step's do; then a restart.
absl::StatusOr<Phases> LogPhases(const std::string& directory, uint64_t count) {
  MemoryDisk disk;
  const std::string path = absl::StrCat(directory, "/counts-log");
  BALLAST_ASSIGN_OR_RETURN(auto log, storage::GradientLog::Create(&disk, {.path = path,
                                                                          .job = "counts",
                                                                          .segment_bytes = storage::kLogSegmentBytesMin,
                                                                          .segment_count = count + 1}));
  PhaseClock clock(&disk, count);
  BALLAST_RETURN_IF_ERROR(clock.Run("append", [&] {
    for (uint64_t lsn = 1; lsn <= count; ++lsn) {
      if (!log->Roll()) return absl::InternalError("no segment is free");
      log->Append({.lsn = lsn, .type = 1, .body = "a record", .keep_for = static_cast<int64_t>(lsn)});
      if (lsn % 16 == 0) log->Pump(/*wait=*/false);
    }
    return AwaitDurable(log.get(), count);
  }));
  log.reset();
  storage::ScannedLog scanned;
  BALLAST_RETURN_IF_ERROR(clock.Run("recover", [&]() -> absl::Status {
    BALLAST_ASSIGN_OR_RETURN(log, storage::GradientLog::Recover(&disk, path, &scanned));
    for (size_t i = 0; i < scanned.live.size(); ++i) log->Keep(scanned.live[i].incarnation, static_cast<int64_t>(i));
    return absl::OkStatus();
  }));
  if (scanned.record_count != count) return absl::InternalError("records are missing");
  BALLAST_RETURN_IF_ERROR(clock.Run("cut", [&] {
    if (!log->Roll()) return absl::InternalError("no segment is free");
    log->Append({.lsn = count + 1, .type = 1, .body = "a record"});
    BALLAST_RETURN_IF_ERROR(AwaitDurable(log.get(), count + 1));
    for (uint64_t step = 0; step < count; ++step) log->Cut(static_cast<int64_t>(step));
    while (log->free_segments() < count && log->status().ok()) log->Pump(/*wait=*/true);
    return log->status();
  }));
  return clock.phases();
}

// A durable store on NVMe, and what it recorded.
struct CountedStore {
  absl::Status Open(const std::string& directory, uint64_t count) {
    store.reset();
    tiers.reset();
    std::vector<storage::ExtentPlace> kept;
    for (const storage::DurableChunk& chunk : recorded) kept.push_back({chunk.offset, chunk.bytes});
    BALLAST_ASSIGN_OR_RETURN(tiers, storage::Tiers::Open({.budget = {0, uint64_t{1} << 40, uint64_t{1} << 40},
                                                          .directory = directory,
                                                          .disk = &disk,
                                                          .kept = std::move(kept)}));
    store = std::make_unique<storage::ChunkStore>(
        tiers.get(), kernels::OptimizerSpec(), nullptr,
        storage::DurableOptions{.job = "counts", .record = [this](absl::Span<const storage::DurableChunk> chunks) {
                                  for (const storage::DurableChunk& chunk : chunks) recorded[chunk.id] = chunk;
                                  return absl::OkStatus();
                                }});
    std::vector<storage::ChunkToAdd> added(count);
    storage::Plan plan;
    plan.chunks.resize(count, {.state = storage::TierKind::kNvme});
    for (uint64_t i = 0; i < count; ++i) {
      added[i] = {.elements = kElements, .id = i};
      if (!recorded.empty()) added[i].durable = recorded[i];
    }
    recorded.resize(count);
    return store->Add(added, plan);
  }

  absl::Status Step(uint64_t count) {
    ++version;
    const std::vector<std::byte> gradient(kElements * sizeof(uint16_t));
    std::vector<storage::ChunkUpdate> updates(count);
    for (uint64_t i = 0; i < count; ++i) {
      updates[i].chunk = i;
      updates[i].version = version;
      updates[i].gradient = gradient;
      updates[i].segments.push_back(
          {0, kElements,
           kernels::MakeCoefficients({}, {1e-3, 0.9, 0.999, 1e-8, 0}, static_cast<uint64_t>(version) + 1, 1.0f)});
    }
    return store->Run(updates, [](size_t) {});
  }

  MemoryDisk disk;
  std::vector<storage::DurableChunk> recorded;
  std::unique_ptr<storage::Tiers> tiers;
  std::unique_ptr<storage::ChunkStore> store;
  int64_t version = -1;
};

absl::StatusOr<Phases> StorePhases(const std::string& directory, uint64_t count) {
  const std::string data = absl::StrCat(directory, "/counts");
  CountedStore counted;
  PhaseClock clock(&counted.disk, count);
  const auto step = [&] { return counted.Step(count); };
  BALLAST_RETURN_IF_ERROR(clock.Run("add", [&] { return counted.Open(data, count); }));
  BALLAST_RETURN_IF_ERROR(clock.Run("first_step", step));
  BALLAST_RETURN_IF_ERROR(clock.Run("step", step));
  BALLAST_RETURN_IF_ERROR(clock.Run("pin", [&] { return counted.store->PinDurably(counted.version).status(); }));
  BALLAST_RETURN_IF_ERROR(clock.Run("step_off_the_pin", step));
  BALLAST_RETURN_IF_ERROR(clock.Run("unpin", [&] {
    counted.store->UnpinDurably(1);
    return absl::OkStatus();
  }));
  BALLAST_RETURN_IF_ERROR(clock.Run("step_after_the_pin", step));
  BALLAST_RETURN_IF_ERROR(counted.store->Harden());
  BALLAST_RETURN_IF_ERROR(clock.Run("restart", [&] { return counted.Open(data, count); }));
  BALLAST_RETURN_IF_ERROR(clock.Run("step_after_the_restart", step));
  counted.store->Discard();
  counted.store.reset();
  counted.tiers.reset();
  std::filesystem::remove_all(data);
  return clock.phases();
}

absl::Status AddRow(const char* name, const std::string& directory,
                    absl::StatusOr<Phases> (*phases_of)(const std::string&, uint64_t), std::vector<Row>* rows) {
  // 10^3 take some phases less than a millisecond, and all of their data lies in the processor's cache.
  constexpr size_t kFrom = 1;
  constexpr int kRepeats = 3;
  Row row{.name = name,
          .reference = "time per record or chunk at 10^4, of the phase that grows most",
          .ratio = 1e9,
          .bar = 0.8};
  std::array<Phases, kCounts.size()> phases;
  for (size_t i = 0; i < kCounts.size(); ++i) {
    std::fprintf(stderr, "storage_bench: %s, %lu\n", name, kCounts[i]);
    for (int repeat = 0; repeat < kRepeats; ++repeat) {
      BALLAST_ASSIGN_OR_RETURN(const Phases again, phases_of(directory, kCounts[i]));
      if (repeat == 0) phases[i] = again;
      for (size_t p = 0; p < again.size(); ++p) phases[i][p].us = std::min(phases[i][p].us, again[p].us);
    }
  }
  for (size_t p = 0; p < phases[0].size(); ++p) {
    const char* const name = phases[0][p].name;
    const Phase &from = phases[kFrom][p], &to = phases.back()[p];
    for (size_t i = 0; i < kCounts.size(); ++i) {
      row.more.emplace_back(absl::StrCat(name, "_us_at_", kCounts[i]), phases[i][p].us);
    }
    row.ratio = std::min(row.ratio, from.us / to.us);
    // The disk's time is taken off, so that its work must not grow either.
    if (to.disk_bytes > 0)
      row.more.emplace_back(absl::StrCat(name, "_disk_bytes_ratio"), from.disk_bytes / to.disk_bytes);
    if (to.disk_bytes > 0) row.ratio = std::min(row.ratio, from.disk_bytes / to.disk_bytes);
  }
  rows->push_back(std::move(row));
  return absl::OkStatus();
}

}  // namespace

absl::Status MeasureCounts(const StorageBenchOptions&, const std::string& directory, std::vector<Row>* rows) {
  BALLAST_RETURN_IF_ERROR(AddRow("counts/log", directory, LogPhases, rows));
  return AddRow("counts/store", directory, StorePhases, rows);
}

}  // namespace ballast::bench
