#include "ballast/storage/log/gradient_log.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ballast/proto/model/status.h"
#include "ballast/storage/io/arena.h"
#include "ballast/storage/io/failpoint.h"
#include "ballast/storage/io/seeded_bugs.h"

namespace ballast::storage {
namespace {

constexpr uint64_t kZeroBytes = uint64_t{1} << 20;

}  // namespace

LogMemory MakeLogMemory(uint64_t bytes) {
  auto* memory = static_cast<std::byte*>(std::aligned_alloc(kLogBlock, bytes));
  std::memset(memory, 0, bytes);
  return {memory, std::free};
}

GradientLog::GradientLog(Disk* disk, std::unique_ptr<BlockFile> file, uint64_t segment_bytes,
                         std::vector<Segment> segments, bool transient)
    : disk_(disk),
      file_(std::move(file)),
      segment_bytes_(segment_bytes),
      transient_(transient),
      salt_(Seeded(StorageBug::kSaltConstant) ? 0 : std::random_device()()),
      segments_(std::move(segments)),
      head_memory_(MakeLogMemory(3 * kLogBlock)) {
  current_ = segments_.size();
}

absl::StatusOr<std::unique_ptr<GradientLog>> GradientLog::Create(Disk* disk, const Options& options) {
  if (options.segment_bytes % kLogBlock != 0 || options.segment_bytes < kLogSegmentBytesMin ||
      options.segment_count < 3 || options.job.size() > sizeof(FileHead::name)) {
    return model::Error(absl::StatusCode::kInvalidArgument, model::kBadRequest,
                        absl::StrCat("a log of ", options.segment_count, " segments of ", options.segment_bytes,
                                     " bytes: expected at least 3 of at least ", kLogSegmentBytesMin, ", aligned to ",
                                     kLogBlock, ", for a name of at most ", sizeof(FileHead::name), " bytes"));
  }
  BALLAST_ASSIGN_OR_RETURN(auto file, disk->Open(options.path, Disk::Mode::kEmptied));
  if (options.transient) BALLAST_RETURN_IF_ERROR(disk->Remove(options.path));  // the file ends with whoever has it open
  std::unique_ptr<GradientLog> log(
      new GradientLog(disk, std::move(file), options.segment_bytes, {}, options.transient));
  const auto fill = [&]() -> absl::Status {
    BALLAST_RETURN_IF_ERROR(log->Extend(options.segment_count));
    Pass("create/reserved");
    // Marks exist from the start: a log without marks and without segments was damaged.
    const auto blocks = MakeLogMemory(2 * kLogBlock);
    EncodeHead(LogMark{}, {blocks.get(), kLogBlock});
    EncodeHead(LogMark{}, {blocks.get() + kLogBlock, kLogBlock});
    BALLAST_RETURN_IF_ERROR(log->file_->Write(2 * kLogBlock, {blocks.get(), 2 * kLogBlock}));
    if (!Seeded(StorageBug::kHeadBeforeContent)) BALLAST_RETURN_IF_ERROR(log->SyncFile());
    Pass("create/headless");
    // The head comes last: a file without a head never was a log.
    FileHead head;
    head.segment_bytes = options.segment_bytes;
    head.life = options.life;
    std::memcpy(head.name, options.job.data(), options.job.size());
    EncodeHead(head, {blocks.get(), kLogBlock});
    EncodeHead(head, {blocks.get() + kLogBlock, kLogBlock});
    BALLAST_RETURN_IF_ERROR(log->file_->Write(0, {blocks.get(), 2 * kLogBlock}));
    Pass("create/head");
    return log->SyncFile();
  };
  if (const absl::Status status = fill(); !status.ok()) {
    log.reset();
    if (!Seeded(StorageBug::kFailedCreationLeft)) (void)disk->Remove(options.path);
    return status;
  }
  return log;
}

absl::StatusOr<std::unique_ptr<GradientLog>> GradientLog::Recover(Disk* disk, const std::string& path,
                                                                  ScannedLog* scanned) {
  BALLAST_ASSIGN_OR_RETURN(auto file, disk->Open(path, Disk::Mode::kKept));
  BALLAST_ASSIGN_OR_RETURN(*scanned, ScanLog(*file));
  Pass("recovery/scanned");
  // Some batches read may have been written and never synced: from here on they count as durable.
  if (!Seeded(StorageBug::kReopenSyncDropped)) BALLAST_RETURN_IF_ERROR(file->Sync());
  Pass("recovery/synced");
  std::vector<Segment> segments(scanned->segment_count);
  for (const ScannedLog::Segment& live : scanned->live) {
    segments[live.index] = {live.incarnation, std::numeric_limits<int64_t>::max(), false};
  }
  std::unique_ptr<GradientLog> log(
      new GradientLog(disk, std::move(file), scanned->segment_bytes, std::move(segments), /*transient=*/false));
  absl::MutexLock lock(&log->mutex_);
  log->last_incarnation_ = scanned->last_incarnation;
  if (Seeded(StorageBug::kIncarnationReused) && !scanned->live.empty())
    log->last_incarnation_ = scanned->live.back().incarnation;
  if (!scanned->live.empty()) {
    log->held_incarnation_ = log->previous_incarnation_ = scanned->live.back().incarnation;
  }
  log->next_batch_ = scanned->last_batch + 1;
  log->synced_batch_ = scanned->last_batch;
  log->durable_lsn_ = scanned->records.empty() ? 0 : scanned->records.back().lsn;
  log->requested_lsn_ = log->durable_lsn_;
  return log;
}

GradientLog::~GradientLog() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
  }
  if (thread_.joinable()) thread_.join();
  std::vector<IoCompletion> dropped;
  while (queue_ != nullptr && queue_->in_flight() > 0) queue_->Reap(/*wait=*/true, &dropped);
  queue_.reset();
}

