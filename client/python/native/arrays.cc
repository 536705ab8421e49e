#include "ballast/client/python/native/arrays.h"

namespace ballast::python {

namespace nb = nanobind;

kernels::Dtype DtypeOf(const nb::dlpack::dtype& dtype) {
  if (dtype == nb::dtype<float>()) return kernels::Dtype::kF32;
  constexpr auto kFloat = static_cast<uint8_t>(nb::dlpack::dtype_code::Float);
  constexpr auto kBfloat = static_cast<uint8_t>(nb::dlpack::dtype_code::Bfloat);
  if (dtype.lanes == 1 && dtype.bits == 16 && dtype.code == kBfloat) return kernels::Dtype::kBf16;
  if (dtype.lanes == 1 && dtype.bits == 16 && dtype.code == kFloat) return kernels::Dtype::kF16;
  throw nb::type_error("a tensor has another dtype than float32, bfloat16 or float16");
}

std::vector<std::optional<uint64_t>> ElementsOf(const MaybeArrays& gradients, const MaybeArrays& parameters) {
  std::vector<std::optional<uint64_t>> elements(parameters.size());
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (parameters[i].has_value()) {
      elements[i] = parameters[i]->size();
    } else if (i < gradients.size() && gradients[i].has_value()) {
      elements[i] = gradients[i]->size();
    }
  }
  return elements;
}

std::vector<client::TensorMemory> MemoryOf(const MaybeArrays& gradients, const MaybeArrays& parameters) {
  if (!gradients.empty() && gradients.size() != parameters.size())
    throw nb::value_error("gradients: an entry per parameter");
  const std::vector<std::optional<uint64_t>> elements = ElementsOf(gradients, parameters);
  std::vector<client::TensorMemory> memory(parameters.size());
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (parameters[i].has_value()) {
      memory[i].parameter = static_cast<std::byte*>(parameters[i]->data());
      memory[i].parameter_dtype = DtypeOf(parameters[i]->dtype());
    }
    if (gradients.empty() || !gradients[i].has_value()) continue;
    if (gradients[i]->size() != *elements[i]) throw nb::value_error("a gradient has another size than its parameter");
    memory[i].gradient = static_cast<const std::byte*>(gradients[i]->data());
    memory[i].gradient_dtype = DtypeOf(gradients[i]->dtype());
  }
  return memory;
}

}  // namespace ballast::python
