#include <cuda_runtime_api.h>

#include "absl/strings/str_cat.h"
#include "ballast/proto/model/status.h"
#include "ballast/storage/io/pinning.h"

namespace ballast::storage {

absl::Status PinMemory(absl::Span<std::byte> bytes) {
  int devices = 0;
  if (const cudaError_t error = cudaGetDeviceCount(&devices); error != cudaSuccess || devices == 0) {
    return model::Error(absl::StatusCode::kUnavailable, model::kUnsupported,
                        absl::StrCat("no GPU to pin memory for: ", cudaGetErrorString(error)));
  }
  const cudaError_t error = cudaHostRegister(bytes.data(), bytes.size(), cudaHostRegisterPortable);
  if (error == cudaSuccess) return absl::OkStatus();
  return model::Error(absl::StatusCode::kResourceExhausted, model::kBudget,
                      absl::StrCat("cudaHostRegister of ", bytes.size(), " bytes: ", cudaGetErrorString(error)));
}

void UnpinMemory(absl::Span<std::byte> bytes) { (void)cudaHostUnregister(bytes.data()); }

}  // namespace ballast::storage
