// A double of CUDA's runtime for machines without a GPU. The test binary defines the functions of libcudart called by
// this project, so the linker takes nothing from the library. GPU sources run over the double unchanged, .cu files
// included; the host's kernels compute in place of the GPU's, with the same bits.
//
// The double is stricter than a GPU where a GPU would only be slow, or right by luck. A queued copy or kernel runs only
// when its stream is waited for, so using memory too early, or giving memory back too early, shows; a copy of pageable
// memory waits for its stream at once. The host cannot touch device memory, and fresh device memory holds garbage. A
// failure stays the thread's last error until the thread asks for the error, as in CUDA. A kernel or copy beyond its
// block of device memory aborts the process. The double notes other mistakes as violations:
//   - work on a thread without a selected device (makes a context on GPU 0)
//   - a stream, memory or page-lock used while another device is selected
//   - two threads queueing work on one stream at the same moment
//   - a copy of memory page-locked only in part, or a page-lock released under a queued copy
//   - an event recorded again before anybody waited for it, or waited for without being recorded
//   - device memory freed twice, or a failure the thread never asked for
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

// Begins a test. REQUIRES: nothing of an earlier test is left.
void Begin(const Machine& machine = {});
// Returns all violations since Begin, with any streams, device memory and page-locks left behind.
std::vector<std::string> End();

// From now on cudaHostRegister fails, as at the system's limit.
void RefusePageLocks();
// `hook` runs before each kernel, on the thread that waits for it.
void BeforeKernels(std::function<void()> hook);

struct Counts {
  uint64_t pageable_copies = 0;  // by cudaMemcpyAsync, which then waits for the stream
  uint64_t page_locked_copies = 0;
  uint64_t kernels = 0;
  uint64_t waits = 0;  // for a stream, an event or the device
  uint64_t refused_page_locks = 0;
};
Counts counts();

std::set<int> contexts();  // devices on which this process has a context

}  // namespace ballast::cuda_double
