// Threads that share large pieces of work with their callers: all jobs of a server use one pool, and so do benchmarks.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/synchronization/mutex.h"

namespace ballast::kernels {

// Threads: any; several callers at a time share the pool's threads.
class ThreadPool {
 public:
  // `threads`: number of threads on one caller's pieces, the caller included. 1 starts no thread.
  explicit ThreadPool(int threads);
  // REQUIRES: no call is under way.
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  // Seconds that all threads together, callers included, have spent in pieces.
  double busy_seconds() const { return 1e-9 * static_cast<double>(busy_ns_.load(std::memory_order_relaxed)); }
  int threads() const { return static_cast<int>(workers_.size()) + 1; }

  // Runs piece(0) ... piece(count - 1), each once, on the caller's thread and the pool's, in any order; returns when
  // all have returned. A piece should take 50 microseconds or more, and must not call ParallelFor. `between` is called
  // on the caller's thread alone, after each of the caller's own pieces.
  void ParallelFor(uint64_t count, absl::FunctionRef<void(uint64_t)> piece, absl::FunctionRef<void()> between);
  void ParallelFor(uint64_t count, absl::FunctionRef<void(uint64_t)> piece) {
    ParallelFor(count, piece, [] {});
  }

 private:
  // One caller's pieces. Lives on the caller's stack until all are done; its counts are guarded by the pool's lock.
  struct Batch {
    absl::FunctionRef<void(uint64_t)> piece;
    uint64_t count;
    uint64_t next = 0;  // the next piece to begin
    uint64_t done = 0;
    Batch* behind = nullptr;  // in open_
  };
  // Runs one piece and counts its time.
  void RunPiece(absl::FunctionRef<void(uint64_t)> piece, uint64_t index);
  // Takes a piece of `batch` and runs it without the lock; false if no piece is left.
  bool DoPiece(Batch* batch) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Loop();

  std::atomic<int64_t> busy_ns_{0};
  absl::Mutex mutex_;
  Batch* open_ ABSL_GUARDED_BY(mutex_) = nullptr;  // batches with pieces not yet begun, oldest first
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::thread> workers_;
};

}  // namespace ballast::kernels
