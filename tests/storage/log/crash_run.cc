#include "ballast/tests/storage/log/crash_run.h"

#include <algorithm>
#include <functional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ballast/tests/sim/random.h"
#include "ballast/tests/storage/log/log_caller.h"

namespace ballast::storage {
namespace {

constexpr char kLogFile[] = "log";
constexpr int kLivesPerSeed = 6;

// A possible content of the log's file after a power cut, with nothing synced between `before` and `after`. Takes a
// block from `after` where `kept` (by segment and block within the segment) is true, otherwise from `before`.
std::vector<std::byte> Mix(absl::Span<const std::byte> before, absl::Span<const std::byte> after,
                           uint64_t segment_bytes, const std::function<bool(uint64_t, uint64_t)>& kept) {
  std::vector<std::byte> mixed(before.begin(), before.end());
  for (uint64_t at = kLogFirstSegment; at < mixed.size(); at += kLogBlock) {
    const uint64_t in_segments = at - kLogFirstSegment;
    if (!kept(in_segments / segment_bytes, in_segments % segment_bytes / kLogBlock)) continue;
    std::copy_n(after.begin() + static_cast<ptrdiff_t>(at), kLogBlock, mixed.begin() + static_cast<ptrdiff_t>(at));
  }
  return mixed;
}

class CrashRun {
 public:
  CrashRun(uint64_t seed, CrashTally* tally) : random_(seed), disk_(seed), caller_(seed), tally_(*tally) {}

  // Empty, or what was broken.
  std::string Run() {
    segment_bytes_ = (16 + random_.Below(48)) * kLogBlock;
    auto log = GradientLog::Create(
        &disk_,
        {.path = kLogFile, .job = "job", .segment_bytes = segment_bytes_, .segment_count = 3 + random_.Below(4)});
    if (!log.ok()) return log.status().ToString();
    caller_.Use(*std::move(log));
    for (int life = 0; life < kLivesPerSeed; ++life) {
      Live();
      End();
      if (const std::string violation = Recover(); !violation.empty())
        return absl::StrCat("life ", life, ": ", violation);
    }
    Live();
    return Rot();
  }

 private:
  RecordShape RandomShape() {
    RecordShape shape;
    shape.body_bytes = 1 + (random_.Percent(90) ? random_.Below(300) : random_.Below(3 * kLogBlock));
    if (random_.Percent(60)) {
      shape.payload_bytes = 1 + random_.Below(5 * kLogBlock);
      if (random_.Percent(30)) shape.payload_bytes = AlignUp(shape.payload_bytes);
      shape.keep_for = step_;
    }
    shape.aligned = random_.Percent(70);
    return shape;
  }

  void Append() {
    if (caller_.Append(RandomShape())) {
      ++tally_.records;
      return;
    }
    ++tally_.no_room;
    if (random_.Percent(5) || stuck_) {
      stuck_ = !caller_.log().Extend(1).ok();
      ++tally_.extends;
    }
  }

  void NoteDurable() { durable_lsn_ = std::max(durable_lsn_, caller_.log().durable_lsn()); }

  void Live() {
    if (random_.Percent(60)) disk_.CrashAfter(1 + random_.Below(150));
    if (random_.Percent(10)) {
      const SimOperation operation = random_.Percent(50) ? SimOperation::kSync : SimOperation::kWrite;
      disk_.SetFaultProbability(operation, SimFault::kEio, operation == SimOperation::kSync ? 0.1 : 0.02);
    }
    for (uint64_t i = 10 + random_.Below(200); i > 0 && !disk_.off(); --i) {
      const uint64_t choice = random_.Below(100);
      if (choice < 50) {
        Append();
      } else if (choice < 60) {
        ++step_;
      } else if (choice < 70) {
        caller_.log().Sync(caller_.last_lsn());
      } else if (choice < 78) {
        ++tally_.cuts;
        caller_.Cut(step_ - 1 - static_cast<int64_t>(random_.Below(4)));
      } else if (choice < 96) {
        caller_.log().Pump(random_.Percent(50));
      } else if (choice < 98) {
        if (caller_.Roll()) ++tally_.rolls;
      } else {
        (void)caller_.SyncAll();
      }
      NoteDurable();
    }
    for (const SimOperation operation : {SimOperation::kSync, SimOperation::kWrite}) {
      disk_.SetFaultProbability(operation, SimFault::kEio, 0);
    }
  }

  // Ends the process, or the machine. After an error always the machine, because a failed sync may have left pages in
  // the system's cache that are on no disk.
  void End() {
    const uint64_t errors = disk_.suffered(SimFault::kEio);
    const bool failed = std::exchange(errors_, errors) != errors;
    tally_.errors += failed ? 1 : 0;
    if (disk_.off()) ++tally_.crashes_by_operation;
    if (!disk_.off() && !failed && random_.Percent(30)) {
      disk_.CrashAfter(0);
      caller_.Drop();
      ++tally_.kills;
      return;
    }
    disk_.Crash();
    caller_.Drop();
  }

