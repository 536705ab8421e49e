#include "ballast/tests/sim_disk/sim_queue.h"

#include <algorithm>
#include <cerrno>
#include <utility>

#include "ballast/proto/base/status.h"

namespace ballast::storage {
namespace {

bool Aligned(uint64_t offset, absl::Span<const std::byte> buffer) {
  return (reinterpret_cast<uintptr_t>(buffer.data()) | buffer.size() | offset) % kIoAlignment == 0;
}

}  // namespace

SimDisk::File::~File() {
  absl::MutexLock lock(&disk_->mutex_);
  if (holds_lock_ && target_.life == disk_->life_) target_.inode->locked = false;
}

absl::StatusOr<uint64_t> SimDisk::File::Size() const {
  absl::MutexLock lock(&disk_->mutex_);
  if (disk_->off_ || target_.life != disk_->life_) return IoError(ENODEV, "stat", path(), 0, 0);
  return target_.inode->content.newest().size();
}

absl::Status SimDisk::File::Read(uint64_t offset, absl::Span<std::byte> buffer) const {
  absl::MutexLock lock(&disk_->mutex_);
  if (!Aligned(offset, buffer)) return IoError(EINVAL, "read", path(), offset, buffer.size());
  return disk_->Read(target_, offset, buffer);
}

absl::Status SimDisk::File::Write(uint64_t offset, absl::Span<const std::byte> buffer) const {
  absl::MutexLock lock(&disk_->mutex_);
  if (!Aligned(offset, buffer)) return IoError(EINVAL, "write", path(), offset, buffer.size());
  return disk_->Write(target_, offset, buffer);
}

absl::Status SimDisk::File::Sync() const {
  absl::MutexLock lock(&disk_->mutex_);
  return disk_->Sync(target_, disk_->sequence_);
}

absl::Status SimDisk::File::Reserve(uint64_t offset, uint64_t bytes) {
  absl::MutexLock lock(&disk_->mutex_);
  BALLAST_ASSIGN_OR_RETURN(const auto fault, disk_->Begin(SimOperation::kReserve, target_, {offset, bytes}));
  const uint64_t first = offset / kIoAlignment;
  const uint64_t count = AlignUp(offset + bytes) / kIoAlignment - first;
  SimContent& content = target_.inode->content;
  int error = 0;
  if (bytes == 0) {
    error = EINVAL;  // as posix_fallocate
  } else if (fault == SimFault::kEio) {
    error = EIO;
  } else if (fault == SimFault::kEnospc || count - content.newest().AllocatedIn(first, count) > disk_->FreeBlocks()) {
    error = ENOSPC;
  } else {
    content.Reserve(offset, bytes);
  }
  return disk_->End(error == 0 ? absl::OkStatus() : IoError(error, "reservation", path(), offset, bytes));
}

void SimDisk::File::Discard(uint64_t offset, uint64_t bytes) {
  absl::MutexLock lock(&disk_->mutex_);
  const auto fault = disk_->Begin(SimOperation::kDiscard, target_, {offset, bytes});
  if (!fault.ok()) return;
  if (!fault->has_value()) {
    std::vector<SimBlockPtr> zeros(bytes / kIoAlignment);
    target_.inode->content.Write(
        {.sequence = ++disk_->sequence_, .first = offset / kIoAlignment, .blocks = std::move(zeros), .hole = true});
  }
  (void)disk_->End(absl::OkStatus());
}

absl::Status SimDisk::File::Truncate(uint64_t bytes) {
  absl::MutexLock lock(&disk_->mutex_);
  BALLAST_ASSIGN_OR_RETURN(const auto fault, disk_->Begin(SimOperation::kTruncate, target_, {bytes, 0}));
  if (fault.has_value()) return disk_->End(IoError(EIO, "truncation", path(), bytes, 0));
  target_.inode->content.Truncate(bytes);
  return disk_->End(absl::OkStatus());
}

SimDisk::Queue::Queue(SimDisk* disk) : disk_(disk) {
  absl::MutexLock lock(&disk_->mutex_);
  disk_->queues_.push_back(this);
}

SimDisk::Queue::~Queue() {
  absl::MutexLock lock(&disk_->mutex_);
  while (!unperformed_.empty()) PerformOne();
  disk_->queues_.erase(std::find(disk_->queues_.begin(), disk_->queues_.end(), this));
}

absl::Status SimDisk::Queue::Submit(const IoRequest& request) {
  absl::MutexLock lock(&disk_->mutex_);
  const auto* file = dynamic_cast<const File*>(request.file);
  if (file == nullptr || file->disk() != disk_) {
    return model::Error(absl::StatusCode::kInvalidArgument, model::kBadRequest,
                        "a simulated disk's queue got another disk's file");
  }
  BALLAST_RETURN_IF_ERROR(table_.Add(request));
  InFlight& added = unperformed_.emplace_back(
      InFlight{.request = request, .target = file->target(), .sequence = disk_->sequence_, .pieces = {}});
  for (Piece piece; table_.Cut(&piece);) added.pieces.push_back(piece);
  return absl::OkStatus();
}

void SimDisk::Queue::Reap(bool wait, std::vector<IoCompletion>* completions) {
  absl::MutexLock lock(&disk_->mutex_);
  uint64_t count = disk_->random_.Below(unperformed_.size() + 1);
  if (wait && !table_.finished()) count = std::max<uint64_t>(count, 1);
  // A crash on the way ends what is left.
  for (; count > 0 && !unperformed_.empty(); --count) PerformOne();
  table_.Take(completions);
}

uint64_t SimDisk::Queue::in_flight() const {
  absl::MutexLock lock(&disk_->mutex_);
  return table_.in_flight();
}

void SimDisk::Queue::PerformOne() {
  std::swap(unperformed_[disk_->random_.Below(unperformed_.size())], unperformed_.back());
  const InFlight chosen = std::move(unperformed_.back());
  unperformed_.pop_back();  // before it is performed: a crash on the way ends all that are in the list
  const IoRequest& request = chosen.request;
  switch (request.kind) {
    case IoRequest::Kind::kRead:
      return End(chosen, disk_->Read(chosen.target, request.offset, request.buffer));
    case IoRequest::Kind::kWrite:
      return End(chosen, disk_->Write(chosen.target, request.offset, request.buffer));
    case IoRequest::Kind::kSync:
      return End(chosen, disk_->Sync(chosen.target, chosen.sequence));
  }
}

void SimDisk::Queue::End(const InFlight& ended, const absl::Status& status) {
  for (const Piece& piece : ended.pieces) table_.End(piece, status);
}

void SimDisk::Queue::LosePower() {
  disk_->mutex_.AssertHeld();  // an annotation could not tell the disk that its queue's disk is itself
  for (const InFlight& request : unperformed_) {
    if (request.target.life == disk_->life_) {
      if (request.request.kind == IoRequest::Kind::kWrite) {
        // The crash decides how much of the write arrives, as for completed writes.
        (void)disk_->DoWrite(request.target, request.request.offset, request.request.buffer, std::nullopt);
      } else if (request.request.kind == IoRequest::Kind::kSync && disk_->random_.Percent(50)) {
        (void)disk_->DoSync(request.target, request.sequence, std::nullopt);
      }
    }
    End(request,
        IoError(ENODEV, "transfer", request.target.path, request.request.offset, request.request.buffer.size()));
  }
  unperformed_.clear();
}

}  // namespace ballast::storage
