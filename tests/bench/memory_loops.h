// The speed of memory alone: loops with which kernels are compared. The loops use the processor's widest vectors, also
// where the kernel under test is confined to a narrower instruction set.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ballast::bench {

// Reads, changes and writes back a, b and c[n]. This is the ceiling of an optimizer, because an optimizer too has read
// a cache line before writing to the line.
void UpdateThreeArrays(float* a, float* b, float* c, uint64_t n);

// Reads `read_lines` lines of 64 bytes and writes `write_lines`, `steps` times; the writes bypass the caches. This is
// the traffic of a kernel with the same ratio of bytes read to bytes written: (1, 1) is a copy, (1, 0) a read. Pairs:
// (1, 0), (1, 1), (2, 1), (1, 2), (4, 1), (1, 4), (3, 2), (4, 2), (2, 4). 64-byte aligned.
void Move(const std::byte* from, int read_lines, std::byte* to, int write_lines, uint64_t steps);

}  // namespace ballast::bench
