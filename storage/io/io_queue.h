// Reads and writes of aligned buffers, many in flight, every result looked at. Two implementations under one contract
// test: io_uring, and a pool of threads for kernels and containers that refuse it.
//
// Bounds: kIoRequestsMax requests, of which kIoDepth pieces are with the kernel at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "ballast/storage/io/block_file.h"

namespace ballast::storage {

// Larger transfers are cut: the block layer would cut them anyway, and a lost one costs a whole request.
inline constexpr uint64_t kIoPieceBytesMax = uint64_t{1} << 20;
// Depth 2-8 already saturates one NVMe device; 64 lets a few 12 MiB chunks be with the kernel whole.
inline constexpr uint32_t kIoDepth = 64;
inline constexpr uint32_t kIoRequestsMax = 64;

struct IoRequest {
  enum class Kind {
    kRead,
    kWrite,
    kSync,  // fdatasync: covers the writes that had completed when it was submitted; no offset, no buffer
  };
  Kind kind = Kind::kRead;
  const BlockFile* file = nullptr;
  uint64_t offset = 0;           // multiple of kIoAlignment, like the buffer's address and size
  absl::Span<std::byte> buffer;  // borrowed until completion; a write does not change it
  uint64_t tag = 0;              // comes back with the completion
};

struct IoCompletion {
  uint64_t tag = 0;
  absl::Status status;  // OK: all bytes moved
};

// Threads: one at a time, the one that made it (an io_uring belongs to its thread). Destruction waits for what is in
// flight, and may happen on any thread once nothing is.
class IoQueue {
 public:
  virtual ~IoQueue() = default;
  // Starts a transfer, at the latest within the next Reap. INVALID_ARGUMENT (BAD_REQUEST) for misalignment; UNAVAILABLE (BUSY) when kIoRequestsMax are in
  // flight: reap first. Short transfers, EAGAIN and EINTR are resubmitted, at most kIoRetriesMax times a piece.
  virtual absl::Status Submit(const IoRequest& request) = 0;
  // Appends what has finished, in any order. `wait`: not before there is one, unless nothing is in flight.
  virtual void Reap(bool wait, std::vector<IoCompletion>* completions) = 0;
  virtual uint64_t in_flight() const = 0;
  virtual const char* name() const = 0;  // "io_uring" or "threads"
};

enum class IoBackend { kAuto, kUring, kThreads };

struct IoQueueOptions {
  IoBackend backend = IoBackend::kAuto;
  // Memory from which most buffers come: registered with the kernel if it lets us, which saves CPU time only.
  absl::Span<std::byte> registered;
  uint32_t threads = 4;  // of the pool
};

// kAuto takes io_uring where the probe found it, else threads. kUring: UNAVAILABLE (IO) with the reason if it cannot be
// had.
absl::StatusOr<std::unique_ptr<IoQueue>> MakeIoQueue(const IoQueueOptions& options);

// "io_uring", or "threads: <why io_uring is not used>". Probed once per process.
const std::string& IoBackendProbe();

}  // namespace ballast::storage
