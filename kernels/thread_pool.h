// Threads that share large pieces of work with their callers: all jobs of a server use one pool, and so do benchmarks.
//
// Each thread has a queue of its own. A batch has a home: the queue of its first piece. The other pieces go to the next
// queues, in order. So the same threads get batches with the same home. A thread whose queue is empty takes pieces from
// other queues. A queue serves callers in turn, a piece each. It serves a caller's batches in the order in which they
// began.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/synchronization/mutex.h"

namespace ballast::kernels {

// Threads: any; several callers at a time share the pool's threads.
class ThreadPool {
 public:
  class Caller;
  struct Batch;

  // `threads`: number of threads on one caller's pieces, the caller included. 1 starts no thread.
  explicit ThreadPool(int threads);
  // REQUIRES: no call is under way.
  virtual ~ThreadPool();
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

 protected:
  // Runs on any of the threads. Virtual for a benchmark, which waits instead of computing, so that it can use more
  // threads than the machine has processors.
  virtual void Compute(absl::FunctionRef<void(uint64_t)> piece, uint64_t index) { piece(index); }

 private:
  struct Piece {
    Batch* batch = nullptr;
    uint64_t index = 0;
  };
  // Pieces `next`, `next` + the number of queues, ... of a batch.
  struct Share {
    Batch* batch = nullptr;
    uint64_t next = 0;
  };
  // One caller's shares in a queue, oldest first.
  struct Lane {
    Caller* caller = nullptr;
    std::deque<Share> shares;
  };
  struct alignas(128) Worker {
    absl::Mutex mutex;
    std::deque<Lane> lanes ABSL_GUARDED_BY(mutex);  // the first is served next
    bool called ABSL_GUARDED_BY(mutex) = false;
    std::atomic<bool> asleep = false;
    std::thread thread;
  };

  void Push(Batch* batch);
  // Takes a piece from the worker's queue, of `caller` if there is one.
  std::optional<Piece> TakeFrom(Worker* worker, const Caller* caller);
  // Takes a piece from any queue, beginning with queue `first`.
  std::optional<Piece> Take(uint64_t first, const Caller* caller);
  // Runs one piece and counts its time.
  void Run(absl::FunctionRef<void(uint64_t)> piece, uint64_t index);
  void Run(const Piece& piece);
  void Loop(uint64_t self);
  void Sleep(Worker* self);
  static void Call(Worker* worker);

  std::atomic<int64_t> busy_ns_{0};
  std::atomic<int64_t> queued_{0};  // pieces in all queues
  std::atomic<bool> stopping_{false};
  std::vector<std::unique_ptr<Worker>> workers_;
};

// Pieces 0 ... count - 1 of some work, each to be called once.
struct ThreadPool::Batch {
  // `first_queue`: the queue of piece 0, modulo the number of queues.
  Batch(uint64_t pieces, uint64_t first_queue, std::function<void(uint64_t)> work)
      : piece(std::move(work)), count(pieces), home(first_queue), left(pieces) {}
  const std::function<void(uint64_t)> piece;
  const uint64_t count;
  const uint64_t home;
  Caller* caller = nullptr;
  uint64_t left;  // pieces that have not returned; guarded by the caller's lock
};

// One caller's batches, of which several may be under way. Threads: one.
class ThreadPool::Caller {
 public:
  // Borrows `pool`, which may be null: then the caller's thread alone computes.
  explicit Caller(ThreadPool* pool) : pool_(pool) {}
  // REQUIRES: every batch that was begun is finished.
  ~Caller() = default;
  Caller(const Caller&) = delete;
  Caller& operator=(const Caller&) = delete;

  // From now on the pool's threads compute pieces of the batch, which must stay where it is until it is finished.
  void Begin(Batch* batch);
  // Returns when all pieces of the batch have returned. Meanwhile the caller's thread computes pieces of its batches,
  // the oldest first, and calls `between` after each.
  void Finish(Batch* batch, absl::FunctionRef<void()> between);

 private:
  friend class ThreadPool;
  // Whether there are other threads to share pieces with.
  bool shares() const { return pool_ != nullptr && pool_->threads() > 1; }
  bool IsDone(const Batch& batch);
  void Returned(Batch* batch);

  ThreadPool* const pool_;
  absl::Mutex mutex_;
};

}  // namespace ballast::kernels
