#include "ballast/services/job_state/leases.h"

#include <utility>

#include "absl/time/clock.h"
#include "ballast/services/job_state/held_chunk.h"

namespace ballast::services {
namespace {

// How often a wait asks whether it is to go on.
constexpr absl::Duration kAskEvery = absl::Milliseconds(100);

}  // namespace

struct Leases::Lease {
  ~Lease() { of_job->End(&chunk->leases); }
  const std::shared_ptr<Leases> of_job;
  const std::shared_ptr<HeldChunk> chunk;
  const std::shared_ptr<const void> memory;
};

std::shared_ptr<const void> Leases::Take(std::shared_ptr<HeldChunk> chunk, std::shared_ptr<const void> memory) {
  ChunkLeases& leases = chunk->leases;
  // Counted before it asks: whoever shuts leases out counts afterwards.
  ++held_;
  if (leases.held_++ == 0) leases.since_ = absl::ToUnixNanos(absl::Now());
  std::shared_ptr<const void> lease(new Lease{shared_from_this(), std::move(chunk), std::move(memory)});
  return shut_ > 0 ? nullptr : lease;
}

std::shared_ptr<void> Leases::ShutOut() {
  ++shut_;
  return {nullptr, [self = shared_from_this()](void*) { --self->shut_; }};
}

void Leases::End(ChunkLeases* chunk) {
  --chunk->held_;
  const bool last = --held_ == 0;
  if (awaited_ == 0) return;
  std::function<void()> then;
  {
    absl::MutexLock lock(&mu_);  // as it ends, conditions are evaluated
    if (last && then_ != nullptr) {
      then = std::exchange(then_, nullptr);
      --awaited_;
    }
  }
  if (then) then();
}

absl::Status Leases::Await(absl::FunctionRef<bool()> ready, absl::FunctionRef<absl::Status()> interrupt) {
  const auto met = [&] { return ready(); };
  ++awaited_;
  absl::Status status;
  for (bool done = false; !done && status.ok();) {
    {
      absl::MutexLock lock(&mu_);
      done = mu_.AwaitWithTimeout(absl::Condition(&met), kAskEvery);
    }
    if (!done) status = interrupt();
  }
  --awaited_;
  return status;
}

bool Leases::OnceNone(std::function<void()> then) {
  absl::MutexLock lock(&mu_);
  if (then_ == nullptr) ++awaited_;
  then_ = std::move(then);
  if (held_ > 0) return true;
  then_ = nullptr;
  --awaited_;
  return false;
}

}  // namespace ballast::services
