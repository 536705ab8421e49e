#include "ballast/storage/io/thread_queue.h"

#include "ballast/proto/base/status.h"
#include "ballast/proto/base/threads.h"

namespace ballast::storage {

ThreadQueue::ThreadQueue(uint32_t threads) {
  for (uint32_t i = 0; i < threads && made_.ok(); ++i) {
    absl::StatusOr<std::thread> thread = model::MakeThread([this] { Work(); });
    if (thread.ok()) {
      threads_.push_back(*std::move(thread));
    } else if (threads_.empty()) {
      made_ = thread.status();  // else fewer do
    }
  }
}

ThreadQueue::~ThreadQueue() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
  }
  for (std::thread& thread : threads_) thread.join();
}

absl::Status ThreadQueue::Submit(const IoRequest& request) {
  BALLAST_RETURN_IF_ERROR(made_);
  absl::MutexLock lock(&mutex_);
  return table_.Add(request);
}

void ThreadQueue::Reap(bool wait, std::vector<IoCompletion>* completions) {
  absl::MutexLock lock(&mutex_);
  if (wait) mutex_.Await(absl::Condition(this, &ThreadQueue::HasNews));
  table_.Take(completions);
}

uint64_t ThreadQueue::in_flight() const {
  absl::MutexLock lock(&mutex_);
  return table_.in_flight();
}

void ThreadQueue::Work() {
  absl::MutexLock lock(&mutex_);
  while (true) {
    mutex_.Await(absl::Condition(this, &ThreadQueue::HasWork));
    Piece piece;
    // Buffers are borrowed until completion, so submitted requests are finished even when stopping.
    if (!table_.Cut(&piece)) return;
    mutex_.Unlock();
    const absl::Status status = TransferPart(piece);
    mutex_.Lock();
    table_.End(piece, status);
  }
}

}  // namespace ballast::storage
