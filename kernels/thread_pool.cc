#include "ballast/kernels/thread_pool.h"

#include <algorithm>
#include <chrono>
#include <system_error>
#include <utility>

namespace ballast::kernels {

ThreadPool::ThreadPool(int threads) {
  for (int i = 1; i < threads; ++i) workers_.push_back(std::make_unique<Worker>());
  try {
    for (uint64_t i = 0; i < workers_.size(); ++i) workers_[i]->thread = std::thread([this, i] { Loop(i); });
  } catch (const std::system_error&) {
    // The system makes no more. The others, and each caller, take pieces from all queues.
  }
}

ThreadPool::~ThreadPool() {
  stopping_.store(true);
  for (const auto& worker : workers_) Call(worker.get());
  for (const auto& worker : workers_) {
    if (worker->thread.joinable()) worker->thread.join();
  }
}

void ThreadPool::Run(absl::FunctionRef<void(uint64_t)> piece, uint64_t index) {
  const auto began = std::chrono::steady_clock::now();
  Compute(piece, index);
  busy_ns_.fetch_add(std::chrono::nanoseconds(std::chrono::steady_clock::now() - began).count(),
                     std::memory_order_relaxed);
}

void ThreadPool::Run(const Piece& piece) {
  Run(piece.batch->piece, piece.index);
  piece.batch->caller->Returned(piece.batch);
}

void ThreadPool::Call(Worker* worker) {
  absl::MutexLock lock(&worker->mutex);
  worker->called = true;
}

void ThreadPool::Push(Batch* batch) {
  const uint64_t queues = workers_.size(), shares = std::min(batch->count, queues);
  // Counted before the pieces are there, and workers are asked whether they sleep afterwards: a worker that is about to
  // sleep either sees the count or is seen.
  queued_.fetch_add(static_cast<int64_t>(batch->count));
  uint64_t awake = 0;  // pieces for threads that are at work: others may take these
  for (uint64_t i = 0; i < shares; ++i) {
    Worker& worker = *workers_[(batch->home + i) % queues];
    const uint64_t pieces = (batch->count - i + queues - 1) / queues;
    absl::MutexLock lock(&worker.mutex);
    awake += worker.asleep.load() ? pieces - 1 : pieces;
    auto lane = std::find_if(worker.lanes.begin(), worker.lanes.end(),
                             [&](const Lane& other) { return other.caller == batch->caller; });
    if (lane == worker.lanes.end()) lane = worker.lanes.insert(lane, {.caller = batch->caller, .shares = {}});
    lane->shares.push_back({.batch = batch, .next = i});
    worker.called = true;
  }
  for (uint64_t i = shares; i < queues && awake > 0; ++i) {
    Worker& worker = *workers_[(batch->home + i) % queues];
    if (!worker.asleep.load()) continue;
    Call(&worker);
    --awake;
  }
}

std::optional<ThreadPool::Piece> ThreadPool::TakeFrom(Worker* worker, const Caller* caller) {
  absl::MutexLock lock(&worker->mutex);
  auto lane = worker->lanes.begin();
  if (caller != nullptr) {
    lane = std::find_if(lane, worker->lanes.end(), [&](const Lane& other) { return other.caller == caller; });
  }
  if (lane == worker->lanes.end()) return std::nullopt;
  Share& share = lane->shares.front();
  const Piece piece{.batch = share.batch, .index = share.next};
  share.next += workers_.size();
  if (share.next >= piece.batch->count) lane->shares.pop_front();
  if (lane->shares.empty()) {
    worker->lanes.erase(lane);
  } else if (caller == nullptr) {
    std::rotate(lane, lane + 1, worker->lanes.end());
  }
  queued_.fetch_sub(1);
  return piece;
}

std::optional<ThreadPool::Piece> ThreadPool::Take(uint64_t first, const Caller* caller) {
  for (uint64_t i = 0; i < workers_.size() && queued_.load(std::memory_order_relaxed) > 0; ++i) {
    if (auto piece = TakeFrom(workers_[(first + i) % workers_.size()].get(), caller); piece.has_value()) return piece;
  }
  return std::nullopt;
}

void ThreadPool::Sleep(Worker* self) {
  self->asleep.store(true);
  if (queued_.load() == 0) {
    absl::MutexLock lock(&self->mutex);
    self->mutex.Await(absl::Condition(&self->called));
    self->called = false;
  }
  self->asleep.store(false);
}

void ThreadPool::Loop(uint64_t self) {
  while (!stopping_.load(std::memory_order_relaxed)) {
    if (const std::optional<Piece> piece = Take(self, nullptr); piece.has_value()) {
      Run(*piece);
    } else {
      Sleep(workers_[self].get());
    }
  }
}

void ThreadPool::ParallelFor(uint64_t count, absl::FunctionRef<void(uint64_t)> piece,
                             absl::FunctionRef<void()> between) {
  if (workers_.empty() || count <= 1) {
    for (uint64_t i = 0; i < count; ++i) {
      Run(piece, i);
      between();
    }
    return;
  }
  Caller caller(this);
  Batch batch(count, 0, piece);
  caller.Begin(&batch);
  caller.Finish(&batch, between);
}

void ThreadPool::Caller::Begin(Batch* batch) {
  batch->caller = this;
  if (shares()) pool_->Push(batch);
}

void ThreadPool::Caller::Finish(Batch* batch, absl::FunctionRef<void()> between) {
  for (uint64_t i = 0; !shares() && i < batch->count; ++i) {
    pool_ != nullptr ? pool_->Run(batch->piece, i) : batch->piece(i);
    between();
  }
  while (shares() && !IsDone(*batch)) {
    if (const std::optional<Piece> piece = pool_->Take(batch->home, this); piece.has_value()) {
      pool_->Run(*piece);
      between();
    } else {
      absl::MutexLock lock(&mutex_);
      const auto done = [batch] { return batch->left == 0; };
      mutex_.Await(absl::Condition(&done));
    }
  }
}

bool ThreadPool::Caller::IsDone(const Batch& batch) {
  absl::MutexLock lock(&mutex_);
  return batch.left == 0;
}

// Whoever sees the last piece returned may end the batch's life, and the caller's, once the lock is free.
void ThreadPool::Caller::Returned(Batch* batch) {
  absl::MutexLock lock(&mutex_);
  --batch->left;
}

}  // namespace ballast::kernels
