#include "ballast/tests/cuda_double/kernel_double.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "ballast/kernels/cuda/cuda_kernels.h"
#include "ballast/kernels/kernels.h"
#include "ballast/kernels/optimizer.h"

namespace ballast::cuda_double {
namespace {

using namespace kernels;

template <typename T>
T Argument(void** arguments, int index) {
  return *static_cast<T*>(arguments[index]);
}

template <typename T>
T* At(const Reach& reach, T* device, uint64_t count) {
  return static_cast<T*>(reach(device, count * sizeof(T)));
}

// In optimizer_math.inc's order of rules.
OptimizerSpec SpecOf(int rule) {
  switch (rule) {
    case 0:
      return {.kind = OptimizerKind::kAdamw};
    case 1:
      return {.kind = OptimizerKind::kAdamw, .amsgrad = true};
    case 2:
      return {.kind = OptimizerKind::kAdam};
    case 3:
      return {.kind = OptimizerKind::kAdam, .amsgrad = true};
    case 4:
      return {.kind = OptimizerKind::kSgd};
    case 5:
      return {.kind = OptimizerKind::kSgd, .momentum = true};
    case 6:
      return {.kind = OptimizerKind::kSgd, .momentum = true, .nesterov = true};
    case 7:
      return {.kind = OptimizerKind::kAdagrad};
    case 8:
      return {.kind = OptimizerKind::kLion};
    case 9:
      return {.kind = OptimizerKind::kAdemamix};
    default:
      return {.kind = OptimizerKind::kAdamwScheduleFree};
  }
}

// The template argument that follows `type` in a mangled name.
int TemplateArgument(const std::string& name, const std::string& type) {
  return std::stoi(name.substr(name.find(type + "E") + type.size() + 1));
}

// The arrays of a part in the host's memory.
UpdateSpan Reached(const OptimizerSpec& spec, const UpdateSpan& span, const Reach& reach) {
  UpdateSpan host = span;
  host.gradient = At(reach, span.gradient, span.n * ElementBytes(spec.gradient));
  host.master = At(reach, span.master, span.n);
  host.working = At(reach, span.working, BytesOf(spec.working, span.n));
  for (size_t k = 0; k < static_cast<size_t>(MomentCount(spec)); ++k) {
    host.moments[k].values = At(reach, span.moments[k].values, MomentBytes(spec.moments, span.n));
    const uint64_t scales = MomentScaleBytes(spec.moments, span.n) / sizeof(float);
    if (scales > 0) host.moments[k].scales = At(reach, span.moments[k].scales, scales);
  }
  return host;
}

std::function<void()> UpdateCalled(const std::string& name, void** a, const Reach& reach) {
  OptimizerSpec spec = SpecOf(TemplateArgument(name, "4Rule"));
  spec.moments = static_cast<MomentFormat>(TemplateArgument(name, "12MomentFormat"));
  const auto table = Argument<cuda::UpdateTable>(a, 0);
  spec.gradient = table.gradient, spec.working = table.working;
  // The parts that have blocks, as the kernel finds them.
  std::vector<cuda::UpdatePart> parts;
  for (unsigned k = 0; k < cuda::kUpdatePartsMax; ++k) {
    if (table.ends[k] > (k == 0 ? 0 : table.ends[k - 1])) parts.push_back(table.parts[k]);
  }
  return [=] {
    for (const cuda::UpdatePart& part : parts) {
      Update(spec, part.coefficients, part.key, Reached(spec, part.span, reach));
    }
  };
}

std::function<void()> ConvertCalled(void** a, const Reach& reach) {
  return [=, from = Argument<Dtype>(a, 0), source = Argument<const std::byte*>(a, 1), to = Argument<Dtype>(a, 2),
          target = Argument<std::byte*>(a, 3), n = Argument<uint64_t>(a, 4)] {
    const std::byte* const x = At(reach, source, n * ElementBytes(from));
    std::byte* const y = At(reach, target, n * ElementBytes(to));
    if (from == Dtype::kF32) return FromF32({reinterpret_cast<const float*>(x), n}, to, y);
    ToF32(from, x, {reinterpret_cast<float*>(y), n});
  };
}

std::function<void()> BlocksCalled(bool encodes, void** a, const Reach& reach) {
  return [=, source = Argument<const std::byte*>(a, 0), target = Argument<std::byte*>(a, 1),
          n = Argument<uint64_t>(a, 2)] {
    const uint64_t coded = BytesOf(Dtype::kE4m3Blocks, n), wide = n * sizeof(float);
    const std::byte* const x = At(reach, source, encodes ? wide : coded);
    std::byte* const y = At(reach, target, encodes ? coded : wide);
    if (encodes) return FromF32({reinterpret_cast<const float*>(x), n}, Dtype::kE4m3Blocks, y);
    ToF32(Dtype::kE4m3Blocks, x, {reinterpret_cast<float*>(y), n});
  };
}

std::function<void()> AddCalled(void** a, const Reach& reach) {
  return [=, dtype = Argument<Dtype>(a, 0), addend = Argument<const std::byte*>(a, 1), sum = Argument<std::byte*>(a, 2),
          n = Argument<uint64_t>(a, 3)] {
    auto* const to = reinterpret_cast<float*>(At(reach, sum, n * sizeof(float)));
    AddInto(dtype, At(reach, addend, n * ElementBytes(dtype)), {to, n});
  };
}

std::function<void()> QuantizeCalled(void** a, const Reach& reach) {
  return [=, format = Argument<QuantFormat>(a, 0), dtype = Argument<Dtype>(a, 1), x = Argument<const std::byte*>(a, 2),
          n = Argument<uint64_t>(a, 3), codes = Argument<std::byte*>(a, 4), scales = Argument<float*>(a, 5)] {
    Quantize(format, dtype, At(reach, x, n * ElementBytes(dtype)), n, At(reach, codes, QuantBytes(format, n)),
             At(reach, scales, QuantScales(n)));
  };
}

std::function<void()> DequantizeCalled(void** a, const Reach& reach) {
  return [=, format = Argument<QuantFormat>(a, 0), codes = Argument<const std::byte*>(a, 1),
          scales = Argument<const float*>(a, 2), n = Argument<uint64_t>(a, 3), dtype = Argument<Dtype>(a, 4),
          x = Argument<std::byte*>(a, 5)] {
    Dequantize(format, At(reach, codes, QuantBytes(format, n)), At(reach, scales, QuantScales(n)), n, dtype,
               At(reach, x, n * ElementBytes(dtype)));
  };
}

// The whole norm in the first leaf: the tree adds zeros to it.
std::function<void()> LeafCalled(void** a, const Reach& reach) {
  return [=, dtype = Argument<Dtype>(a, 0), gradient = Argument<const std::byte*>(a, 1), n = Argument<uint64_t>(a, 2),
          leaves = Argument<double*>(a, 3), leaf_count = Argument<uint64_t>(a, 4)] {
    const NormResult norm = SquaredNorm(dtype, At(reach, gradient, n * ElementBytes(dtype)), n);
    double* const to = At(reach, leaves, leaf_count);
    std::fill(to, to + leaf_count, 0.0);
    to[0] = norm.finite ? norm.squared_norm : std::numeric_limits<double>::infinity();
  };
}

std::function<void()> TreeCalled(void** a, const Reach& reach) {
  return [=, leaves = Argument<double*>(a, 0), leaf_count = Argument<uint64_t>(a, 1),
          result = Argument<cuda::DeviceNorm*>(a, 2)] {
    const double total = leaf_count == 0 ? 0 : *At(reach, leaves, leaf_count);
    const bool finite = total != std::numeric_limits<double>::infinity();
    *At(reach, result, 1) = {.squared_norm = finite ? total : 0, .finite = finite ? 1u : 0u};
  };
}

}  // namespace

std::function<void()> KernelCalled(const std::string& name, void** arguments, const Reach& reach) {
  const auto is = [&](const char* kernel) { return name.find(kernel) != std::string::npos; };
  if (is("12UpdateKernel")) return UpdateCalled(name, arguments, reach);
  if (is("13ConvertKernel")) return ConvertCalled(arguments, reach);
  if (is("18EncodeBlocksKernel")) return BlocksCalled(true, arguments, reach);
  if (is("18DecodeBlocksKernel")) return BlocksCalled(false, arguments, reach);
  if (is("9AddKernel")) return AddCalled(arguments, reach);
  if (is("14QuantizeKernel")) return QuantizeCalled(arguments, reach);
  if (is("16DequantizeKernel")) return DequantizeCalled(arguments, reach);
  if (is("10LeafKernel")) return LeafCalled(arguments, reach);
  if (is("10TreeKernel")) return TreeCalled(arguments, reach);
  return nullptr;
}

}  // namespace ballast::cuda_double
