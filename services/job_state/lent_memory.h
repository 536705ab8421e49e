// Memory that a trainer in this process lends to one step of a job. The server reads gradients and values there, and
// writes working parameters there. Class Job uses it in job/loans.cc.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "ballast/kernels/optimizer.h"
#include "ballast/proto/base/lent_memory.h"
#include "ballast/proto/model/epoch_plan.h"

namespace ballast::services {

// Threads: any, except for members marked as guarded by the job's lock.
class LentMemory : public std::enable_shared_from_this<LentMemory> {
 public:
  // REQUIRES: `request` has an entry for each tensor of the plan's layout.
  LentMemory(model::LoanRequest request, const model::EpochPlan& plan, const kernels::OptimizerSpec& optimizer);

  const model::LoanRequest& request() const { return request_; }
  // Tensors whose gradients / values are lent.
  const std::string& presence(v1::SliceKind kind) const {
    return kind == v1::SLICE_KIND_VALUE ? value_presence_ : gradient_presence_;
  }

  // The trainer's memory for element `at` of the chunk, in a segment of `tensor`; null if not lent.
  const std::byte* Gradient(const model::Chunk& chunk, uint32_t tensor, uint64_t at) const;
  std::byte* Working(const model::Chunk& chunk, uint32_t tensor, uint64_t at) const;
  const std::byte* Value(const model::Chunk& chunk, uint32_t tensor, uint64_t at) const;
  kernels::Dtype value_dtype(uint32_t tensor) const { return request_.tensors[tensor].value_dtype; }

  // Returns a token. While any token lives, updates may read or write the trainer's memory; AwaitUnused() waits for all
  // of them.
  std::shared_ptr<void> Use();
  void AwaitUnused();

  // Guarded by the job's lock. The step is decided, and its updates use the memory if they need it.
  bool applied = false;

 private:
  const model::LoanRequest request_;
  const uint64_t gradient_bytes_, working_bytes_;  // an element
  std::vector<uint64_t> begins_;                   // by tensor: its first element in its unit
  std::string gradient_presence_, value_presence_;
  absl::Mutex mutex_;
  int uses_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace ballast::services
