#include "ballast/kernels/self_test.h"

#include <bit>
#include <cstdio>
#include <cstring>
#include <limits>

#include "ballast/kernels/ieee_mode.h"
#include "ballast/kernels/self_test_digests.h"

namespace ballast::kernels {
namespace {

// More than three blocks, the last one short and odd.
constexpr uint64_t kElements = 907;
// Elements of an update: more than the longest run of blocks.
constexpr uint64_t kUpdateElements = 17 * kMomentBlock + 139;

// A bijection of 32 bits (Ellis, hash-prospector: lowbias32).
uint32_t Mix(uint32_t x) {
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= x >> 15;
  x *= 0x846ca68bu;
  return x ^ x >> 16;
}

// Values as in training, in the second block of any finite size, in the third of any bits at all.
float Input(uint32_t array, uint64_t i) {
  const uint32_t bits = Mix(static_cast<uint32_t>(i) + array * 0x9e3779b9u);
  const uint64_t block = i / kMomentBlock;
  if (block == 2) return std::bit_cast<float>(bits);
  if (block == 1) return std::bit_cast<float>(bits & 0xbfffffffu);
  return (static_cast<float>(bits >> 8) - 0x1p23f) * 0x1p-23f * (i % 5 == 0 ? 0x1p-9f : 1.0f);
}

std::vector<std::byte> Inputs(uint32_t array, Dtype dtype, uint64_t n = kElements) {
  std::vector<std::byte> bytes(n * ElementBytes(dtype));
  for (uint64_t i = 0; i < n; ++i) {
    const float x = Input(array, i);
    const uint16_t half = dtype == Dtype::kBf16 ? ToBf16(x) : ToF16(x);
    dtype == Dtype::kF32 ? std::memcpy(bytes.data() + 4 * i, &x, 4) : std::memcpy(bytes.data() + 2 * i, &half, 2);
  }
  return bytes;
}

template <typename T>
uint32_t Add(const std::vector<T>& values, uint32_t crc) {
  return Crc32c({reinterpret_cast<const std::byte*>(values.data()), values.size() * sizeof(T)}, crc);
}

// Two steps from zero moments, so that the second step reads moments stored by the first. `shift`: bytes by which the
// working parameters miss the alignment needed for stores past the caches.
uint32_t UpdateDigest(const Processor& processor, const OptimizerSpec& spec, size_t shift, uint32_t crc) {
  std::vector<float> master(kUpdateElements), scales[kMomentsMax];
  const uint64_t working_bytes = BytesOf(spec.working, kUpdateElements);
  std::vector<std::byte> memory(working_bytes + 128), values[kMomentsMax];
  std::byte* const working = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) + shift;
  for (uint64_t i = 0; i < kUpdateElements; ++i) master[i] = Input(1, i);
  UpdateSpan span{
      .n = kUpdateElements, .gradient = nullptr, .master = master.data(), .moments = {}, .working = working};
  for (size_t k = 0; k < kMomentsMax; ++k) {
    values[k].resize(MomentBytes(spec.moments, kUpdateElements));
    scales[k].resize(MomentScaleBytes(spec.moments, kUpdateElements) / sizeof(float));
    span.moments[k] = {.values = values[k].data(), .scales = scales[k].data()};
  }
  const Hyper hyper{.learning_rate = 1e-2,
                    .beta1 = 0.9,
                    .beta2 = 0.98,
                    .epsilon = 1e-8,
                    .weight_decay = 0.1,
                    .dampening = 0.1,
                    .learning_rate_decay = 0.01,
                    .beta3 = 0.999,
                    .alpha = 5,
                    .average = 0.4};
  for (uint64_t t = 1; t <= 2; ++t) {
    const std::vector<std::byte> gradient = Inputs(static_cast<uint32_t>(t) + 1, spec.gradient, kUpdateElements);
    span.gradient = gradient.data();
    const RandomKey key{.seed = 0x0123456789abcdef, .unit = 5, .step = t, .first_element = 3 * kMomentBlock};
    processor.update(spec, MakeCoefficients(spec, hyper, t, 0.37f), key, span);
  }
  crc = Crc32c({working, working_bytes}, Add(master, crc));
  for (int k = 0; k < MomentCount(spec); ++k) crc = Add(scales[k], Add(values[k], crc));
  return crc;
}

uint32_t UpdateDigest(const Processor& processor, const OptimizerSpec& spec) {
  return UpdateDigest(processor, spec, 4, UpdateDigest(processor, spec, 0, 0));
}

void AddUpdates(const Processor& processor, std::vector<Digest>* digests) {
  struct Named {
    const char* name;
    OptimizerSpec spec;
  };
  const Named rules[] = {{"adamw", {.kind = OptimizerKind::kAdamw}},
                         {"adamw_amsgrad", {.kind = OptimizerKind::kAdamw, .amsgrad = true}},
                         {"adam", {.kind = OptimizerKind::kAdam}},
                         {"adam_amsgrad", {.kind = OptimizerKind::kAdam, .amsgrad = true}},
                         {"sgd", {.kind = OptimizerKind::kSgd}},
                         {"sgd_momentum", {.kind = OptimizerKind::kSgd, .momentum = true}},
                         {"sgd_nesterov", {.kind = OptimizerKind::kSgd, .momentum = true, .nesterov = true}},
                         {"adagrad", {.kind = OptimizerKind::kAdagrad}},
                         {"lion", {.kind = OptimizerKind::kLion}},
                         {"ademamix", {.kind = OptimizerKind::kAdemamix}},
                         {"adamw_schedule_free", {.kind = OptimizerKind::kAdamwScheduleFree}}};
  const std::pair<const char*, MomentFormat> formats[] = {
      {"f32", MomentFormat::kF32}, {"bf16", MomentFormat::kBf16}, {"i8", MomentFormat::kI8}, {"f8", MomentFormat::kF8}};
  const std::pair<const char*, Dtype> dtypes[] = {{"f32", Dtype::kF32}, {"bf16", Dtype::kBf16}, {"f16", Dtype::kF16}};
  for (Named rule : rules) {
    for (const auto& [format_name, format] : formats) {
      rule.spec.moments = format;
      if (!Unsupported(rule.spec).empty()) continue;
      digests->push_back({std::string(rule.name) + "/" + format_name, UpdateDigest(processor, rule.spec)});
    }
  }
  for (const auto& [gradient_name, gradient] : dtypes) {
    for (const auto& [working_name, working] : dtypes) {
      const OptimizerSpec spec{.gradient = gradient, .working = working};
      digests->push_back(
          {std::string("adamw/f32 ") + gradient_name + " to " + working_name, UpdateDigest(processor, spec)});
    }
  }
  digests->push_back({"adamw/f32 bf16 to f8", UpdateDigest(processor, {.working = Dtype::kE4m3Blocks})});
}

void AddConversions(const Processor& processor, std::vector<Digest>* digests) {
  std::vector<float> x(kElements);
  for (uint64_t i = 0; i < kElements; ++i) x[i] = Input(7, i);
  for (const auto& [name, dtype] : {std::pair{"bf16", Dtype::kBf16},
                                    {"f16", Dtype::kF16},
                                    {"e4m3", Dtype::kE4m3},
                                    {"e5m2", Dtype::kE5m2},
                                    {"e4m3_blocks", Dtype::kE4m3Blocks}}) {
    std::vector<std::byte> narrow(BytesOf(dtype, kElements));
    FromF32(x, dtype, narrow.data());
    if (processor.to_f32) {
      std::vector<float> wide(kElements);
      processor.to_f32(dtype, narrow.data(), absl::MakeSpan(wide));
      digests->push_back({std::string("to_f32/") + name, Add(wide, 0)});
    }
    if (processor.add_into && dtype != Dtype::kE4m3Blocks) {
      std::vector<float> sum(x.rbegin(), x.rend());
      processor.add_into(dtype, narrow.data(), absl::MakeSpan(sum));
      digests->push_back({std::string("add_into/") + name, Add(sum, 0)});
    }
    if (processor.from_f32) {
      processor.from_f32(x, dtype, narrow.data());
      digests->push_back({std::string("from_f32/") + name, Add(narrow, 0)});
    }
  }
}

void AddNorms(const Processor& processor, std::vector<Digest>* digests) {
  // Whole leaves and a short leaf; once with all values finite, once with a value that is not.
  constexpr uint64_t kNormElements = 2 * 4096 + 77;
  std::vector<float> wide(kNormElements);
  for (uint64_t i = 0; i < kNormElements; ++i) wide[i] = Input(8, i % kMomentBlock) * (1.0f + static_cast<float>(i));
  for (const auto& [name, dtype] : {std::pair{"f32", Dtype::kF32}, {"bf16", Dtype::kBf16}, {"f16", Dtype::kF16}}) {
    std::vector<std::byte> x(kNormElements * ElementBytes(dtype));
    FromF32(wide, dtype, x.data());
    const NormResult finite = processor.squared_norm(dtype, x.data(), kNormElements);
    std::vector<float> bad = wide;
    bad[1000] = std::numeric_limits<float>::infinity();
    FromF32(bad, dtype, x.data());
    const NormResult all = processor.squared_norm(dtype, x.data(), kNormElements);
    const std::vector<uint64_t> bits = {std::bit_cast<uint64_t>(finite.squared_norm), finite.finite ? 1u : 0u,
                                        std::bit_cast<uint64_t>(all.squared_norm), all.finite ? 1u : 0u};
    digests->push_back({std::string("norm/") + name, Add(bits, 0)});
  }
}

void AddQuantizers(const Processor& processor, std::vector<Digest>* digests) {
  const std::vector<std::byte> x = Inputs(9, Dtype::kBf16);
  for (const auto& [name, format] : {std::pair{"int8", QuantFormat::kInt8}, {"int4", QuantFormat::kInt4}}) {
    std::vector<std::byte> codes(QuantBytes(format, kElements)), back(x.size());
    std::vector<float> scales(QuantScales(kElements));
    processor.quantize(format, Dtype::kBf16, x.data(), kElements, codes.data(), scales.data());
    digests->push_back({std::string("quantize/") + name, Add(scales, Add(codes, 0))});
    processor.dequantize(format, codes.data(), scales.data(), kElements, Dtype::kBf16, back.data());
    digests->push_back({std::string("dequantize/") + name, Add(back, 0)});
  }
}

void AddRemainders(const Processor& processor, std::vector<Digest>* digests) {
  std::vector<float> x(kElements), back(kElements);
  for (uint64_t i = 0; i < kElements; ++i) x[i] = Input(10, i);
  std::vector<bf16> rounded(kElements);
  std::vector<uint16_t> low(kElements);
  std::vector<uint8_t> carries(CarryBytes(kElements));
  Bf16FromF32(x, absl::MakeSpan(rounded));
  processor.split_f32(x, low.data(), carries.data());
  digests->push_back({"split_f32", Add(carries, Add(low, 0))});
  processor.join_f32(rounded.data(), low.data(), carries.data(), absl::MakeSpan(back));
  digests->push_back({"join_f32", Add(back, 0)});
}

}  // namespace

