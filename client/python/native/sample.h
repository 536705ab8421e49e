// Samples of tensors' bytes: they tell of writes that move no version counter, for a small part of a read of all.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/types/span.h"

namespace ballast::python {

// A turn that takes every line: half as long again as a sample, since memory comes faster in order.
inline constexpr uint64_t kEveryLine = ~uint64_t{0};

// Shapes: bytes[n]. Returns a hash of all bytes of a small tensor (at most 16 KiB), else of one in 12.5 of its lines of
// 64 bytes. So a write to more than 960 bytes in a row always shows, and one to a column of a large matrix almost
// surely; one to a single element mostly does not. `turn`: kEveryLine, or any number, which chooses the lines. Only
// hashes with equal sizes and turns can be compared, in one process. Owns: borrows the bytes, which may not change
// until return. Threads: any.
uint64_t SampleOf(absl::Span<const std::byte> bytes, uint64_t turn);
// The same of several tensors, on a few threads where they are large. turns: one per tensor.
std::vector<uint64_t> SamplesOf(absl::Span<const absl::Span<const std::byte>> tensors,
                                absl::Span<const uint64_t> turns);

}  // namespace ballast::python
