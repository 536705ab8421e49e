// Memory that this client shares with a server on its own host: slices go through it instead of over the wire.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "ballast/proto/base/descriptor.h"
#include "ballast/proto/base/memory_socket.h"
#include "ballast/v1/state_service.pb.h"

namespace ballast::client {

// Each slice in flight has a slot. The client may use a slot again only if it knows that the server has finished with
// it: no checksum shows a late write, because the server computes the checksum of a pull from the shared bytes. If a
// call's outcome is unknown, the client abandons its slot. Threads: any.
class SharedSlots : public std::enable_shared_from_this<SharedSlots> {
 public:
  // Below this a message costs as much as the bytes.
  static constexpr uint64_t kSliceBytesMin = uint64_t{64} << 10;

  // Connects to the offered socket, without blocking. FAILED_PRECONDITION (UNSUPPORTED): the server is on another host
  // or in another network namespace, or made no offer. UNAVAILABLE (IO): too many connect at once.
  static absl::StatusOr<model::Descriptor> Connect(const v1::MemoryOffer& offer);
  // Hands new memory over through `socket`, and takes the socket if that succeeds. Blocks until the server has
  // answered, until `deadline`, or until another thread shuts the socket down. UNAVAILABLE (IO): the server did not
  // prove who it is, or did not answer. RESOURCE_EXHAUSTED (BUDGET): the server refused; the message says why.
  static absl::StatusOr<std::shared_ptr<SharedSlots>> HandOver(model::Descriptor* socket, const v1::MemoryOffer& offer,
                                                               absl::Time deadline);

  class Slot {
   public:
    Slot(std::shared_ptr<SharedSlots> slots, size_t first, size_t count, uint64_t bytes);
    ~Slot();
    Slot(const Slot&) = delete;
    Slot& operator=(const Slot&) = delete;
    absl::Span<std::byte> bytes() const { return bytes_; }
    v1::SharedPlace place() const;
    // The server may still work on this slot.
    void Abandon() { abandoned_ = true; }
    // Call when the server no longer shares this memory.
    void EndAll() const { slots_->End(); }

   private:
    const std::shared_ptr<SharedSlots> slots_;
    bool abandoned_ = false;
    const size_t first_, count_;  // pieces
    const absl::Span<std::byte> bytes_;
  };
  // Null: the slice is small, no slot is free, or sharing has ended. Then the slice goes over the wire.
  std::shared_ptr<Slot> Take(uint64_t bytes) ABSL_LOCKS_EXCLUDED(mu_);

  void End() ABSL_LOCKS_EXCLUDED(mu_);
  // After End, or when the server has closed the socket.
  bool ended() const ABSL_LOCKS_EXCLUDED(mu_);

 private:
  static constexpr uint64_t kPieceBytes = uint64_t{128} << 10;
  static constexpr size_t kPieces = model::kSharedBytes / kPieceBytes;
  // So many abandoned pieces end sharing; the next memory is whole again.
  static constexpr size_t kAbandonedMax = kPieces / 2;

  SharedSlots(model::Descriptor socket, model::SharedMapping memory, std::string ticket);
  void Return(size_t first, size_t count, bool abandoned) ABSL_LOCKS_EXCLUDED(mu_);
  absl::Span<std::byte> Pieces(size_t first, uint64_t bytes) const {
    return memory_.bytes().subspan(first * kPieceBytes, bytes);
  }

  const model::Descriptor socket_;  // open for as long as the memory is shared
  const model::SharedMapping memory_;
  const std::string ticket_;
  mutable absl::Mutex mu_;
  std::array<bool, kPieces> taken_ ABSL_GUARDED_BY(mu_) = {};
  size_t abandoned_ ABSL_GUARDED_BY(mu_) = 0;
  bool ended_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace ballast::client
