// The GPU's kernels for the self-test: host memory in and out, each call waits for the device.
#pragma once

#include "absl/status/status.h"
#include "ballast/kernels/self_test.h"

namespace ballast::kernels::cuda {

// Runs on the current device. A CUDA error goes to `status`, which must outlive the processor; outputs then keep their
// old contents.
Processor DeviceProcessor(absl::Status* status);

}  // namespace ballast::kernels::cuda