absl::Status GradientLog::WriteZeros(uint64_t first_segment, uint64_t count) {
  const uint64_t begin = first_segment == 0 ? 0 : kLogFirstSegment + first_segment * segment_bytes_;
  const uint64_t end = kLogFirstSegment + (first_segment + count) * segment_bytes_;
  BALLAST_RETURN_IF_ERROR(file_->Reserve(begin, end - begin));
  if (transient_) return absl::OkStatus();
  BALLAST_ASSIGN_OR_RETURN(const Arena zeros, Arena::Map(kZeroBytes));
  for (uint64_t at = begin; at < end; at += kZeroBytes) {
    BALLAST_RETURN_IF_ERROR(file_->Write(at, zeros.bytes().subspan(0, std::min(kZeroBytes, end - at))));
  }
  return absl::OkStatus();
}

absl::Status GradientLog::Extend(uint64_t segment_count) {
  uint64_t first = 0;
  {
    absl::MutexLock lock(&mutex_);
    first = segments_.size();
  }
  absl::Status status = WriteZeros(first, segment_count);
  if (status.ok()) status = SyncExtension();
  if (!status.ok()) {
    if (first > 0) (void)file_->Truncate(kLogFirstSegment + first * segment_bytes_);
    return status;
  }
  absl::MutexLock lock(&mutex_);
  const bool none = current_ == segments_.size();
  segments_.resize(first + segment_count);
  if (none) current_ = segments_.size();
  return absl::OkStatus();
}

absl::Status GradientLog::SyncFile() const { return transient_ ? absl::OkStatus() : file_->Sync(); }

// A failed sync may drop batches, and the system reports the failure to one caller only: the pump's own sync would then
// say OK.
absl::Status GradientLog::SyncExtension() {
  {
    absl::MutexLock lock(&mutex_);
    extending_ = true;
  }
  const absl::Status status = SyncFile();
  if (!status.ok() && !Seeded(StorageBug::kExtensionSyncForgiven)) Fail(status);
  absl::MutexLock lock(&mutex_);
  extending_ = false;
  return status;
}

void GradientLog::Start(std::function<void()> progress) {
  progress_ = std::move(progress);
  thread_ = std::thread([this] { PumpUntilStopped(); });
}

uint64_t GradientLog::file_bytes() const {
  absl::MutexLock lock(&mutex_);
  return kLogFirstSegment + segments_.size() * segment_bytes_;
}

bool GradientLog::HasRoom(uint64_t body_bytes, uint64_t payload_bytes) const {
  absl::MutexLock lock(&mutex_);
  return RecordCostMax(body_bytes, payload_bytes) + kCutBatchBytes <= room_;
}

uint64_t GradientLog::OldestIncarnation() const {
  uint64_t oldest = std::numeric_limits<uint64_t>::max();
  for (const Segment& segment : segments_) {
    if (segment.incarnation != 0 && !segment.cut) oldest = std::min(oldest, segment.incarnation);
  }
  return oldest;
}

