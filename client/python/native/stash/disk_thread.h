// A thread that owns an IoQueue, so that any thread may hand transfers over: an IoQueue belongs to one thread.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "ballast/storage/io/disk.h"

namespace ballast::stash {

// Threads: any. No call waits for the disk, except Start and the destructor.
// Bounds: kIoRequestsMax transfers are with the disk; the caller's buffers bound the number that waits.
class DiskThread {
 public:
  // Called on the disk's thread, without a lock, once for each transfer handed over and not withdrawn.
  using Done = std::function<void(const storage::IoCompletion& completion)>;
  // `registered`: memory that most buffers come from. Errors: Disk::MakeQueue's.
  static absl::StatusOr<std::unique_ptr<DiskThread>> Start(storage::Disk* disk, absl::Span<std::byte> registered,
                                                           Done done);
  // Performs all transfers handed over.
  ~DiskThread();
  DiskThread(const DiskThread&) = delete;
  DiskThread& operator=(const DiskThread&) = delete;

  // Borrows file and buffer until `done` was called. kFirst: before the transfers that wait.
  enum class Turn { kFirst, kLast };
  void Hand(const storage::IoRequest& request, Turn turn);
  // True: the transfer with this tag was still waiting, will not be performed, and `done` is not called for it.
  bool Withdraw(uint64_t tag);

 private:
  explicit DiskThread(Done done) : done_(std::move(done)) {}
  void Run(storage::IoQueue* queue);
  // Waits for transfers if none is with the disk. False: the thread is to end.
  bool Next(uint64_t in_flight, std::vector<storage::IoRequest>* requests);
  bool HasNews() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return stopping_ || !waiting_.empty(); }

  const Done done_;
  absl::Mutex mutex_;
  std::deque<storage::IoRequest> waiting_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace ballast::stash
