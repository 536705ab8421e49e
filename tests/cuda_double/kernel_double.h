// The kernels of kernels/cuda, computed by the host.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

namespace ballast::cuda_double {

// Where the host has `bytes` from a device address on; null, and a violation, if they are not in one block.
using Reach = std::function<void*(const void* device, uint64_t bytes)>;

// Copies the arguments; the returned function does what the kernel of that (mangled) name does. Null if the name is
// unknown.
std::function<void()> KernelCalled(const std::string& name, void** arguments, const Reach& reach);

}  // namespace ballast::cuda_double
