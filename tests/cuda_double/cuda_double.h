// A double of CUDA's runtime for machines without a GPU: the functions of libcudart that this project calls, defined in
// the test binary, so that the linker takes none of the library. Sources for the GPU run over it as they are, .cu files
// included; their kernels are computed by the host's, which have the same bits.
//
// Stricter than a GPU where a GPU would only be slow, or right by luck. A queued copy or kernel runs when its stream is
// waited for, not earlier, so memory that is used too early, or given back, shows. Device memory cannot be touched by
// the host, and begins with garbage. A failure stays the thread's last error until somebody asks for it, as in CUDA.
// What else is wrong is noted as a violation:
//   - work on a thread that has selected no device, which makes a context on GPU 0
//   - a stream, memory or page-lock used under another device than its own
//   - two threads that queue work on one stream at the same moment
//   - memory that is page-locked in part, or released under a queued copy
//   - a kernel or copy beyond its block
#pragma once

#include <cstdint>
#include <functional>
#include <set>
#include <string>
#include <vector>

namespace ballast::cuda_double {

struct Machine {
  int devices = 2;
  bool memory_pools = true;
};

// Begins a test. REQUIRES: nothing of an earlier one is left.
void Begin(const Machine& machine = {});
// What was wrong since Begin, also what was left behind: streams, device memory, page-locked memory.
std::vector<std::string> End();

// From now on cudaHostRegister fails, as where a limit is reached.
void RefusePageLocks();
// `hook` runs before each kernel, on the thread that waits for it.
void BeforeKernels(std::function<void()> hook);

struct Counts {
  uint64_t pageable_copies = 0;  // asynchronous ones, which are not asynchronous then
  uint64_t page_locked_copies = 0;
  uint64_t kernels = 0;
  uint64_t waits = 0;  // for a stream or device
  uint64_t refused_page_locks = 0;
};
Counts counts();

std::set<int> contexts();  // devices on which this process has one

}  // namespace ballast::cuda_double
