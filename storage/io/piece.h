// What both queues share: cutting requests into pieces, and what a system call's result means for a piece.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "ballast/storage/io/io_queue.h"

namespace ballast::storage {

// A device that is short of memory answers EAGAIN for a while; one that never moves on is broken.
inline constexpr int kIoRetriesMax = 32;

struct Piece {
  IoRequest::Kind kind = IoRequest::Kind::kRead;
  const BlockFile* file = nullptr;
  uint64_t offset = 0;
  std::byte* data = nullptr;
  uint64_t bytes = 0;  // still to move
  int retries = 0;
  uint32_t slot = 0;  // of the request, in RequestTable
};

// `result`: bytes moved, or -errno. True: the piece is complete; false: issue what is left of it again.
// Errors: as IoError; DATA_LOSS (IO) at the end of the file.
absl::StatusOr<bool> Advance(Piece& piece, int64_t result);

// Moves all of `piece` by pread or pwrite.
absl::Status Transfer(Piece piece);

// The requests in flight. Threads: the owner's lock.
class RequestTable {
 public:
  RequestTable();
  absl::Status Add(const IoRequest& request);
  // The next piece that has not been issued, in the order of Add. False: there is none.
  bool Cut(Piece* piece);
  bool uncut() const { return first_uncut_ != nullptr; }
  // A piece ended. After an error the rest of its request is not issued.
  void End(const Piece& piece, const absl::Status& status);
  bool finished() const { return !finished_.empty(); }
  void Take(std::vector<IoCompletion>* completions);
  // Added and not yet taken.
  uint64_t in_flight() const { return in_flight_; }

 private:
  struct Slot {
    IoRequest request;
    uint64_t cut_bytes = 0;
    bool issued = false;  // some piece: a sync has one of no bytes
    bool rest_given_up = false;
    uint32_t pieces = 0;  // issued and not ended
    absl::Status status;
    bool cut() const { return rest_given_up || (issued && cut_bytes == request.buffer.size()); }
    Slot* next = nullptr;  // in the list of those with bytes to cut, or of the free ones
  };
  void FinishIfEnded(Slot& slot);

  std::array<Slot, kIoRequestsMax> slots_;
  Slot* free_ = nullptr;
  Slot* first_uncut_ = nullptr;
  Slot* last_uncut_ = nullptr;
  std::vector<IoCompletion> finished_;
  uint64_t in_flight_ = 0;
};

}  // namespace ballast::storage
