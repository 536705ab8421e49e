#include "ballast/services/job_state/lent_memory.h"

#include <utility>

namespace ballast::services {

LentMemory::LentMemory(model::LoanRequest request, const model::EpochPlan& plan,
                       const kernels::OptimizerSpec& optimizer)
    : request_(std::move(request)),
      gradient_bytes_(kernels::ElementBytes(optimizer.gradient)),
      working_bytes_(kernels::ElementBytes(optimizer.working)) {
  std::vector<uint32_t> gradients, values;
  for (uint32_t tensor = 0; tensor < request_.tensors.size(); ++tensor) {
    begins_.push_back(plan.layout().tensors()[tensor].range.begin);
    if (request_.tensors[tensor].gradient != nullptr) gradients.push_back(tensor);
    if (request_.tensors[tensor].value != nullptr) values.push_back(tensor);
  }
  const auto count = static_cast<uint32_t>(request_.tensors.size());
  gradient_presence_ = model::MakeBitmap(count, gradients);
  value_presence_ = model::MakeBitmap(count, values);
}

const std::byte* LentMemory::Gradient(const model::Chunk& chunk, uint32_t tensor, uint64_t at) const {
  const std::byte* const begin = request_.tensors[tensor].gradient;
  return begin == nullptr ? nullptr : begin + (chunk.range.begin + at - begins_[tensor]) * gradient_bytes_;
}

std::byte* LentMemory::Working(const model::Chunk& chunk, uint32_t tensor, uint64_t at) const {
  std::byte* const begin = request_.tensors[tensor].working;
  return begin == nullptr ? nullptr : begin + (chunk.range.begin + at - begins_[tensor]) * working_bytes_;
}

const std::byte* LentMemory::Value(const model::Chunk& chunk, uint32_t tensor, uint64_t at) const {
  const std::byte* const begin = request_.tensors[tensor].value;
  const uint64_t width = kernels::ElementBytes(value_dtype(tensor));
  return begin == nullptr ? nullptr : begin + (chunk.range.begin + at - begins_[tensor]) * width;
}

std::shared_ptr<void> LentMemory::Use() {
  absl::MutexLock lock(&mutex_);
  ++uses_;
  return {nullptr, [self = shared_from_this()](void*) {
            absl::MutexLock end(&self->mutex_);
            --self->uses_;
          }};
}

void LentMemory::AwaitUnused() {
  absl::MutexLock lock(&mutex_);
  mutex_.Await(absl::Condition(
      +[](int* uses) { return *uses == 0; }, &uses_));
}

}  // namespace ballast::services
