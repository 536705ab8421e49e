#include <cuda_runtime_api.h>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "ballast/kernels/cuda/cuda_kernels.h"
#include "ballast/kernels/cuda/device_processor.h"
#include "ballast/proto/model/status.h"
#include "ballast/storage/tier/hbm_tier.h"
#include "ballast/storage/tier/processor_check.h"

namespace ballast::storage {
namespace {

absl::Status CudaStatus(cudaError_t error, absl::string_view what) {
  if (error == cudaSuccess) return absl::OkStatus();
  return model::Error(absl::StatusCode::kInternal, model::kIo,
                      absl::StrCat("hbm: ", what, ": ", cudaGetErrorString(error)));
}

// Blocks come from the device's memory pool: cudaMalloc rounds each up to 2 MiB. The pool gives the device back what is
// free when the stream is waited for.
class CudaHbmTier : public HbmTier {
 public:
  CudaHbmTier(int device, Ledger* ledger) : device_(device), ledger_(ledger) {}

  ~CudaHbmTier() override {
    (void)cudaSetDevice(device_);
    scratch_ = HbmBlock();
    if (stream_ != nullptr) (void)cudaStreamDestroy(stream_);
  }

  absl::Status Init() {
    absl::MutexLock lock(&mutex_);
    BALLAST_RETURN_IF_ERROR(UseDevice());
    BALLAST_RETURN_IF_ERROR(CudaStatus(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "stream"));
    BALLAST_ASSIGN_OR_RETURN(scratch_, AllocateLocked(kHbmScratchBytes, "scratch memory of the hbm tier"));
    gradient_ = scratch_.data();
    working_ = scratch_.data() + kHbmScratchBytes / 2;
    absl::Status tested;
    const absl::Status checked = CheckProcessor(kernels::cuda::DeviceProcessor(&tested), absl::StrCat("GPU ", device_));
    if (!tested.ok())
      return model::Error(absl::StatusCode::kInternal, model::kIo, absl::StrCat("hbm: ", tested.message()));
    return checked;
  }

  absl::StatusOr<HbmBlock> Allocate(uint64_t bytes, absl::string_view what) override {
    absl::MutexLock lock(&mutex_);
    return AllocateLocked(bytes, what);
  }

  absl::Status CopyIn(absl::Span<const std::byte> host, std::byte* device) override {
    absl::MutexLock lock(&mutex_);
    BALLAST_RETURN_IF_ERROR(UseDevice());
    BALLAST_RETURN_IF_ERROR(CudaStatus(
        cudaMemcpyAsync(device, host.data(), host.size(), cudaMemcpyHostToDevice, stream_), "copy to the GPU"));
    return Finish();
  }

  absl::Status CopyOut(const std::byte* device, absl::Span<std::byte> host) override {
    absl::MutexLock lock(&mutex_);
    BALLAST_RETURN_IF_ERROR(UseDevice());
    BALLAST_RETURN_IF_ERROR(CudaStatus(
        cudaMemcpyAsync(host.data(), device, host.size(), cudaMemcpyDeviceToHost, stream_), "copy from the GPU"));
    return Finish();
  }

  absl::Status Update(const kernels::OptimizerSpec& optimizer, const kernels::Coefficients& coefficients,
                      const kernels::RandomKey& random, const kernels::UpdateSpan& from, HbmWorking working) override {
    absl::MutexLock lock(&mutex_);
    BALLAST_RETURN_IF_ERROR(UseDevice());
    BALLAST_RETURN_IF_ERROR(CheckSpan(from.n));
    BALLAST_RETURN_IF_ERROR(
        CudaStatus(cudaMemcpyAsync(gradient_, from.gradient, from.n * kernels::ElementBytes(optimizer.gradient),
                                   cudaMemcpyHostToDevice, stream_),
                   "gradient to the GPU"));
    kernels::UpdateSpan span = from;
    span.gradient = gradient_;
    span.working = working.device != nullptr ? working.device : working_;
    BALLAST_RETURN_IF_ERROR(kernels::cuda::Update(optimizer, coefficients, random, span, stream_));
    return Deliver(working, from.n * kernels::ElementBytes(optimizer.working));
  }