  std::string Recover() {
    if (random_.Percent(15)) {
      disk_.CrashAfter(1 + random_.Below(12));
      ScannedLog ignored;
      (void)GradientLog::Recover(&disk_, kLogFile, &ignored);
      if (disk_.off()) ++tally_.crashes_in_recovery;
      disk_.Crash();
    }
    ScannedLog scanned;
    auto log = GradientLog::Recover(&disk_, kLogFile, &scanned);
    if (!log.ok()) return log.status().ToString();
    if (const absl::Status status = caller_.Check(scanned, (*log)->file(), durable_lsn_); !status.ok()) {
      return std::string(status.message());
    }
    tally_.torn_batches += scanned.torn_batches;
    tally_.live_segments += scanned.live.size();
    tally_.durable += durable_lsn_;
    const uint64_t before = caller_.last_lsn();
    caller_.Resume(scanned, *std::move(log));
    tally_.lost += before - caller_.last_lsn();
    tally_.recovered_beyond_durable += caller_.last_lsn() - durable_lsn_;
    durable_lsn_ = caller_.last_lsn();  // Recover synced it
    if (caller_.log().durable_lsn() != durable_lsn_) return "durable_lsn after the recovery is not the last record's";
    stuck_ = caller_.log().free_bytes() == 0;
    return "";
  }

  // Damages a bit or three blocks of a log at rest, if all of the log is known to be durable. Recovery must return the
  // written records or refuse the log.
  std::string Rot() {
    disk_.Crash();
    caller_.Drop();
    {
      auto file = disk_.Open(kLogFile, Disk::Mode::kShared);
      if (!file.ok()) return file.status().ToString();
      const auto scanned = ScanLog(**file);
      if (!scanned.ok()) return scanned.status().ToString();
      if (const absl::Status status = caller_.Check(*scanned, **file, durable_lsn_); !status.ok()) {
        return std::string(status.message());
      }
      if (scanned->last_batch != scanned->synced_batch) return "";
    }
    const std::vector<std::byte> content = disk_.DurableContent(kLogFile);
    std::vector<uint64_t> written;
    for (uint64_t at = 0; at < content.size(); ++at) {
      if (content[at] != std::byte{0}) written.push_back(at);
    }
    const uint64_t at = written[random_.Below(written.size())];
    if (random_.Percent(50)) {
      disk_.FlipBit(kLogFile, at * 8 + random_.Below(8));
    } else {
      disk_.Corrupt(kLogFile, at / kLogBlock * kLogBlock, 3 * kLogBlock);  // whatever has two copies loses both
    }
    ++tally_.rotten_bits;
    ScannedLog scanned;
    auto log = GradientLog::Recover(&disk_, kLogFile, &scanned);
    const absl::Status status = log.ok() ? caller_.Check(scanned, (*log)->file(), durable_lsn_) : log.status();
    if (absl::IsDataLoss(status)) ++tally_.refused;
    return status.ok() || absl::IsDataLoss(status) ? "" : absl::StrCat("after rot: ", status.message());
  }

