#include "ballast/storage/io/piece.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <thread>

#include "absl/strings/str_cat.h"
#include "ballast/proto/base/status.h"
#include "ballast/storage/io/disk_counters.h"

namespace ballast::storage {
namespace {

const char* Verb(IoRequest::Kind kind) {
  switch (kind) {
    case IoRequest::Kind::kRead:
      return "read";
    case IoRequest::Kind::kWrite:
      return "write";
    case IoRequest::Kind::kSync:
      return "sync";
  }
  return "transfer";
}

// One system call. Returns bytes moved, or -errno.
int64_t Issue(const Piece& piece) {
  const int fd = piece.file->fd();
  const auto offset = static_cast<off_t>(piece.offset);
  ssize_t result = 0;
  switch (piece.kind) {
    case IoRequest::Kind::kRead:
      result = pread(fd, piece.data, piece.bytes, offset);
      break;
    case IoRequest::Kind::kWrite:
      result = pwrite(fd, piece.data, piece.bytes, offset);
      break;
    case IoRequest::Kind::kSync:
      result = fdatasync(fd);
      break;
  }
  return result < 0 ? -errno : result;
}

}  // namespace

absl::StatusOr<bool> Advance(Piece& piece, int64_t result) {
  piece.rest = {};
  if (result < 0) {
    const int error = static_cast<int>(-result);
    // A sync reports a lost write once: a sync that failed is never tried again.
    const bool again = error == EINTR || (error == EAGAIN && piece.kind != IoRequest::Kind::kSync);
    if (again && ++piece.retries <= kIoRetriesMax) {
      if (error == EAGAIN) piece.rest = std::clamp(piece.rested + kIoRestMin, kIoRestMin, kIoRestMax);
      piece.rested += piece.rest;
      return false;
    }
    const absl::Status status = IoError(error, Verb(piece.kind), piece.file->path(), piece.offset, piece.bytes);
    if (!again) return status;
    return model::Annotate(status, absl::StrCat("tried ", piece.retries, " times, with rests of ",
                                                piece.rested.count() / 1000, " ms in all"));
  }
  if (static_cast<uint64_t>(result) >= piece.bytes) return true;
  // The rest to issue again must be aligned too, so a partial block counts as not moved.
  const uint64_t moved = static_cast<uint64_t>(result) / kIoAlignment * kIoAlignment;
  piece.offset += moved;
  piece.data += moved;
  piece.bytes -= moved;
  if (result > 0 && ++piece.retries <= kIoRetriesMax) return false;
  return model::Error(
      absl::StatusCode::kDataLoss, model::kIo,
      absl::StrCat(Verb(piece.kind), " of ", piece.bytes, " bytes at offset ", piece.offset, " of ", piece.file->path(),
                   " moved no more: the file ends there, or its device is failing"));
}

void CountOperation(IoRequest::Kind kind, uint64_t bytes, std::chrono::steady_clock::time_point began,
                    const absl::Status& status) {
  DiskCounters::Operation& operation = ProcessDiskCounters().operations[static_cast<size_t>(kind)];
  operation.seconds.Observe(absl::FromChrono(std::chrono::steady_clock::now() - began));
  if (status.ok()) {
    operation.bytes += bytes;
  } else {
    ++operation.errors;
  }
}

absl::Status TransferPart(const Piece& piece) {
  return Transfer(piece, Issue, [](std::chrono::microseconds rest) { std::this_thread::sleep_for(rest); });
}

absl::Status Transfer(Piece piece) {
  const auto began = std::chrono::steady_clock::now();
  const absl::Status status = TransferPart(piece);
  CountOperation(piece.kind, piece.bytes, began, status);
  return status;
}

absl::Status Transfer(Piece piece, absl::FunctionRef<int64_t(const Piece&)> issue,
                      absl::FunctionRef<void(std::chrono::microseconds)> rest) {
  while (true) {
    BALLAST_ASSIGN_OR_RETURN(const bool complete, Advance(piece, issue(piece)));
    if (complete) return absl::OkStatus();
    if (piece.rest.count() > 0) rest(piece.rest);
  }
}

RequestTable::RequestTable() {
  for (Slot& slot : slots_) {
    slot.next = free_;
    free_ = &slot;
  }
  finished_.reserve(kIoRequestsMax);
}

absl::Status RequestTable::Add(const IoRequest& request) {
  const auto address = reinterpret_cast<uintptr_t>(request.buffer.data());
  if (request.kind == IoRequest::Kind::kSync ? !request.buffer.empty() : request.buffer.empty()) {
    return model::Error(absl::StatusCode::kInvalidArgument, model::kBadRequest,
                        "a read or write needs a buffer, a sync must have none");
  }
  if ((address | request.buffer.size() | request.offset) % kIoAlignment != 0) {
    return model::Error(absl::StatusCode::kInvalidArgument, model::kBadRequest,
                        absl::StrCat("I/O of ", request.buffer.size(), " bytes at offset ", request.offset,
                                     ": address, size and offset must be multiples of ", kIoAlignment));
  }
  if (in_flight_ == kIoRequestsMax) {
    return model::Error(absl::StatusCode::kUnavailable, model::kBusy,
                        absl::StrCat(kIoRequestsMax, " I/O requests are in flight; reap completions first"));
  }
  Slot* slot = free_;
  free_ = slot->next;
  *slot = Slot{.request = request, .began = std::chrono::steady_clock::now()};
  ++ProcessDiskCounters().in_flight;
  (last_uncut_ == nullptr ? first_uncut_ : last_uncut_->next) = slot;
  last_uncut_ = slot;
  ++in_flight_;
  return absl::OkStatus();
}

bool RequestTable::Cut(Piece* piece) {
  if (first_uncut_ == nullptr) return false;
  Slot& slot = *first_uncut_;
  const uint64_t left = slot.request.buffer.size() - slot.cut_bytes;
  const uint64_t bytes = std::min(left, kIoPieceBytesMax);
  *piece = Piece{.kind = slot.request.kind,
                 .file = slot.request.file,
                 .offset = slot.request.offset + slot.cut_bytes,
                 .data = slot.request.buffer.data() + slot.cut_bytes,
                 .bytes = bytes,
                 .slot = static_cast<uint32_t>(&slot - slots_.data())};
  slot.cut_bytes += bytes;
  slot.issued = true;
  ++slot.pieces;
  if (bytes == left) {
    first_uncut_ = slot.next;
    if (first_uncut_ == nullptr) last_uncut_ = nullptr;
  }
  return true;
}

void RequestTable::End(const Piece& piece, const absl::Status& status) {
  Slot& slot = slots_[piece.slot];
  --slot.pieces;
  if (!status.ok() && slot.status.ok()) {
    slot.status = status;
    if (!slot.cut()) {
      slot.rest_given_up = true;
      // Requests are cut in order, so a partly cut request is the first of the list.
      first_uncut_ = slot.next;
      if (first_uncut_ == nullptr) last_uncut_ = nullptr;
    }
  }
  FinishIfEnded(slot);
}

void RequestTable::FinishIfEnded(Slot& slot) {
  if (slot.pieces > 0 || !slot.cut()) return;
  --ProcessDiskCounters().in_flight;
  CountOperation(slot.request.kind, slot.request.buffer.size(), slot.began, slot.status);
  finished_.push_back({slot.request.tag, slot.status});
  slot.next = free_;
  free_ = &slot;
}

void RequestTable::Take(std::vector<IoCompletion>* completions) {
  in_flight_ -= finished_.size();
  for (IoCompletion& completion : finished_) completions->push_back(std::move(completion));
  finished_.clear();
}

}  // namespace ballast::storage
