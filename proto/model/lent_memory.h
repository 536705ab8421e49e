// Memory of a trainer's that a server in its process uses in place of copies.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "ballast/kernels/float_formats.h"
#include "ballast/v1/types.pb.h"

namespace ballast::model {

// A whole tensor's elements, end to end in row-major order.
struct LentTensor {
  const std::byte* gradient = nullptr;  // in the job's gradient dtype; null: not lent in this step
  std::byte* working = nullptr;         // in the job's working dtype; null: not lent
  // New values, in fp32, or in the working dtype, which they are widened from; null: none are lent.
  const std::byte* value = nullptr;
  kernels::Dtype value_dtype = kernels::Dtype::kF32;
};

// For one step. `tensors`: an entry per tensor of the job's layout, in its order.
struct LoanRequest {
  std::string job;
  v1::Epoch epoch;
  int64_t step = 0;
  uint64_t attempt = 0;
  std::vector<LentTensor> tensors;
};

// While it lives the server may read lent gradients and values, and write lent working parameters. Its end blocks until
// nothing touches them any more: an update at work is waited for; a step that may still be decided gets copies of its
// gradients and values and writes no lent parameters; of any other step they are not held any more.
class Loan {
 public:
  virtual ~Loan() = default;
};

}  // namespace ballast::model
