// Shared by both queues: cuts requests into pieces, and applies a system call's result to a piece.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "ballast/storage/io/io_queue.h"

namespace ballast::storage {

// A device short of memory answers EAGAIN for a while; a device that never moves on is broken.
inline constexpr int kIoRetriesMax = 32;
// A piece rests after EAGAIN, each time twice as long as before: all its rests together take 1.2 s.
inline constexpr std::chrono::microseconds kIoRestMin{100}, kIoRestMax{50'000};

struct Piece {
  IoRequest::Kind kind = IoRequest::Kind::kRead;
  const BlockFile* file = nullptr;
  uint64_t offset = 0;
  std::byte* data = nullptr;
  uint64_t bytes = 0;  // still to move
  int retries = 0;
  std::chrono::microseconds rest{0};    // before the piece is issued again
  std::chrono::microseconds rested{0};  // in all, with `rest`
  uint32_t slot = 0;                    // the request's, in RequestTable
};

// `result`: bytes moved, or -errno. True: the piece is complete; false: issue the rest of the piece again, after
// `piece.rest`. Errors: as IoError; DATA_LOSS (IO) at the end of the file.
absl::StatusOr<bool> Advance(Piece& piece, int64_t result);

// Moves all of `piece` by pread or pwrite, on this thread.
absl::Status Transfer(Piece piece);
// As Transfer, of a request that a RequestTable counts.
absl::Status TransferPart(const Piece& piece);
// `issue`: one system call, as Advance's result. `rest` waits.
absl::Status Transfer(Piece piece, absl::FunctionRef<int64_t(const Piece&)> issue,
                      absl::FunctionRef<void(std::chrono::microseconds)> rest);

// Adds an operation that moved `bytes` to the process's counters.
void CountOperation(IoRequest::Kind kind, uint64_t bytes, std::chrono::steady_clock::time_point began,
                    const absl::Status& status);

// The requests in flight. Threads: the owner's lock.
class RequestTable {
 public:
  RequestTable();
  absl::Status Add(const IoRequest& request);
  // The next piece not issued yet, in the order of Add. False: there is none.
  bool Cut(Piece* piece);
  bool uncut() const { return first_uncut_ != nullptr; }
  // A piece ended. After an error the rest of its request is not issued.
  void End(const Piece& piece, const absl::Status& status);
  bool finished() const { return !finished_.empty(); }
  void Take(std::vector<IoCompletion>* completions);
  // Number of requests added and not yet taken.
  uint64_t in_flight() const { return in_flight_; }

 private:
  struct Slot {
    IoRequest request;
    uint64_t cut_bytes = 0;
    std::chrono::steady_clock::time_point began;
    bool issued = false;  // at least one piece was issued: a sync has one piece, of no bytes
    bool rest_given_up = false;
    uint32_t pieces = 0;  // issued and not ended
    absl::Status status;
    bool cut() const { return rest_given_up || (issued && cut_bytes == request.buffer.size()); }
    Slot* next = nullptr;  // in the list of slots with bytes to cut, or in the list of free slots
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
