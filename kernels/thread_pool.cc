#include "ballast/kernels/thread_pool.h"

namespace ballast::kernels {

ThreadPool::ThreadPool(int threads) {
  for (int i = 1; i < threads; ++i) workers_.emplace_back([this] { Loop(); });
}

ThreadPool::~ThreadPool() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  work_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

bool ThreadPool::DoPiece(Batch& batch, std::unique_lock<std::mutex>& lock) {
  if (batch.next == batch.count) return false;
  const uint64_t index = batch.next++;
  if (batch.next == batch.count) open_.remove(&batch);
  lock.unlock();
  batch.piece(index);
  lock.lock();
  // Under the lock until here: whoever sees the last piece done may end the batch's life.
  if (++batch.done == batch.count) done_.notify_all();
  return true;
}

void ThreadPool::Loop() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    work_.wait(lock, [this] { return stopping_ || !open_.empty(); });
    if (open_.empty()) return;
    DoPiece(*open_.front(), lock);
  }
}

void ThreadPool::ParallelFor(uint64_t count, absl::FunctionRef<void(uint64_t)> piece,
                             absl::FunctionRef<void()> between) {
  if (workers_.empty() || count <= 1) {
    for (uint64_t i = 0; i < count; ++i) {
      piece(i);
      between();
    }
    return;
  }
  Batch batch{.piece = piece, .count = count};
  std::unique_lock<std::mutex> lock(mutex_);
  open_.push_back(&batch);
  work_.notify_all();
  while (DoPiece(batch, lock)) {
    lock.unlock();
    between();
    lock.lock();
  }
  done_.wait(lock, [&batch] { return batch.done == batch.count; });
}

}  // namespace ballast::kernels
