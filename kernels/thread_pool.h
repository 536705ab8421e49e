// Threads that share large pieces of work with whoever asks for it: all jobs of a server, and benchmarks, have one pool.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <list>
#include <mutex>
#include <thread>
#include <vector>

#include "absl/functional/function_ref.h"

namespace ballast::kernels {

// Threads: any, several callers at a time; they share the pool's threads.
class ThreadPool {
 public:
  // `threads`: how many work on one caller's pieces, the caller included. 1 starts none.
  explicit ThreadPool(int threads);
  // REQUIRES: no call is under way.
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const { return static_cast<int>(workers_.size()) + 1; }

  // piece(0) ... piece(count - 1), each once, on the caller's thread and the pool's, in any order; returns when all have
  // returned. A piece should take 50 microseconds or more, and must not call ParallelFor. `between` is called on the
  // caller's thread alone, after each piece that it did.
  void ParallelFor(uint64_t count, absl::FunctionRef<void(uint64_t)> piece, absl::FunctionRef<void()> between);
  void ParallelFor(uint64_t count, absl::FunctionRef<void(uint64_t)> piece) {
    ParallelFor(count, piece, [] {});
  }

 private:
  // One caller's pieces. Lives on the caller's stack until all are done.
  struct Batch {
    absl::FunctionRef<void(uint64_t)> piece;
    uint64_t count;
    uint64_t next = 0;  // not begun by anyone
    uint64_t done = 0;
  };
  // Takes and does a piece of `batch`; false if none is left. `lock` is held before and after.
  bool DoPiece(Batch& batch, std::unique_lock<std::mutex>& lock);
  void Loop();

  std::mutex mutex_;
  std::condition_variable work_, done_;
  std::list<Batch*> open_;  // with pieces that nobody has begun, oldest first
  bool stopping_ = false;
  std::vector<std::thread> workers_;
};

}  // namespace ballast::kernels
