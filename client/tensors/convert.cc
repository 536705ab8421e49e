#include "ballast/client/tensors/convert.h"

#include <cstring>

#include "absl/types/span.h"
#include "ballast/kernels/kernels.h"

namespace ballast::client {

void Convert(const std::byte* from, kernels::Dtype from_dtype, std::byte* to, kernels::Dtype to_dtype, uint64_t count,
             std::vector<float>* wide) {
  using kernels::Dtype;
  if (from_dtype == to_dtype) {
    std::memcpy(to, from, count * kernels::ElementBytes(to_dtype));
  } else if (to_dtype == Dtype::kF32) {
    kernels::ToF32(from_dtype, from, absl::MakeSpan(reinterpret_cast<float*>(to), count));
  } else if (from_dtype == Dtype::kF32) {
    kernels::FromF32(absl::MakeConstSpan(reinterpret_cast<const float*>(from), count), to_dtype, to);
  } else {
    wide->resize(count);
    kernels::ToF32(from_dtype, from, absl::MakeSpan(*wide));
    kernels::FromF32(*wide, to_dtype, to);
  }
}

}  // namespace ballast::client
