// Recovery rests on bit equality, so a processor shows at start that it computes this release's bits: it runs the
// kernels over fixed inputs and compares the CRC32C of the outputs with a table.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "ballast/kernels/kernels.h"
#include "ballast/kernels/optimizer.h"

namespace ballast::kernels {

// The functions under test; all spans are in the host's memory. An empty function is left out.
struct Processor {
  std::function<void(const OptimizerSpec&, const Coefficients&, const RandomKey&, const UpdateSpan&)> update;
  std::function<NormResult(Dtype, const std::byte*, uint64_t)> squared_norm;
  std::function<void(absl::Span<const float>, Dtype, std::byte*)> from_f32;
  std::function<void(Dtype, const std::byte*, absl::Span<float>)> to_f32;
  std::function<void(Dtype, const std::byte*, absl::Span<float>)> add_into;
  std::function<void(QuantFormat, Dtype, const std::byte*, uint64_t, std::byte*, float*)> quantize;
  std::function<void(QuantFormat, const std::byte*, const float*, uint64_t, Dtype, std::byte*)> dequantize;
  std::function<void(absl::Span<const float>, uint16_t*, uint8_t*)> split_f32;
  std::function<void(const bf16*, const uint16_t*, const uint8_t*, absl::Span<float>)> join_f32;
};

struct Digest {
  std::string function;  // "adamw/f8"
  uint32_t crc32c = 0;
  friend bool operator==(const Digest&, const Digest&) = default;
};

// Takes a few milliseconds.
std::vector<Digest> DigestsOf(const Processor& processor);

// Names every function whose digest differs from this release's, with both digests: "adamw/f8: 12ab34cd, expected
// 98fe76dc; ...". Empty when all agree.
std::string DigestMismatch(const std::vector<Digest>& digests);

// The kernels of kernels.h and optimizer.h on the instruction set chosen at run time.
Processor CpuProcessor();

}  // namespace ballast::kernels