std::vector<Digest> DigestsOf(const Processor& processor) {
  const IeeeMode mode;  // the inputs are computed, too
  std::vector<Digest> digests;
  if (processor.update) AddUpdates(processor, &digests);
  AddConversions(processor, &digests);
  if (processor.squared_norm) AddNorms(processor, &digests);
  if (processor.quantize && processor.dequantize) AddQuantizers(processor, &digests);
  if (processor.split_f32 && processor.join_f32) AddRemainders(processor, &digests);
  return digests;
}

std::string DigestMismatch(const std::vector<Digest>& digests) {
  std::string mismatch;
  for (const Digest& digest : digests) {
    const ReleaseDigest* expected = nullptr;
    for (const ReleaseDigest& release : kReleaseDigests) {
      if (digest.function == release.function) expected = &release;
    }
    if (expected != nullptr && expected->crc32c == digest.crc32c) continue;
    char text[160];
    std::snprintf(text, sizeof(text), "%s%s: %08x, expected %08x", mismatch.empty() ? "" : "; ",
                  digest.function.c_str(), digest.crc32c, expected == nullptr ? 0 : expected->crc32c);
    mismatch += text;
  }
  return mismatch;
}

Processor CpuProcessor() {
  return {.update = Update,
          .squared_norm = [](Dtype dtype, const std::byte* x, uint64_t n) { return SquaredNorm(dtype, x, n); },
          .from_f32 = FromF32,
          .to_f32 = ToF32,
          .add_into = [](Dtype dtype, const std::byte* addend, absl::Span<float> sum) { AddInto(dtype, addend, sum); },
          .quantize = Quantize,
          .dequantize = Dequantize,
          .split_f32 = SplitF32,
          .join_f32 = JoinF32};
}

}  // namespace ballast::kernels
