#include "ballast/client/transport/shared_slots.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ballast/proto/base/status.h"

namespace ballast::client {

absl::StatusOr<model::Descriptor> SharedSlots::Connect(const v1::MemoryOffer& offer) {
  BALLAST_ASSIGN_OR_RETURN(const std::string host, model::HostName());
  if (offer.host() != host) {
    return model::Error(absl::StatusCode::kFailedPrecondition, model::kUnsupported, "the server is on another host");
  }
  return model::ConnectToMemorySocket(offer.socket());
}

absl::StatusOr<std::shared_ptr<SharedSlots>> SharedSlots::HandOver(model::Descriptor* socket,
                                                                   const v1::MemoryOffer& offer, absl::Time deadline) {
  BALLAST_RETURN_IF_ERROR(model::SendSocketMessage(socket->get(), offer.ticket()));
  BALLAST_ASSIGN_OR_RETURN(const model::SocketMessage proof, model::ReceiveSocketMessage(socket->get(), deadline));
  if (offer.proof().size() != model::kSecretBytes || !model::SameSecret(proof.text, offer.proof())) {
    return model::Error(absl::StatusCode::kUnavailable, model::kIo,
                        "the process at the offered socket is not the server, or no longer has the offer");
  }
  model::Descriptor memfd;
  BALLAST_ASSIGN_OR_RETURN(model::SharedMapping memory, model::SharedMapping::Make(&memfd));
  BALLAST_RETURN_IF_ERROR(model::SendSocketMessage(socket->get(), "memory", memfd.get()));
  BALLAST_ASSIGN_OR_RETURN(const model::SocketMessage answer, model::ReceiveSocketMessage(socket->get(), deadline));
  if (answer.text != model::kTaken) {
    return model::Error(absl::StatusCode::kResourceExhausted, model::kBudget,
                        absl::StrCat("the server does not share memory: ", answer.text));
  }
  return std::shared_ptr<SharedSlots>(new SharedSlots(std::move(*socket), std::move(memory), offer.ticket()));
}

SharedSlots::SharedSlots(model::Descriptor socket, model::SharedMapping memory, std::string ticket)
    : socket_(std::move(socket)), memory_(std::move(memory)), ticket_(std::move(ticket)) {}

SharedSlots::Slot::Slot(std::shared_ptr<SharedSlots> slots, size_t first, size_t count, uint64_t bytes)
    : slots_(std::move(slots)), first_(first), count_(count), bytes_(slots_->Pieces(first, bytes)) {}

SharedSlots::Slot::~Slot() { slots_->Return(first_, count_, abandoned_); }

v1::SharedPlace SharedSlots::Slot::place() const {
  v1::SharedPlace place;
  place.set_ticket(slots_->ticket_);
  place.set_offset(first_ * kPieceBytes);
  place.set_bytes(bytes_.size());
  return place;
}

std::shared_ptr<SharedSlots::Slot> SharedSlots::Take(uint64_t bytes) {
  if (bytes < kSliceBytesMin || bytes > kPieces * kPieceBytes) return nullptr;
  const size_t count = (bytes + kPieceBytes - 1) / kPieceBytes;
  absl::MutexLock lock(&mu_);
  if (ended_) return nullptr;
  const auto found = std::search_n(taken_.begin(), taken_.end(), count, false);
  if (found == taken_.end()) return nullptr;
  std::fill_n(found, count, true);
  return std::make_shared<Slot>(shared_from_this(), static_cast<size_t>(found - taken_.begin()), count, bytes);
}

void SharedSlots::Return(size_t first, size_t count, bool abandoned) {
  absl::MutexLock lock(&mu_);
  if (abandoned) {
    abandoned_ += count;
    ended_ = ended_ || abandoned_ > kAbandonedMax;
    return;
  }
  std::fill_n(taken_.begin() + static_cast<std::ptrdiff_t>(first), count, false);
}

void SharedSlots::End() {
  absl::MutexLock lock(&mu_);
  ended_ = true;
}

bool SharedSlots::ended() const {
  absl::MutexLock lock(&mu_);
  return ended_ || model::SocketEnded(socket_.get());
}

}  // namespace ballast::client
