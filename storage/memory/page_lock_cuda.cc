#include <cuda_runtime_api.h>

#include "absl/strings/str_cat.h"
#include "ballast/kernels/cuda/outcome.h"
#include "ballast/proto/base/status.h"
#include "ballast/storage/memory/page_lock.h"

namespace ballast::storage {

using kernels::cuda::Outcome;

absl::Status PageLock(absl::Span<std::byte> bytes, int device) {
  if (const cudaError_t error = Outcome(cudaSetDevice(device)); error != cudaSuccess) {
    return model::Error(absl::StatusCode::kUnavailable, model::kUnsupported,
                        absl::StrCat("no GPU ", device, " to page-lock memory for: ", cudaGetErrorString(error)));
  }
  const cudaError_t error = Outcome(cudaHostRegister(bytes.data(), bytes.size(), cudaHostRegisterPortable));
  if (error == cudaSuccess) return absl::OkStatus();
  return model::Error(absl::StatusCode::kResourceExhausted, model::kBudget,
                      absl::StrCat("cudaHostRegister of ", bytes.size(), " bytes: ", cudaGetErrorString(error)));
}

void PageUnlock(absl::Span<std::byte> bytes, int device) {
  if (Outcome(cudaSetDevice(device)) == cudaSuccess) (void)Outcome(cudaHostUnregister(bytes.data()));
}

}  // namespace ballast::storage
