// Memory that a trainer and a server in the same process use in place of copies: the trainer's, or the server's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "ballast/kernels/float_formats.h"
#include "ballast/v1/types.pb.h"

namespace ballast::model {

// A whole tensor's elements, end to end in row-major order.
struct LentTensor {
  const std::byte* gradient = nullptr;  // in the job's gradient dtype; null: not lent in this step
  std::byte* working = nullptr;         // in the job's working dtype; null: not lent
  // New values, in fp32 or in the working dtype (then widened); null: not lent.
  const std::byte* value = nullptr;
  kernels::Dtype value_dtype = kernels::Dtype::kF32;
};

// A loan for one step. `tensors`: an entry per tensor of the job's layout, in its order.
struct LoanRequest {
  std::string job;
  v1::Epoch epoch;
  int64_t step = 0;
  uint64_t attempt = 0;
  std::vector<LentTensor> tensors;
};

// While a loan lives, the server may read lent gradients and values, and write lent working parameters. The destructor
// blocks until the server no longer uses the memory: it waits for an update that runs. If the step may still be
// decided, the server copies its gradients and values, and will not write lent parameters. Otherwise the server drops
// the lent slices.
class Loan {
 public:
  virtual ~Loan() = default;
};

// Gradients that a server reads in the trainer's memory, in place of a copy. All who hold this keep the memory: the
// session until its step is decided, the server until the update has read it, or nobody can decide the step any more.
// The trainer must not write to the memory meanwhile. The server takes a CRC32C when a chunk's gradient comes, before
// its norms, and another once the update has been applied to the chunk, before the chunk's new version is announced. If
// these differ, nobody sees that version of the chunk: the job fails (DATA_LOSS, CHECKSUM), and announces no later
// chunk. Chunks of the step that it announced before were good. A change that is undone before the second CRC32C is not
// found, and may be in the update. Threads: any.
class LentGradients {
 public:
  // `owner` is dropped on any thread, maybe under a job's lock: its destructor must not block.
  explicit LentGradients(std::shared_ptr<const void> owner) : owner_(std::move(owner)) {}

  // The trainer drops what it has not sealed: nobody will read the memory, and `owner` goes at once. No effect after
  // Use.
  void TakeBack() {
    std::shared_ptr<const void> owner;
    absl::MutexLock lock(&mutex_);
    if (!used_) owner.swap(owner_);
  }
  // A decided step is going to read the memory. False after TakeBack.
  bool Use() {
    absl::MutexLock lock(&mutex_);
    used_ = owner_ != nullptr;
    return used_;
  }

 private:
  absl::Mutex mutex_;
  std::shared_ptr<const void> owner_ ABSL_GUARDED_BY(mutex_);
  bool used_ ABSL_GUARDED_BY(mutex_) = false;
};

// Working parameters where the server has them. They neither change nor move until `held` is dropped, on any thread,
// which waits for nobody.
struct LeasedBytes {
  absl::Span<const std::byte> bytes;
  std::shared_ptr<const void> held;  // null: nothing is leased; a pull copies the bytes
};

}  // namespace ballast::model
