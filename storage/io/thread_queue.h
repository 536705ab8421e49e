// The queue for systems without io_uring: a few threads that call pread and pwrite.
#pragma once

#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "ballast/storage/io/io_queue.h"
#include "ballast/storage/io/piece.h"

namespace ballast::storage {

class ThreadQueue : public IoQueue {
 public:
  explicit ThreadQueue(uint32_t threads);
  ~ThreadQueue() override;
  absl::Status Submit(const IoRequest& request) override;
  void Reap(bool wait, std::vector<IoCompletion>* completions) override;
  uint64_t in_flight() const override;
  const char* name() const override { return "threads"; }

 private:
  void Work();
  bool HasWork() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return stopping_ || table_.uncut(); }
  bool HasNews() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return table_.finished() || table_.in_flight() == 0; }

  mutable absl::Mutex mutex_;
  RequestTable table_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status made_;  // no thread could be made: the answer to each request
  std::vector<std::thread> threads_;
};

}  // namespace ballast::storage
