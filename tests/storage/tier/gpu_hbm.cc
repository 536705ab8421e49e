#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstdlib>

#include "ballast/tests/storage/tier/test_hbm.h"

namespace ballast::storage {

HbmOpener TestHbm() {
  int devices = 0;
  const cudaError_t error = cudaGetDeviceCount(&devices);
  if (error == cudaSuccess && devices > 0) return OpenHbmTier;
  std::printf("SKIPPED: no GPU (%s)\n", cudaGetErrorString(error));
  std::fflush(stdout);
  std::_Exit(77);
}

}  // namespace ballast::storage
