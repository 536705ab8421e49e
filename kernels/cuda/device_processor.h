// The GPU's kernels for the self-test: host memory in and out, each call waits for the device.
#pragma once

#include "absl/status/status.h"
#include "ballast/kernels/self_test.h"

namespace ballast::kernels::cuda {

// On the current device. A CUDA error goes to `status`, which must outlive the processor; what was to be written is
// then as it was.
Processor DeviceProcessor(absl::Status* status);

}  // namespace ballast::kernels::cuda
