#include "ballast/kernels/thread_pool.h"

#include <chrono>

namespace ballast::kernels {

ThreadPool::ThreadPool(int threads) {
  for (int i = 1; i < threads; ++i) workers_.emplace_back([this] { Loop(); });
}

ThreadPool::~ThreadPool() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
  }
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::RunPiece(absl::FunctionRef<void(uint64_t)> piece, uint64_t index) {
  const auto began = std::chrono::steady_clock::now();
  piece(index);
  busy_ns_.fetch_add(std::chrono::nanoseconds(std::chrono::steady_clock::now() - began).count(),
                     std::memory_order_relaxed);
}

bool ThreadPool::DoPiece(Batch* batch) {
  if (batch->next == batch->count) return false;
  const uint64_t index = batch->next++;
  if (batch->next == batch->count) {
    Batch** place = &open_;
    while (*place != batch) place = &(*place)->behind;
    *place = batch->behind;
  }
  mutex_.Unlock();
  RunPiece(batch->piece, index);
  mutex_.Lock();
  // Whoever sees the last piece done may end the batch's life once the lock is free.
  ++batch->done;
  return true;
}

void ThreadPool::Loop() {
  absl::MutexLock lock(&mutex_);
  const auto something = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return stopping_ || open_ != nullptr; };
  for (;;) {
    mutex_.Await(absl::Condition(&something));
    if (open_ == nullptr) return;
    DoPiece(open_);
  }
}

void ThreadPool::ParallelFor(uint64_t count, absl::FunctionRef<void(uint64_t)> piece,
                             absl::FunctionRef<void()> between) {
  if (workers_.empty() || count <= 1) {
    for (uint64_t i = 0; i < count; ++i) {
      RunPiece(piece, i);
      between();
    }
    return;
  }
  Batch batch{.piece = piece, .count = count};
  absl::MutexLock lock(&mutex_);
  Batch** last = &open_;
  while (*last != nullptr) last = &(*last)->behind;
  *last = &batch;
  while (DoPiece(&batch)) {
    mutex_.Unlock();
    between();
    mutex_.Lock();
  }
  const auto all = [&batch] { return batch.done == batch.count; };
  mutex_.Await(absl::Condition(&all));
}

}  // namespace ballast::kernels
