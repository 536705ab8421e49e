// The kernels of kernels/cuda, computed by the host.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

namespace ballast::cuda_double {

// The host's address of `bytes` at a device address. Aborts the process if no block of device memory holds all of them.
using Reach = std::function<void*(const void* device, uint64_t bytes)>;

// Copies the arguments and returns a function with the effect of the kernel named `name` (mangled). Null if the name
// is unknown.
std::function<void()> KernelCalled(const std::string& name, void** arguments, const Reach& reach);

}  // namespace ballast::cuda_double