bool GradientLog::Roll() {
  absl::MutexLock lock(&mutex_);
  const auto free =
      std::find_if(segments_.begin(), segments_.end(), [](const Segment& s) { return s.incarnation == 0; });
  if (free == segments_.end()) return false;
  *free = {++last_incarnation_, -1, false};
  current_ = static_cast<uint64_t>(free - segments_.begin());
  room_ = record_bytes_max() + kCutBatchBytes;
  if (std::exchange(cut_lacks_room_, false)) cut_wants_sync_ = true;
  has_cut_room_ = !cut_wants_sync_;  // the batch of a waiting cut comes after all queued records
  queued_.push_back({{}, last_incarnation_, current_, OldestIncarnation()});
  return true;
}

void GradientLog::Append(LogRecord record) {
  const uint64_t cost = RecordCostMax(record.body.size(), record.payload.size());
  absl::MutexLock lock(&mutex_);
  if (cost > room_) {
    spdlog::critical("a record of {} bytes for {} bytes of room: it would be written over another segment", cost,
                     room_);
    std::abort();
  }
  room_ -= cost;
  segments_[current_].keep_for = std::max(segments_[current_].keep_for, record.keep_for);
  queued_.push_back({std::move(record), 0, current_, 0});
  Pass("log/appended");
}

void GradientLog::Sync(uint64_t lsn) {
  absl::MutexLock lock(&mutex_);
  requested_lsn_ = std::max(requested_lsn_, lsn);
}

uint64_t GradientLog::durable_lsn() const {
  absl::MutexLock lock(&mutex_);
  return durable_lsn_;
}

absl::Status GradientLog::status() const {
  absl::MutexLock lock(&mutex_);
  return failed_;
}

void GradientLog::Release(int64_t step) {
  absl::MutexLock lock(&mutex_);
  for (Segment& segment : segments_) segment.keep_for = std::min(segment.keep_for, step);
}

void GradientLog::Keep(uint64_t incarnation, int64_t step) {
  absl::MutexLock lock(&mutex_);
  for (Segment& segment : segments_) {
    if (segment.incarnation == incarnation) segment.keep_for = step;
  }
}

void GradientLog::Cut(int64_t step) {
  absl::MutexLock lock(&mutex_);
  cut_step_ = std::max(cut_step_, step);
  if (current_ == segments_.size()) return;
  const bool cut = CutSegments();
  const uint64_t oldest = OldestIncarnation();
  cut_waits_ = oldest >= held_incarnation_ && oldest < last_incarnation_ &&
               std::any_of(segments_.begin(), segments_.end(), [&](const Segment& segment) {
                 return segment.incarnation == oldest && segment.keep_for <= cut_step_;
               });
  if (cut || cut_waits_) WantCutSync();
}

bool GradientLog::CutSegments() {
  // Cuts the oldest segments, up to the first needed segment: a log is read from its oldest segment on. The batch that
  // makes a cut known may survive a crash in which earlier batches are lost, so the snapshot that replaces the segment
  // must be durable already.
  for (bool cut = false;; cut = true) {
    const uint64_t oldest = OldestIncarnation();
    const uint64_t held = Seeded(StorageBug::kCutBeforeSnapshot) ? last_incarnation_ : held_incarnation_;
    if (oldest >= held || current_ == segments_.size()) return cut;
    const auto segment =
        std::find_if(segments_.begin(), segments_.end(), [&](const Segment& s) { return s.incarnation == oldest; });
    if (segment->keep_for > cut_step_ + (Seeded(StorageBug::kCutOneStepEarly) ? 1 : 0)) return cut;
    segment->cut = true;
    Pass("log/cut");
    if (Seeded(StorageBug::kFreedBeforeCutDurable)) *segment = {};
  }
}

void GradientLog::WantCutSync() {
  // Each segment keeps room for one empty batch that makes a cut known; a second batch uses the room for records.
  if (cut_wants_sync_) return;
  if (!std::exchange(has_cut_room_, false)) {
    cut_lacks_room_ = room_ < kCutBatchBytes;
    if (cut_lacks_room_) return;
    room_ -= kCutBatchBytes;
  }
  cut_wants_sync_ = true;
}

bool GradientLog::cut_lacks_room() const {
  absl::MutexLock lock(&mutex_);
  return cut_lacks_room_;
}

uint64_t GradientLog::free_bytes() const { return free_segments() * (segment_bytes_ - kSegmentHeadBytes); }

uint64_t GradientLog::free_segments() const {
  absl::MutexLock lock(&mutex_);
  return static_cast<uint64_t>(
      std::count_if(segments_.begin(), segments_.end(), [](const Segment& s) { return s.incarnation == 0; }));
}

}  // namespace ballast::storage
