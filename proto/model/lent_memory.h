// A trainer's memory, used by a server in the same process in place of copies.
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
// blocks until the server has finished with the memory: it waits for an update at work. If the step may still be
// decided, the server copies its gradients and values, and will not write lent parameters. In all other cases the
// server forgets that it held the lent slices.
class Loan {
 public:
  virtual ~Loan() = default;
};

}  // namespace ballast::model
