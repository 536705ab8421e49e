// Elements from one dtype to another.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "ballast/kernels/float_formats.h"

namespace ballast::client {

// Copies if the dtypes are equal. Goes by way of `wide` if they differ and neither is fp32. Rounds to nearest even.
void Convert(const std::byte* from, kernels::Dtype from_dtype, std::byte* to, kernels::Dtype to_dtype, uint64_t count,
             std::vector<float>* wide);

}  // namespace ballast::client
