#include "ballast/client/transport/sharing.h"

#include <sys/socket.h>

#include <utility>

#include "absl/time/clock.h"

namespace ballast::client {
namespace {

// The server was down, or busy, or has lost the memory.
constexpr absl::Duration kPause = absl::Seconds(1);
// The server is on another host, or has no room.
constexpr absl::Duration kRefusedPause = absl::Seconds(30);

}  // namespace

std::shared_ptr<SharedSlots> Sharing::Living() {
  if (slots_ != nullptr && slots_->ended()) slots_ = nullptr;
  return slots_;
}

std::shared_ptr<SharedSlots> Sharing::slots() {
  absl::MutexLock lock(&mu_);
  return Living();
}

bool Sharing::Begin(bool at_once) {
  absl::MutexLock lock(&mu_);
  if (Living() != nullptr || under_way_ || (!at_once && absl::Now() < again_)) return false;
  cancelled_ = false;
  under_way_ = true;
  return true;
}

void Sharing::Watch(int socket) {
  absl::MutexLock lock(&mu_);
  socket_ = socket;
  if (cancelled_) shutdown(socket_, SHUT_RDWR);
}

void Sharing::End(absl::StatusOr<std::shared_ptr<SharedSlots>> shared) {
  absl::MutexLock lock(&mu_);
  again_ = absl::Now() + (shared.ok() || absl::IsUnavailable(shared.status()) ? kPause : kRefusedPause);
  if (shared.ok()) slots_ = *std::move(shared);
  socket_ = -1;
  under_way_ = false;
}

void Sharing::Cancel() {
  absl::MutexLock lock(&mu_);
  cancelled_ = true;
  if (socket_ >= 0) shutdown(socket_, SHUT_RDWR);
}

}  // namespace ballast::client
