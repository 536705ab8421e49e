#include "ballast/storage/io/piece.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "absl/strings/str_cat.h"
#include "ballast/proto/model/status.h"

namespace ballast::storage {
namespace {

const char* Verb(IoRequest::Kind kind) { return kind == IoRequest::Kind::kRead ? "read" : "write"; }

}  // namespace

absl::StatusOr<bool> Advance(Piece& piece, int64_t result) {
  if (result < 0) {
    const int error = static_cast<int>(-result);
    if ((error == EAGAIN || error == EINTR) && ++piece.retries <= kIoRetriesMax) return false;
    return IoError(error, Verb(piece.kind), piece.file->path(), piece.offset, piece.bytes);
  }
  if (static_cast<uint64_t>(result) >= piece.bytes) return true;
  // What is issued again must be aligned too, so a partial block counts as not moved.
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

absl::Status Transfer(Piece piece) {
  while (true) {
    const ssize_t result = piece.kind == IoRequest::Kind::kRead
                               ? pread(piece.file->fd(), piece.data, piece.bytes, static_cast<off_t>(piece.offset))
                               : pwrite(piece.file->fd(), piece.data, piece.bytes, static_cast<off_t>(piece.offset));
    BALLAST_ASSIGN_OR_RETURN(const bool complete, Advance(piece, result < 0 ? -errno : result));
    if (complete) return absl::OkStatus();
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
  if (request.buffer.empty() || (address | request.buffer.size() | request.offset) % kIoAlignment != 0) {
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
  *slot = Slot{.request = request};
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
    if (slot.cut_bytes < slot.request.buffer.size()) {
      slot.cut_bytes = slot.request.buffer.size();
      // Requests are cut one after the other, so one that is partly cut is the first of the list.
      first_uncut_ = slot.next;
      if (first_uncut_ == nullptr) last_uncut_ = nullptr;
    }
  }
  FinishIfEnded(slot);
}

void RequestTable::FinishIfEnded(Slot& slot) {
  if (slot.pieces > 0 || slot.cut_bytes < slot.request.buffer.size()) return;
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
