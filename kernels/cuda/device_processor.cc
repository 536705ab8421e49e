#include "ballast/kernels/cuda/device_processor.h"

#include <cuda_runtime_api.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "ballast/kernels/cuda/cuda_kernels.h"
#include "ballast/kernels/cuda/outcome.h"

namespace ballast::kernels::cuda {
namespace {

// Device copies of host arrays during one call; the first error ends the call's work.
class Call {
 public:
  explicit Call(absl::Status* status) : status_(status) {}
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;
  ~Call() {
    for (const Array& array : arrays_) (void)Outcome(cudaFree(array.device));
  }

  // Null after an error, and for no bytes.
  void* In(const void* host, uint64_t bytes) {
    void* device = nullptr;
    if (!status_->ok() || bytes == 0) return nullptr;
    Note(cudaMalloc(&device, bytes), "memory for the self-test");
    if (device == nullptr) return nullptr;
    arrays_.push_back({device, nullptr, bytes});
    Note(cudaMemcpy(device, host, bytes, cudaMemcpyHostToDevice), "copy to the GPU");
    return device;
  }
  // As In, and copied back by Finish.
  void* InOut(void* host, uint64_t bytes) {
    void* const device = In(host, bytes);
    if (device != nullptr) arrays_.back().host = host;
    return device;
  }
  bool ok() const { return status_->ok(); }
  void Finish(const absl::Status& launched) {
    if (!launched.ok()) *status_ = launched;
    if (!ok()) return;
    Note(cudaDeviceSynchronize(), "self-test");
    for (const Array& array : arrays_) {
      if (!ok() || array.host == nullptr) continue;
      Note(cudaMemcpy(array.host, array.device, array.bytes, cudaMemcpyDeviceToHost), "copy from the GPU");
    }
  }

