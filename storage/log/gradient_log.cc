#include "ballast/storage/log/gradient_log.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/base/threads.h"
#include "ballast/storage/memory/arena.h"

namespace ballast::storage {
namespace {

// Written at a time; between two pieces somebody may interrupt.
constexpr uint64_t kZeroBytes = uint64_t{1} << 20;

}  // namespace

GradientLog::GradientLog(Disk* disk, std::unique_ptr<BlockFile> file, uint64_t segment_bytes, bool transient,
                         SegmentRing ring, const ScannedLog* scanned)
    : file_(std::move(file)),
      segment_bytes_(segment_bytes),
      transient_(transient),
      queue_(std::move(ring), scanned == nullptr ? 0 : scanned->last_lsn),
      writer_(disk, file_.get(), transient,
              BatchEncoder(segment_bytes, std::random_device()(), scanned == nullptr ? 1 : scanned->last_batch + 1,
                           scanned == nullptr || scanned->live.empty() ? 0 : scanned->live.back().incarnation),
              scanned == nullptr ? 0 : scanned->last_batch, &queue_) {}

absl::StatusOr<std::unique_ptr<GradientLog>> GradientLog::Create(Disk* disk, const Options& options,
                                                                 Interrupt interrupt) {
  if (options.segment_bytes % kLogBlock != 0 || options.segment_bytes < kLogSegmentBytesMin ||
      options.segment_count < 3 || options.job.size() > sizeof(FileHead::name)) {
    return model::Error(absl::StatusCode::kInvalidArgument, model::kBadRequest,
                        absl::StrCat("a log of ", options.segment_count, " segments of ", options.segment_bytes,
                                     " bytes: expected at least 3 of at least ", kLogSegmentBytesMin, ", aligned to ",
                                     kLogBlock, ", for a name of at most ", sizeof(FileHead::name), " bytes"));
  }
  BALLAST_ASSIGN_OR_RETURN(auto file, disk->Open(options.path, Disk::Mode::kEmptied));
  if (options.transient) BALLAST_RETURN_IF_ERROR(disk->Remove(options.path));  // the file ends with whoever has it open
  std::unique_ptr<GradientLog> log(new GradientLog(disk, std::move(file), options.segment_bytes, options.transient,
                                                   SegmentRing(options.segment_bytes), /*scanned=*/nullptr));
  const auto fill = [&]() -> absl::Status {
    BALLAST_RETURN_IF_ERROR(log->Extend(options.segment_count, interrupt));
    // Marks exist from the start: a log without marks and without segments was damaged.
    const auto blocks = MakeLogMemory(2 * kLogBlock);
    EncodeHead(LogMark{}, {blocks.get(), kLogBlock});
    EncodeHead(LogMark{}, {blocks.get() + kLogBlock, kLogBlock});
    BALLAST_RETURN_IF_ERROR(log->file_->Write(2 * kLogBlock, {blocks.get(), 2 * kLogBlock}));
    BALLAST_RETURN_IF_ERROR(log->SyncFile());
    // The head comes last: a file without a head never was a log.
    FileHead head;
    head.segment_bytes = options.segment_bytes;
    head.life = options.life;
    std::memcpy(head.name, options.job.data(), options.job.size());
    EncodeHead(head, {blocks.get(), kLogBlock});
    EncodeHead(head, {blocks.get() + kLogBlock, kLogBlock});
    BALLAST_RETURN_IF_ERROR(log->file_->Write(0, {blocks.get(), 2 * kLogBlock}));
    return log->SyncFile();
  };
  if (const absl::Status status = fill(); !status.ok()) {
    log.reset();
    (void)disk->Remove(options.path);
    return status;
  }
  return log;
}

absl::StatusOr<std::unique_ptr<GradientLog>> GradientLog::Recover(Disk* disk, const std::string& path,
                                                                  ScannedLog* scanned,
                                                                  std::atomic<uint64_t>* read_bytes) {
  BALLAST_ASSIGN_OR_RETURN(auto file, disk->Open(path, Disk::Mode::kKept));
  BALLAST_ASSIGN_OR_RETURN(*scanned, ScanLog(*file, read_bytes));
  // Some batches read may have been written and never synced: from here on they count as durable.
  BALLAST_RETURN_IF_ERROR(file->Sync());
  return std::unique_ptr<GradientLog>(new GradientLog(disk, std::move(file), scanned->segment_bytes,
                                                      /*transient=*/false, SegmentRing(*scanned), scanned));
}

GradientLog::~GradientLog() {
  queue_.Stop();
  if (thread_.joinable()) thread_.join();
  if (ahead_.joinable()) ahead_.join();
}

absl::Status GradientLog::WriteZeros(uint64_t begin, uint64_t end, Interrupt interrupt) const {
  BALLAST_ASSIGN_OR_RETURN(const Arena zeros, Arena::Map(kZeroBytes));
  for (uint64_t at = begin; at < end; at += kZeroBytes) {
    BALLAST_RETURN_IF_ERROR(interrupt());
    BALLAST_RETURN_IF_ERROR(file_->Write(at, zeros.bytes().subspan(0, std::min(kZeroBytes, end - at))));
  }
  return absl::OkStatus();
}

void GradientLog::WriteAhead() {
  while (const std::optional<uint64_t> segment = queue_.BeginWriteAhead()) {
    const absl::Status written = WriteZeros(SegmentBegin(*segment), SegmentBegin(*segment + 1), [this, &segment] {
      return queue_.WritesAhead(*segment) ? absl::OkStatus() : absl::CancelledError();
    });
    queue_.EndWriteAhead();
    if (!written.ok() && !absl::IsCancelled(written)) {
      spdlog::warn("{}: a segment of the log could not be written ahead of its use: {}", file_->path(),
                   std::string(written.message()));
      return;
    }
  }
}

absl::Status GradientLog::Extend(uint64_t segment_count, Interrupt interrupt) {
  const uint64_t first = queue_.segments(), written = std::min(segment_count, kWrittenSegments);
  const uint64_t begin = first == 0 ? 0 : SegmentBegin(first);
  absl::Status status = file_->Reserve(begin, SegmentBegin(first + segment_count) - begin);
  if (status.ok() && !transient_) status = WriteZeros(begin, SegmentBegin(first + written), interrupt);
  if (status.ok()) status = interrupt();
  if (status.ok()) {
    queue_.BeginExtension();
    status = SyncFile();
    // A failed sync may drop batches, and the system reports the failure to one caller only: the writer's own sync
    // would then say OK. So the log fails here.
    if (!status.ok()) queue_.Fail(status);
    queue_.EndExtension(segment_count, transient_ ? segment_count : written, status.ok());
  }
  if (!status.ok() && first > 0) (void)file_->Truncate(SegmentBegin(first));
  return status;
}

absl::Status GradientLog::SyncFile() const { return transient_ ? absl::OkStatus() : file_->Sync(); }

absl::Status GradientLog::Start(std::function<void()> progress) {
  queue_.set_progress(std::move(progress));
  BALLAST_ASSIGN_OR_RETURN(thread_, model::MakeThread([this] { PumpUntilStopped(); }));
  // Without it, segments that records reach first are only slower.
  if (auto ahead = model::MakeThread([this] { WriteAhead(); }); ahead.ok()) ahead_ = *std::move(ahead);
  return absl::OkStatus();
}

void GradientLog::PumpUntilStopped() {
  while (!queue_.stopping() && (writer_.in_flight() || queue_.AwaitWork())) Pump(/*wait=*/true);
  writer_.Drain();
}

bool GradientLog::Pump(bool wait) {
  writer_.Pump(wait);
  return writer_.in_flight() || (queue_.status().ok() && !queue_.empty());
}

}  // namespace ballast::storage
