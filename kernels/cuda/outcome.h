// The outcome of a CUDA call is what the call returned. CUDA also keeps the failure as the thread's last error until
// somebody asks for it: a failure that was handled and left there is taken for the failure of a later call. So every
// call goes through Outcome(), and nobody else asks for the last error.
#pragma once

#include <cuda_runtime_api.h>

namespace ballast::kernels::cuda {

// Forgets the last error of the calling thread if `returned`, which a call of this thread has just returned, is one.
inline cudaError_t Outcome(cudaError_t returned) {
  if (returned != cudaSuccess) (void)cudaGetLastError();
  return returned;
}

}  // namespace ballast::kernels::cuda
