// Judge a CUDA call by its return value. CUDA also keeps a failure as the thread's last error until the error is
// queried: an already handled failure would be taken for the failure of a later call. So every call goes through
// Outcome(), and no other code queries the last error.
#pragma once

#include <cuda_runtime_api.h>

namespace ballast::kernels::cuda {

// Clears the calling thread's last error if `returned`, just returned by a call of this thread, is an error.
inline cudaError_t Outcome(cudaError_t returned) {
  if (returned != cudaSuccess) (void)cudaGetLastError();
  return returned;
}

}  // namespace ballast::kernels::cuda
