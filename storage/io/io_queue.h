// Reads and writes of aligned buffers, many in flight, every result checked. Two implementations under the same
// contract test: io_uring, and a pool of threads for kernels and containers that refuse io_uring.
//
// Bounds: kIoRequestsMax requests; the kernel has at most kIoDepth pieces of them at a time.
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

// Larger transfers are cut: the block layer would cut them anyway, and a short transfer repeats only its own piece.
inline constexpr uint64_t kIoPieceBytesMax = uint64_t{1} << 20;
// Depth 2-8 already saturates one NVMe device; 64 lets a few 12 MiB chunks be with the kernel whole.
inline constexpr uint32_t kIoDepth = 64;
inline constexpr uint32_t kIoRequestsMax = 64;

struct IoRequest {
  enum class Kind {
    kRead,
    kWrite,
    kSync,  // fdatasync: covers the writes completed before its submission; no offset, no buffer
  };
  Kind kind = Kind::kRead;
  const BlockFile* file = nullptr;
  uint64_t offset = 0;           // multiple of kIoAlignment, like the buffer's address and size
  absl::Span<std::byte> buffer;  // borrowed until completion; a write does not change it
  uint64_t tag = 0;              // returned with the completion
};

struct IoCompletion {
  uint64_t tag = 0;
  absl::Status status;  // OK: all bytes moved
};

// Threads: only the thread that made the queue (an io_uring belongs to its thread). Destruction waits for all requests
// in flight, and may happen on any thread once nothing is in flight.
class IoQueue {
 public:
  virtual ~IoQueue() = default;
  // Starts a transfer, at the latest within the next Reap. INVALID_ARGUMENT (BAD_REQUEST) for misalignment; UNAVAILABLE
  // (BUSY) if kIoRequestsMax are in flight: call Reap first. After a short transfer, EAGAIN or EINTR the queue submits
  // the piece again, at most kIoRetriesMax times; after EAGAIN it first waits.
  virtual absl::Status Submit(const IoRequest& request) = 0;
  // Appends finished requests, in any order. `wait`: blocks until there is a finished request, unless nothing is in
  // flight.
  virtual void Reap(bool wait, std::vector<IoCompletion>* completions) = 0;
  virtual uint64_t in_flight() const = 0;
  virtual const char* name() const = 0;  // "io_uring" or "threads"
};

enum class IoBackend { kAuto, kUring, kThreads };

struct IoQueueOptions {
  IoBackend backend = IoBackend::kAuto;
  // Memory that most buffers come from. Registered with the kernel if the kernel allows; this only saves CPU time.
  absl::Span<std::byte> registered;
  uint32_t threads = 4;  // in the pool
};

// kAuto uses io_uring if the probe found it, otherwise threads. kUring: UNAVAILABLE (IO) with the reason if there is no
// io_uring.
absl::StatusOr<std::unique_ptr<IoQueue>> MakeIoQueue(const IoQueueOptions& options);

// "io_uring", or "threads: <why io_uring is not used>". Probed once per process.
const std::string& IoBackendProbe();

}  // namespace ballast::storage
