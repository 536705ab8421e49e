// What memory can do: the loops that kernels are compared with, over as many vectors as the processor has, in its
// widest instruction set whatever the kernel under test uses.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ballast::bench {

// a, b, c[n]: read, changed, written back. The ceiling of an optimizer, which owns its lines already when it writes.
void UpdateThreeArrays(float* a, float* b, float* c, uint64_t n);

// Reads `steps` times `read_lines` lines of 64 bytes and writes `write_lines`, the writes past the caches, as a kernel
// with so many bytes per element must: (1, 1) is a copy, (1, 0) a read. Pairs: (1, 0), (1, 1), (2, 1), (1, 2), (4, 1),
// (1, 4), (3, 2), (4, 2), (2, 4). 64-byte aligned.
void Move(const std::byte* from, int read_lines, std::byte* to, int write_lines, uint64_t steps);

}  // namespace ballast::bench
