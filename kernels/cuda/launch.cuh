// Launches kernels. Included by .cu files alone.
#pragma once

#include <cstddef>
#include <type_traits>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "ballast/kernels/cuda/outcome.h"

namespace ballast::kernels::cuda {

// Enqueues `kernel` on `stream`. The status is this launch's own: kernel<<<...>>>() returns nothing, and the thread's
// last error may be another call's. `name` is for the message.
template <typename... Parameters>
absl::Status Launch(const char* name, void (*kernel)(Parameters...), unsigned blocks, unsigned threads,
                    CUstream_st* stream, std::type_identity_t<Parameters>... arguments) {
  void* addresses[] = {&arguments...};
  const cudaError_t error = Outcome(
      cudaLaunchKernel(reinterpret_cast<const void*>(kernel), dim3(blocks), dim3(threads), addresses, 0, stream));
  if (error == cudaSuccess) return absl::OkStatus();
  return absl::InternalError(absl::StrCat("launch of ", name, " failed: ", cudaGetErrorString(error)));
}

}  // namespace ballast::kernels::cuda