  absl::Status Round(const float* master, uint64_t elements, kernels::Dtype dtype, HbmWorking working) override {
    absl::MutexLock lock(&mutex_);
    BALLAST_RETURN_IF_ERROR(UseDevice());
    BALLAST_RETURN_IF_ERROR(CheckSpan(elements));
    BALLAST_RETURN_IF_ERROR(kernels::cuda::FromF32(master, dtype, working.device != nullptr ? working.device : working_,
                                                   elements, stream_));
    return Deliver(working, elements * kernels::ElementBytes(dtype));
  }

 private:
  void Free(std::byte* data) override {
    (void)cudaSetDevice(device_);
    (void)cudaFreeAsync(data, stream_);
  }

  // The current device belongs to the thread.
  absl::Status UseDevice() const { return CudaStatus(cudaSetDevice(device_), absl::StrCat("device ", device_)); }

  absl::Status CheckSpan(uint64_t elements) const {
    if (elements <= kHbmSpanElementsMax) return absl::OkStatus();
    return model::Error(absl::StatusCode::kInvalidArgument, model::kBadLength,
                        absl::StrCat("hbm: ", elements, " elements at once, at most ", kHbmSpanElementsMax));
  }

  absl::StatusOr<HbmBlock> AllocateLocked(uint64_t bytes, absl::string_view what)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    BALLAST_ASSIGN_OR_RETURN(BudgetLease lease, ledger_->Lease(TierKind::kHbm, bytes, what));
    BALLAST_RETURN_IF_ERROR(UseDevice());
    void* data = nullptr;
    if (const cudaError_t error = cudaMallocAsync(&data, bytes, stream_); error != cudaSuccess) {
      (void)cudaGetLastError();
      return model::Error(absl::StatusCode::kResourceExhausted, model::kBudget,
                          absl::StrCat("the GPU refused ", bytes, " bytes for ", what, ": ", cudaGetErrorString(error),
                                       "; lower the hbm budget"));
    }
    HbmBlock block(this, static_cast<std::byte*>(data), std::move(lease));
    BALLAST_RETURN_IF_ERROR(CudaStatus(cudaMemsetAsync(data, 0, bytes, stream_), "zeroing"));
    BALLAST_RETURN_IF_ERROR(Finish());
    return block;
  }

  absl::Status Deliver(HbmWorking working, uint64_t bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (working.device == nullptr) {
      BALLAST_RETURN_IF_ERROR(
          CudaStatus(cudaMemcpyAsync(working.host, working_, bytes, cudaMemcpyDeviceToHost, stream_),
                     "working copy from the GPU"));
    }
    return Finish();
  }

  absl::Status Finish() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return CudaStatus(cudaStreamSynchronize(stream_), "stream");
  }

  const int device_;
  Ledger* const ledger_;
  absl::Mutex mutex_;
  cudaStream_t stream_ = nullptr;  // set once
  HbmBlock scratch_;
  std::byte* gradient_ ABSL_GUARDED_BY(mutex_) = nullptr;
  std::byte* working_ ABSL_GUARDED_BY(mutex_) = nullptr;
};

}  // namespace

absl::StatusOr<std::unique_ptr<HbmTier>> OpenHbmTier(int device, Ledger* ledger) {
  int devices = 0;
  const cudaError_t error = cudaGetDeviceCount(&devices);
  if (error != cudaSuccess || device < 0 || device >= devices) {
    return model::Error(
        absl::StatusCode::kInvalidArgument, model::kBadConfig,
        absl::StrCat(
            "an hbm budget of ", ledger->budget().hbm, " bytes was given for GPU ", device, ", but ",
            error != cudaSuccess ? std::string(cudaGetErrorString(error)) : absl::StrCat(devices, " GPUs are here"),
            "; set the hbm budget to 0, or choose a device that is there"));
  }
  auto tier = std::make_unique<CudaHbmTier>(device, ledger);
  BALLAST_RETURN_IF_ERROR(tier->Init());
  return std::unique_ptr<HbmTier>(std::move(tier));
}

}  // namespace ballast::storage
