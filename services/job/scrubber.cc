#include "ballast/services/job/scrubber.h"

#include <atomic>
#include <utility>

#include "absl/time/clock.h"
#include "ballast/storage/memory/arena.h"

namespace ballast::services {

struct Scrubber::Piece {
  storage::Arena buffer;
  std::atomic<bool> in_use = false;
};

void Scrubber::Start() {
  if (bytes_per_s_ > 0) AddTurn();
}

void Scrubber::Stop() {
  {
    absl::MutexLock turn(&turn_->mu);  // waits for one under way
    turn_->scrubber = nullptr;
  }
  absl::MutexLock lock(&mu_);
  stopping_ = true;
}

void Scrubber::AddTurn() {
  const double seconds = static_cast<double>(kPieceBytes) / static_cast<double>(bytes_per_s_);
  const absl::Duration pause = std::max(absl::Seconds(seconds), absl::Milliseconds(1));
  deadlines_->Add(absl::Now() + pause, [turn = turn_] {
    absl::MutexLock lock(&turn->mu);
    if (turn->scrubber == nullptr) return;
    turn->scrubber->Next();
    turn->scrubber->AddTurn();
  });
}

std::function<void(absl::Span<std::byte>, std::shared_ptr<void>)> Scrubber::Choose() {
  const Jobs jobs = jobs_();
  auto at = jobs.upper_bound(last_);
  for (size_t i = 0; i < jobs.size(); ++i, ++at) {
    if (at == jobs.end()) at = jobs.begin();
    if (bytes_per_s_ > 0 && absl::Now() - at->second.last_pass < kBetweenPasses) continue;
    last_ = at->first;
    return at->second.read;
  }
  return nullptr;
}

void Scrubber::Next() {
  absl::MutexLock lock(&mu_);
  if (stopping_) return;
  if (piece_ == nullptr) {
    auto piece = std::make_shared<Piece>();
    absl::StatusOr<storage::Arena> buffer = storage::Arena::Map(kPieceBytes);
    if (!buffer.ok()) return;  // memory is short: the next turn tries again
    piece->buffer = *std::move(buffer);
    piece_ = std::move(piece);
  }
  if (piece_->in_use.exchange(true)) return;
  // Given back once the worker has read, or has ended without.
  const std::shared_ptr<void> lease(nullptr, [piece = piece_](void*) { piece->in_use = false; });
  if (const auto read = Choose(); read != nullptr) read(piece_->buffer.bytes(), lease);
}

}  // namespace ballast::services