 private:
  struct Array {
    void* device;
    void* host;
    uint64_t bytes;
  };
  void Note(cudaError_t error, const char* what) {
    if (Outcome(error) != cudaSuccess)
      *status_ = absl::InternalError(absl::StrCat(what, ": ", cudaGetErrorString(error)));
  }
  absl::Status* status_;
  std::vector<Array> arrays_;
};

// Elements [begin, end) of an update. `begin`: a multiple of kMomentBlock.
UpdatePart PartOf(const OptimizerSpec& spec, const UpdatePart& whole, uint64_t begin, uint64_t end) {
  UpdatePart part = whole;
  part.key.first_element += begin;
  part.span.n = end - begin;
  part.span.gradient += begin * ElementBytes(spec.gradient);
  part.span.master += begin;
  part.span.working += BytesOf(spec.working, begin);
  for (size_t k = 0; k < static_cast<size_t>(MomentCount(spec)); ++k) {
    part.span.moments[k].values += MomentBytes(spec.moments, begin);
    if (MomentScaleBytes(spec.moments, begin) > 0) part.span.moments[k].scales += begin / kMomentBlock;
  }
  return part;
}

// In two parts, so that the kernel's search for the part of a block is tested too.
absl::Status UpdateInParts(const OptimizerSpec& spec, const UpdatePart& whole) {
  const uint64_t cut = whole.span.n / 2 / kMomentBlock * kMomentBlock;
  const UpdatePart parts[] = {PartOf(spec, whole, 0, cut), PartOf(spec, whole, cut, whole.span.n)};
  return Update(spec, parts, nullptr).status();
}

}  // namespace

Processor DeviceProcessor(absl::Status* status) {
  Processor processor;
  processor.update = [status](const OptimizerSpec& spec, const Coefficients& c, const RandomKey& key,
                              const UpdateSpan& host) {
    Call call(status);
    auto* gradient = const_cast<std::byte*>(host.gradient);
    UpdateSpan span{.n = host.n,
                    .gradient = static_cast<std::byte*>(call.In(gradient, host.n * ElementBytes(spec.gradient))),
                    .master = static_cast<float*>(call.InOut(host.master, host.n * sizeof(float))),
                    .moments = {},
                    .working = static_cast<std::byte*>(call.InOut(host.working, BytesOf(spec.working, host.n)))};
    for (size_t k = 0; k < static_cast<size_t>(MomentCount(spec)); ++k) {
      const MomentSpan& from = host.moments[k];
      span.moments[k].values = static_cast<std::byte*>(call.InOut(from.values, MomentBytes(spec.moments, host.n)));
      span.moments[k].scales = static_cast<float*>(call.InOut(from.scales, MomentScaleBytes(spec.moments, host.n)));
    }
    if (call.ok()) call.Finish(UpdateInParts(spec, {.coefficients = c, .key = key, .span = span}));
  };
  processor.squared_norm = [status](Dtype dtype, const std::byte* x, uint64_t n) {
    Call call(status);
    const std::vector<std::byte> leaves(NormScratchBytes(n));
    DeviceNorm norm = {};
    const auto* gradient = static_cast<const std::byte*>(call.In(x, n * ElementBytes(dtype)));
    auto* scratch = static_cast<double*>(call.In(leaves.data(), leaves.size()));
    auto* result = static_cast<DeviceNorm*>(call.InOut(&norm, sizeof(norm)));
    if (call.ok()) call.Finish(SquaredNorm(dtype, gradient, n, scratch, result, nullptr));
    return NormResult{.squared_norm = norm.squared_norm, .finite = norm.finite != 0};
  };
  processor.from_f32 = [status](absl::Span<const float> from, Dtype dtype, std::byte* to) {
    Call call(status);
    const auto* source = static_cast<const float*>(call.In(from.data(), from.size() * sizeof(float)));
    auto* target = static_cast<std::byte*>(call.InOut(to, BytesOf(dtype, from.size())));
    if (call.ok()) call.Finish(FromF32(source, dtype, target, from.size(), nullptr));
  };
  processor.to_f32 = [status](Dtype dtype, const std::byte* from, absl::Span<float> to) {
    Call call(status);
    const auto* source = static_cast<const std::byte*>(call.In(from, BytesOf(dtype, to.size())));
    auto* target = static_cast<float*>(call.InOut(to.data(), to.size() * sizeof(float)));
    if (call.ok()) call.Finish(ToF32(dtype, source, target, to.size(), nullptr));
  };
  processor.add_into = [status](Dtype dtype, const std::byte* addend, absl::Span<float> sum) {
    Call call(status);
    const auto* source = static_cast<const std::byte*>(call.In(addend, sum.size() * ElementBytes(dtype)));
    auto* target = static_cast<float*>(call.InOut(sum.data(), sum.size() * sizeof(float)));
    if (call.ok()) call.Finish(AddInto(dtype, source, target, sum.size(), nullptr));
  };
  processor.quantize = [status](QuantFormat format, Dtype dtype, const std::byte* x, uint64_t n, std::byte* quantized,
                                float* scales) {
    Call call(status);
    const auto* source = static_cast<const std::byte*>(call.In(x, n * ElementBytes(dtype)));
    auto* codes = static_cast<std::byte*>(call.InOut(quantized, QuantBytes(format, n)));
    auto* device_scales = static_cast<float*>(call.InOut(scales, QuantScales(n) * sizeof(float)));
    if (call.ok()) call.Finish(Quantize(format, dtype, source, n, codes, device_scales, nullptr));
  };
  processor.dequantize = [status](QuantFormat format, const std::byte* quantized, const float* scales, uint64_t n,
                                  Dtype dtype, std::byte* x) {
    Call call(status);
    const auto* codes = static_cast<const std::byte*>(call.In(quantized, QuantBytes(format, n)));
    const auto* device_scales = static_cast<const float*>(call.In(scales, QuantScales(n) * sizeof(float)));
    auto* target = static_cast<std::byte*>(call.InOut(x, n * ElementBytes(dtype)));
    if (call.ok()) call.Finish(Dequantize(format, codes, device_scales, n, dtype, target, nullptr));
  };
  return processor;
}

}  // namespace ballast::kernels::cuda
