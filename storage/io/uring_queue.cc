#include "ballast/storage/io/uring_queue.h"

#include <liburing.h>
#include <spdlog/spdlog.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <optional>

#include "absl/strings/str_cat.h"
#include "ballast/proto/base/descriptor.h"
#include "ballast/proto/base/status.h"
#include "ballast/storage/io/piece.h"

namespace ballast::storage {
namespace {

// The kernel registers at most 1 GiB per entry.
constexpr uint64_t kRegisteredBytesMax = uint64_t{1} << 30;
// Number of pieces that wait for the next Reap, since most callers are about to call Reap: entering the kernel for each
// piece took a tenth of a transfer's CPU time.
constexpr uint32_t kQueuedMax = 8;
// In user_data: the end of a piece's rest, no transfer.
constexpr uint64_t kRested = uint64_t{1} << 32;

class UringQueue : public IoQueue {
 public:
  UringQueue() {
    free_.reserve(kIoDepth);
    for (uint32_t i = 0; i < kIoDepth; ++i) free_.push_back(i);
  }

  ~UringQueue() override {
    if (!ready_ || !descriptor_.own()) return;
    std::vector<IoCompletion> dropped;
    while (in_flight() > 0) Reap(/*wait=*/true, &dropped);
    descriptor_.Release();
    io_uring_queue_exit(&ring_);
  }

  absl::Status Init(absl::Span<std::byte> registered) {
    // Completions are then handled when this thread asks, not by interrupting its kernels; Linux 6.1. Older: plain
    // ring.
    int error = io_uring_queue_init(kIoDepth, &ring_, IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN);
    if (error == -EINVAL) error = io_uring_queue_init(kIoDepth, &ring_, 0);
    if (error != 0) return Unavailable("io_uring_setup", -error);
    ready_ = true;
    // A forked child with the ring would keep the ring's files open, and their locks.
    descriptor_ = model::Descriptor(ring_.ring_fd);
    (void)io_uring_ring_dontfork(&ring_);
    io_uring_probe* probe = io_uring_get_probe_ring(&ring_);
    const bool enough = probe != nullptr && io_uring_opcode_supported(probe, IORING_OP_READ) &&
                        io_uring_opcode_supported(probe, IORING_OP_WRITE) &&
                        io_uring_opcode_supported(probe, IORING_OP_FSYNC);
    io_uring_free_probe(probe);
    if (!enough) return Unavailable("io_uring read, write and fsync operations", EOPNOTSUPP);
    if (!registered.empty() && registered.size() <= kRegisteredBytesMax) {
      const iovec whole = {registered.data(), registered.size()};
      if (const int refused = io_uring_register_buffers(&ring_, &whole, 1); refused == 0) {
        registered_ = registered;
      } else {
        spdlog::info("io_uring: {} bytes of buffers stay unregistered: {}", registered.size(), std::strerror(-refused));
      }
    }
    return absl::OkStatus();
  }

  absl::Status Submit(const IoRequest& request) override {
    BALLAST_RETURN_IF_ERROR(table_.Add(request));
    Fill();
    if (io_uring_sq_ready(&ring_) >= kQueuedMax) SubmitQueued();
    return absl::OkStatus();
  }

  void Reap(bool wait, std::vector<IoCompletion>* completions) override {
    if (table_.finished()) {
      if (io_uring_sq_ready(&ring_) > 0) SubmitQueued();
    } else if (table_.in_flight() > 0) {
      if (!wait) Enter(/*pieces=*/0);
      Collect();
      while (wait && !table_.finished() && table_.in_flight() > 0) {
        Enter(WaitPieces());
        Collect();
      }
    }
    table_.Take(completions);
  }

  uint64_t in_flight() const override { return table_.in_flight(); }
  const char* name() const override { return "io_uring"; }

 private:
  static absl::Status Unavailable(absl::string_view what, int error) {
    return model::Error(absl::StatusCode::kUnavailable, model::kIo, absl::StrCat(what, ": ", std::strerror(error)));
  }

  void Fill() {
    Piece piece;
    while (!free_.empty() && table_.Cut(&piece)) {
      const uint32_t index = free_.back();
      free_.pop_back();
      pieces_[index] = piece;
      Prepare(index);
    }
  }