  sim::Random random_;
  SimDisk disk_;
  LogCaller caller_;
  CrashTally& tally_;
  uint64_t errors_ = 0;
  uint64_t segment_bytes_ = 0;
  uint64_t durable_lsn_ = 0;
  int64_t step_ = 1;
  bool stuck_ = false;
};

// Empty, or what a recovery found wrong.
std::string RecoverAndGoOn(SimDisk* disk, LogCaller* caller, uint64_t durable_lsn) {
  ScannedLog scanned;
  auto log = GradientLog::Recover(disk, kLogFile, &scanned);
  if (!log.ok()) return log.status().ToString();
  const absl::Status status = caller->Check(scanned, (*log)->file(), durable_lsn);
  if (!status.ok()) return std::string(status.message());
  caller->Resume(scanned, *std::move(log));
  return "";
}

absl::Status CreateOn(SimDisk* disk) {
  return GradientLog::Create(disk,
                             {.path = kLogFile, .job = "job", .segment_bytes = 32 * kLogBlock, .segment_count = 3})
      .status();
}

}  // namespace

std::string RunLives(uint64_t seed, CrashTally* tally) { return CrashRun(seed, tally).Run(); }

std::string RunVoidBatches(uint64_t seed) {
  sim::Random random(seed);
  SimDisk disk(seed);
  LogCaller caller(seed);
  const auto recover = [&](uint64_t durable_lsn) { return RecoverAndGoOn(&disk, &caller, durable_lsn); };
  // All records have this size, so that batches of both lives lie at the same places.
  const RecordShape shape = {.body_bytes = 100, .payload_bytes = 5000, .keep_for = 1};
  constexpr int kVoid = 3;
  if (const absl::Status created = CreateOn(&disk); !created.ok()) return created.ToString();
  if (const std::string violation = recover(0); !violation.empty()) return violation;
  if (!caller.Append(shape) || !caller.SyncAll().ok()) return "no first record";
  const uint64_t durable_lsn = caller.last_lsn();
  if (random.Percent(50) && !caller.Roll()) return "no second segment";
  for (int i = 0; i < kVoid; ++i) {
    if (!caller.Append(shape)) return "no room";
    caller.PumpAll();
  }
  disk.Crash();
  caller.Drop();
  if (const std::string violation = recover(durable_lsn); !violation.empty()) return violation;
  for (int i = 1 + static_cast<int>(random.Below(kVoid)); i > 0; --i) {
    if (!caller.Append(shape) || !caller.SyncAll().ok()) return "no record in the second life";
  }
  caller.Drop();
  disk.FlipBit(kLogFile, (kLogFirstSegment + kSegmentHeadBytes) * 8 + random.Below(8 * sizeof(BatchHead)));
  return recover(caller.last_lsn());
}

std::string RunVoidCut(uint64_t seed) {
  constexpr uint64_t kSegmentBytes = 32 * kLogBlock, kSegments = 4;
  constexpr uint64_t kHeadBlocks = 2, kBatchBlocks = 2;  // of a batch without payloads
  SimDisk disk(seed);
  LogCaller caller(seed);
  auto log = GradientLog::Create(
      &disk, {.path = kLogFile, .job = "job", .segment_bytes = kSegmentBytes, .segment_count = kSegments});
  if (!log.ok()) return log.status().ToString();
  caller.Use(*std::move(log));
  for (uint64_t i = 0; i + 1 < kSegments; ++i) {
    if (!caller.Roll()) return "no segment";
    caller.AppendHere(kOtherRecord, {.body_bytes = 9, .keep_for = static_cast<int64_t>(i)});
    if (!caller.SyncAll().ok()) return "not durable";
  }
  const uint64_t durable_lsn = caller.last_lsn();
  // The file is `content` when the machine starts again.
  const auto lose_power = [&](const std::vector<std::byte>& content) {
    disk.Crash();
    caller.Drop();
    disk.SetContent(kLogFile, content);
  };
  const auto recover = [&] { return RecoverAndGoOn(&disk, &caller, durable_lsn); };

  // The last segment loses its first batch, and keeps its head and the batch that records the cut of the first segment.
  std::vector<std::byte> before = disk.DurableContent(kLogFile);
  if (!caller.Roll()) return "no last segment";
  caller.PumpAll();
  caller.Cut(0);
  if (!caller.SyncAll().ok()) return "not written";
  lose_power(Mix(before, disk.DurableContent(kLogFile), kSegmentBytes, [](uint64_t segment, uint64_t block) {
    return segment + 1 == kSegments && (block < kHeadBlocks || block >= kHeadBlocks + kBatchBlocks);
  }));
  if (const std::string violation = recover(); !violation.empty()) return absl::StrCat("second life: ", violation);

  // As many segments as the log thinks free, of two batches each; no head is kept.
  before = disk.DurableContent(kLogFile);
  while (caller.Roll()) {
    caller.PumpAll();
    caller.AppendHere(kOtherRecord, {.body_bytes = 9});
    caller.PumpAll();
  }
  if (!caller.SyncAll().ok()) return "not written";
  lose_power(Mix(before, disk.DurableContent(kLogFile), kSegmentBytes,
                 [](uint64_t, uint64_t block) { return block >= kHeadBlocks; }));
  const std::string violation = recover();
  return violation.empty() ? "" : absl::StrCat("third life: ", violation);
}

std::string CrashInCreation(uint64_t seed, uint64_t n, bool* created) {
  SimDisk disk(seed);
  disk.CrashAfter(n);
  *created = CreateOn(&disk).ok();
  disk.Crash();
  ScannedLog scanned;
  const absl::Status status = GradientLog::Recover(&disk, kLogFile, &scanned).status();
  if (status.ok() && scanned.record_count == 0) return "";
  if (absl::IsNotFound(status) && !*created) return "";
  return absl::StrCat("operation ", n, ": ", status.ok() ? "records that nobody wrote" : status.ToString());
}

std::string ErrorInCreation(SimOperation operation, uint64_t n, bool* created) {
  SimDisk disk(n);
  disk.FailNext(operation, n, SimFault::kEnospc);
  const absl::Status status = CreateOn(&disk);
  *created = status.ok();
  if (status.ok()) return "";
  if (!absl::IsResourceExhausted(status)) return status.ToString();
  return disk.List().empty() ? "" : absl::StrCat("the file is left behind after: ", status.message());
}

}  // namespace ballast::storage
