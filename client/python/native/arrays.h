// Tensors as Python passes them: by DLPack, borrowed for one call.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "ballast/client/tensors.h"
#include "ballast/kernels/kernels.h"

namespace ballast::python {

using Array = nanobind::ndarray<nanobind::c_contig, nanobind::device::cpu>;
using F32Array = nanobind::ndarray<float, nanobind::c_contig, nanobind::device::cpu>;
// None for a tensor that has none.
using MaybeArrays = std::vector<std::optional<Array>>;

// Throws TypeError unless float32, bfloat16 or float16.
kernels::Dtype DtypeOf(const nanobind::dlpack::dtype& dtype);

// Elements of each parameter, by its gradient where the parameter lives on the servers alone; none where neither is
// here.
std::vector<std::optional<uint64_t>> ElementsOf(const MaybeArrays& gradients, const MaybeArrays& parameters);
// Memory of tensors in the session's order. `gradients`: None for a tensor without a gradient; may be empty. Throws
// ValueError where their numbers or sizes differ.
std::vector<client::TensorMemory> MemoryOf(const MaybeArrays& gradients, const MaybeArrays& parameters);

}  // namespace ballast::python