  void Prepare(uint32_t index) {
    const Piece& piece = pieces_[index];
    // Never null: no more than kIoDepth pieces are out, and the submission queue has as many entries.
    io_uring_sqe* sqe = io_uring_get_sqe(&ring_);
    const bool fixed = piece.data != nullptr && piece.data >= registered_.data() &&
                       piece.data + piece.bytes <= registered_.data() + registered_.size() && !registered_.empty();
    const auto bytes = static_cast<unsigned>(piece.bytes);
    if (piece.kind == IoRequest::Kind::kSync) {
      io_uring_prep_fsync(sqe, piece.file->fd(), IORING_FSYNC_DATASYNC);
    } else if (piece.kind == IoRequest::Kind::kRead) {
      if (fixed) {
        io_uring_prep_read_fixed(sqe, piece.file->fd(), piece.data, bytes, piece.offset, 0);
      } else {
        io_uring_prep_read(sqe, piece.file->fd(), piece.data, bytes, piece.offset);
      }
    } else if (fixed) {
      io_uring_prep_write_fixed(sqe, piece.file->fd(), piece.data, bytes, piece.offset, 0);
    } else {
      io_uring_prep_write(sqe, piece.file->fd(), piece.data, bytes, piece.offset);
    }
    io_uring_sqe_set_data64(sqe, index);
  }

  // The kernel tells when the piece has rested, as it tells of transfers: nobody sleeps here while others go on.
  void PrepareRest(uint32_t index) {
    rests_[index] = {.tv_sec = 0, .tv_nsec = std::chrono::nanoseconds(pieces_[index].rest).count()};
    io_uring_sqe* sqe = io_uring_get_sqe(&ring_);
    io_uring_prep_timeout(sqe, &rests_[index], /*count=*/0, /*flags=*/0);
    io_uring_sqe_set_data64(sqe, index | kRested);
  }

  // Number of pieces to wait for in a single sleep: waking for each piece costs CPU time, and the remaining pieces keep
  // the device busy meanwhile.
  unsigned WaitPieces() const { return kIoDepth - free_.size() >= 8 ? 4 : 1; }

  void SubmitQueued() { Check(io_uring_submit(&ring_)); }

  // Submits queued pieces, lets the kernel post completions, and waits for `pieces` completions.
  void Enter(unsigned pieces) {
    Check(pieces > 0 ? static_cast<int>(io_uring_submit_and_wait(&ring_, pieces))
                     : io_uring_submit_and_get_events(&ring_));
  }

  void Check(int result) {
    // Pieces that the kernel did not take stay queued for the next call.
    if (result >= 0 || result == -EINTR || result == -EAGAIN || result == -EBUSY) return;
    spdlog::critical("io_uring_enter: {}: the ring was used against its contract", std::strerror(-result));
    std::abort();
  }

  // None: the kernel has the rest of the piece.
  std::optional<absl::Status> Continue(uint32_t index, int result) {
    Piece& piece = pieces_[index];
    // What may block, as each sync, has a thread of the kernel's, which counts as one of this process. Where it may not
    // be made, the kernel cancels what it has not begun; nobody else does.
    if (result == -ECANCELED) return TransferPart(piece);
    const absl::StatusOr<bool> complete = Advance(piece, result);
    if (!complete.ok() || *complete) return complete.status();
    piece.rest.count() > 0 ? PrepareRest(index) : Prepare(index);
    return std::nullopt;
  }

  void Collect() {
    io_uring_cqe* cqe = nullptr;
    while (io_uring_peek_cqe(&ring_, &cqe) == 0) {
      const uint64_t data = io_uring_cqe_get_data64(cqe);
      const auto index = static_cast<uint32_t>(data);
      const int result = cqe->res;
      io_uring_cqe_seen(&ring_, cqe);
      if ((data & kRested) != 0) {
        Prepare(index);
        continue;
      }
      if (const std::optional<absl::Status> ended = Continue(index, result)) {
        table_.End(pieces_[index], *ended);
        free_.push_back(index);
      }
    }
    Fill();
    if (io_uring_sq_ready(&ring_) > 0) SubmitQueued();
  }

  io_uring ring_ = {};
  model::Descriptor descriptor_;  // the ring's, which io_uring_queue_exit closes
  bool ready_ = false;
  absl::Span<std::byte> registered_;
  RequestTable table_;
  std::array<Piece, kIoDepth> pieces_;  // by user_data
  std::array<__kernel_timespec, kIoDepth> rests_ = {};
  std::vector<uint32_t> free_;  // of pieces_
};

}  // namespace

absl::StatusOr<std::unique_ptr<IoQueue>> MakeUringQueue(absl::Span<std::byte> registered) {
  auto queue = std::make_unique<UringQueue>();
  BALLAST_RETURN_IF_ERROR(queue->Init(registered));
  return std::unique_ptr<IoQueue>(std::move(queue));
}

}  // namespace ballast::storage
