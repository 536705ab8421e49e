// What memory can do: the loops that kernels are compared with, over as many vectors as the processor has, in its
// widest instruction set whatever the kernel under test uses.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ballast::bench {

// a, b, c[n]: read, changed, written back. The ceiling of an optimizer, which owns its lines already when it writes.
void UpdateThreeArrays(float* a, float* b, float* c, uint64_t n);

// to[bytes] = from[bytes] with stores past the caches, which is the fastest copy of what is larger than they are.
// memcpy changes its way at a size that depends on the machine. Both 64-byte aligned; the last bytes % 64 are left out.
void Copy(const std::byte* from, std::byte* to, uint64_t bytes);

}  // namespace ballast::bench
