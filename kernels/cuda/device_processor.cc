#include "ballast/kernels/cuda/device_processor.h"

#include <cuda_runtime_api.h>

#include "absl/strings/str_cat.h"
#include "ballast/kernels/cuda/cuda_kernels.h"

namespace ballast::kernels::cuda {
namespace {

// Device copies of host arrays during one call; the first error ends the call's work.
class Call {
 public:
  explicit Call(absl::Status* status) : status_(status) {}
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;
  ~Call() {
    for (const Array& array : arrays_) cudaFree(array.device);
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
    if (error != cudaSuccess) *status_ = absl::InternalError(absl::StrCat(what, ": ", cudaGetErrorString(error)));
  }
  absl::Status* status_;
  std::vector<Array> arrays_;
};

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
                    .working = static_cast<std::byte*>(call.InOut(host.working, host.n * ElementBytes(spec.working)))};
    for (size_t k = 0; k < static_cast<size_t>(MomentCount(spec)); ++k) {
      const MomentSpan& from = host.moments[k];
      span.moments[k].values = static_cast<std::byte*>(call.InOut(from.values, MomentBytes(spec.moments, host.n)));
      span.moments[k].scales = static_cast<float*>(call.InOut(from.scales, MomentScaleBytes(spec.moments, host.n)));
    }
    if (call.ok()) call.Finish(Update(spec, c, key, span, nullptr));
  };
  processor.norm_dtypes = {Dtype::kBf16};
  processor.squared_norm = [status](Dtype dtype, const std::byte* x, uint64_t n) {
    Call call(status);
    const std::vector<double> leaves((n + 255) / 256);
    DeviceNorm norm = {};
    const auto* gradient = static_cast<const bf16*>(call.In(x, n * sizeof(bf16)));
    auto* scratch = static_cast<double*>(call.In(leaves.data(), leaves.size() * sizeof(double)));
    auto* result = static_cast<DeviceNorm*>(call.InOut(&norm, sizeof(norm)));
    if (call.ok()) call.Finish(SquaredNorm(gradient, n, scratch, result, nullptr));
    return NormResult{.squared_norm = norm.squared_norm, .finite = norm.finite != 0};
  };
  processor.from_f32_dtypes = {Dtype::kBf16};
  processor.from_f32 = [status](absl::Span<const float> from, Dtype dtype, std::byte* to) {
    Call call(status);
    const auto* source = static_cast<const float*>(call.In(from.data(), from.size() * sizeof(float)));
    auto* target = static_cast<bf16*>(call.InOut(to, from.size() * sizeof(bf16)));
    if (call.ok()) call.Finish(Bf16FromF32(source, target, from.size(), nullptr));
  };
  return processor;
}

}  // namespace ballast::kernels::cuda
