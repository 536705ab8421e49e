// What memory can do: the loops that kernels are compared with, over as many vectors as the processor has, in its
// widest instruction set whatever the kernel under test uses.
#pragma once

#include <cstdint>

namespace ballast::bench {

// a, b, c[n]: read, changed, written back. The ceiling of an optimizer, which owns its lines already when it writes.
void UpdateThreeArrays(float* a, float* b, float* c, uint64_t n);

}  // namespace ballast::bench
