#include "ballast/tests/kernels/reference_optimizer.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "ballast/kernels/dynamic_map.h"
#include "ballast/kernels/moment_formats.h"
#include "ballast/kernels/philox.h"
#include "ballast/tests/kernels/block_reference.h"

namespace ballast::kernels {
namespace {

float OneNan(float x) { return std::isnan(x) ? std::bit_cast<float>(0x7fc00000u) : x; }

float ReadAs(Dtype dtype, const std::byte* from, uint64_t i) {
  if (dtype == Dtype::kF32) {
    float x;
    std::memcpy(&x, from + i * sizeof(x), sizeof(x));
    return x;
  }
  uint16_t x;
  std::memcpy(&x, from + i * sizeof(x), sizeof(x));
  return dtype == Dtype::kBf16 ? FromBf16(x) : FromF16(x);
}

void WriteAs(Dtype dtype, float x, std::byte* to, uint64_t i) {
  if (dtype == Dtype::kF32) {
    std::memcpy(to + i * sizeof(x), &x, sizeof(x));
    return;
  }
  const uint16_t half = dtype == Dtype::kBf16 ? ToBf16(x) : ToF16(x);
  std::memcpy(to + i * sizeof(half), &half, sizeof(half));
}

// An 8-bit code of x / scale and back. kI8 by the linear pieces of the map.
template <bool kFirst>
uint8_t DynamicCode(const DynamicMap<kFirst>& map, float x) {
  const float magnitude = std::fabs(x);
  if (x > map.top_threshold) return DynamicMap<kFirst>::kTop;
  int decade = 0;
  while (decade < map.kDecades && magnitude > map.threshold[decade]) ++decade;
  const float linear = std::fma(magnitude, map.code_factor[decade], map.code_offset[decade]);
  const auto code = static_cast<uint8_t>(std::nearbyint(std::min(linear, map.code_max[decade])));
  return kFirst && std::signbit(x) && code != 0 ? code | 0x80 : code;
}

template <bool kFirst>
float DynamicValue(const DynamicMap<kFirst>& map, uint8_t code) {
  if (code == DynamicMap<kFirst>::kTop) return 1;
  const int k = kFirst ? code & 0x7f : code, h = kFirst ? 2 * k + 1 : k + 1;
  const int decade = std::ilogb(h);
  const float value =
      std::min(1.0f, std::fma(static_cast<float>(h), map.value_factor[decade], map.value_offset[decade]));
  return kFirst && code > 0x80 ? -value : value;
}

uint8_t CodeOf(MomentFormat format, bool first, float x, float inverse) {
  if (format == MomentFormat::kI8) {
    return first ? DynamicCode(kSignedMap, x * inverse) : DynamicCode(kUnsignedMap, x * inverse);
  }
  if (!first) return static_cast<uint8_t>(std::max(F8Root::Code(std::fma(x, inverse, F8Root::kOffset)), 1u));
  const uint32_t magnitude = F8First::Code(std::fma(std::fabs(x), inverse, F8First::kOffset));
  return static_cast<uint8_t>(magnitude | (std::signbit(x) ? 0x80u : 0u));
}

float ValueOf(MomentFormat format, bool first, uint8_t code) {
  if (format == MomentFormat::kI8) return first ? DynamicValue(kSignedMap, code) : DynamicValue(kUnsignedMap, code);
  if (!first) return F8Root::Value(code);
  const float value = F8First::Value(code & 0x7fu);
  return code >= 0x80 ? -value : value;
}

float LargestOf(MomentFormat format, bool first) {
  if (format == MomentFormat::kI8) return 1;
  return first ? F8First::kLargest : F8Root::kLargest;
}

// One moment, all elements as fp32: v under kF8 as its root.
std::vector<float> ReadMoment(const OptimizerSpec& spec, bool first, const MomentSpan& moment, uint64_t n) {
  std::vector<float> x(n);
  for (uint64_t i = 0; i < n; ++i) {
    if (spec.moments == MomentFormat::kF32) {
      x[i] = ReadAs(Dtype::kF32, moment.values, i);
    } else if (spec.moments == MomentFormat::kBf16) {
      x[i] = ReadAs(Dtype::kBf16, moment.values, i);
    } else {
      x[i] = ValueOf(spec.moments, first, static_cast<uint8_t>(moment.values[i])) * moment.scales[i / kMomentBlock];
    }
  }
  return x;
}

void WriteCodes(const OptimizerSpec& spec, bool first, const float* x, uint64_t n, const MomentSpan& moment,
                uint64_t begin) {
  float largest = 0;
  bool finite = true;
  for (uint64_t i = 0; i < n; ++i) {
    finite = finite && std::isfinite(x[i]);
    largest = std::max(largest, std::fabs(x[i]));
  }
  const float scale = largest * (1 / LargestOf(spec.moments, first));
  float* stored = moment.scales + begin / kMomentBlock;
  std::memset(moment.values + begin, 0, n);
  *stored = 0;
  if (!finite) *stored = std::bit_cast<float>(0x7fc00000u);
  if (!finite || scale < std::numeric_limits<float>::min()) return;
  *stored = scale;
  for (uint64_t i = 0; i < n; ++i) moment.values[begin + i] = std::byte{CodeOf(spec.moments, first, x[i], 1 / scale)};
}

void WriteMoment(const OptimizerSpec& spec, bool first, uint32_t number, const RandomKey& key,
                 const std::vector<float>& x, const MomentSpan& moment) {
  const uint64_t n = x.size();
  switch (spec.moments) {
    case MomentFormat::kF32:
      for (uint64_t i = 0; i < n; ++i) WriteAs(Dtype::kF32, x[i], moment.values, i);
      return;
    case MomentFormat::kBf16:
      for (uint64_t i = 0; i < n; ++i) {
        const uint64_t element = key.first_element + i, group = element / 8;
        const PhiloxBits bits = Philox({{static_cast<uint32_t>(group), static_cast<uint32_t>(group >> 32),
                                         static_cast<uint32_t>(key.step), key.unit << 2 | number}},
                                       static_cast<uint32_t>(key.seed), static_cast<uint32_t>(key.seed >> 32));
        const uint32_t random = bits.word[element % 8 / 2] >> (element % 2 * 16) & 0xffff;
        const auto half = static_cast<uint16_t>((std::bit_cast<uint32_t>(x[i]) + random) >> 16);
        std::memcpy(moment.values + i * sizeof(half), &half, sizeof(half));
      }
      return;
    default:
      for (uint64_t begin = 0; begin < n; begin += kMomentBlock) {
        WriteCodes(spec, first, x.data() + begin, std::min(kMomentBlock, n - begin), moment, begin);
      }
  }
}

struct Element {
  float p, a, b, x;
};

// Adam, AdamW and AdEMAMix; `root`: second moments are roots.
void Adam(const OptimizerSpec& spec, const Coefficients& c, float g, bool root, Element* e) {
  const bool decoupled = spec.kind != OptimizerKind::kAdam;
  if (!decoupled) g = std::fma(c.weight_decay, e->p, g);
  e->a = std::fma(c.take1, g - e->a, e->a);
  const float v = root ? e->b * e->b : e->b;
  e->b = std::fma(c.take2 * g, g, c.keep2 * v);
  if (root) e->b = std::sqrt(e->b);
  float used = e->b;
  if (spec.amsgrad) {
    if (!(e->x > e->b || std::isnan(e->x))) e->x = e->b;
    used = e->x;
  }
  float mean = e->a;
  if (spec.kind == OptimizerKind::kAdemamix) {
    e->x = std::fma(c.take3, g - e->x, e->x);
    mean = std::fma(c.keep, e->x, e->a);
  }
  const float ratio = mean / std::fma(root ? used : std::sqrt(used), c.root_scale, c.eps);
  if (decoupled) {
    e->p = e->p - std::fma(c.weight_decay, e->p, c.step_size * ratio);
  } else {
    e->p = std::fma(-c.step_size, ratio, e->p);
  }
}

// Schedule-free AdamW: e->a is z - y.
void ScheduleFree(const Coefficients& c, float g, Element* e) {
  e->b = std::fma(c.take2 * g, g, c.keep2 * e->b);
  const float u = std::fma(c.weight_decay, e->p, g / std::fma(std::sqrt(e->b), c.root_scale, c.eps));
  e->p = e->p - std::fma(-c.take1, e->a, c.step_size * u);
  e->a = std::fma(-c.take3, u, c.keep1 * e->a);
}

void UpdateElement(const OptimizerSpec& spec, const Coefficients& c, float grad, Element* e) {
  const bool root = spec.moments == MomentFormat::kF8;
  float g = c.factor * grad;
  switch (spec.kind) {
    case OptimizerKind::kAdamw:
    case OptimizerKind::kAdam:
    case OptimizerKind::kAdemamix:
      Adam(spec, c, g, root, e);
      break;
    case OptimizerKind::kAdamwScheduleFree:
      ScheduleFree(c, g, e);
      break;
    case OptimizerKind::kSgd:
      g = std::fma(c.weight_decay, e->p, g);
      if (spec.momentum) {
        e->a = std::fma(c.take1, g, c.keep1 * e->a);
        g = spec.nesterov ? std::fma(c.keep, e->a, g) : e->a;
      }
      e->p = std::fma(-c.step_size, g, e->p);
      break;
    case OptimizerKind::kAdagrad: {
      g = std::fma(c.weight_decay, e->p, g);
      e->a = std::fma(g, g, (root ? e->a * e->a : e->a) + c.start);
      const float s = std::sqrt(e->a);
      e->p = std::fma(-c.step_size, g / (s + c.eps), e->p);
      if (root) e->a = s;
      break;
    }
    case OptimizerKind::kLion: {
      const float direction = std::fma(c.take1, g - e->a, e->a);
      const float sign = direction > 0 ? 1.0f : direction < 0 ? -1.0f : direction;
      e->a = std::fma(c.take2, g - e->a, e->a);
      e->p = e->p - std::fma(c.weight_decay, e->p, c.step_size * sign);
      break;
    }
  }
  *e = {OneNan(e->p), OneNan(e->a), OneNan(e->b), OneNan(e->x)};
}

}  // namespace

void ReferenceUpdate(const OptimizerSpec& job, const Coefficients& c, const RandomKey& key, const UpdateSpan& span) {
  OptimizerSpec spec = job;
  // A step without momentum, which leaves the buffer alone.
  if (spec.kind == OptimizerKind::kSgd && c.keep == 0) spec.momentum = spec.nesterov = false;
  const int count = MomentCount(spec);
  const auto first = [&spec](int k) {
    return spec.kind == OptimizerKind::kAdemamix ? k != 1 : k == 0 && spec.kind != OptimizerKind::kAdagrad;
  };
  std::vector<float> moments[kMomentsMax];
  for (int k = 0; k < kMomentsMax; ++k) {
    if (k < count)
      moments[k] = ReadMoment(spec, first(k), span.moments[static_cast<size_t>(k)], span.n);
    else
      moments[k].assign(span.n, 0);
  }
  for (uint64_t i = 0; i < span.n; ++i) {
    Element e{span.master[i], moments[0][i], moments[1][i], moments[2][i]};
    UpdateElement(spec, c, ReadAs(spec.gradient, span.gradient, i), &e);
    span.master[i] = e.p;
    moments[0][i] = e.a, moments[1][i] = e.b, moments[2][i] = e.x;
    if (spec.working != Dtype::kE4m3Blocks) WriteAs(spec.working, e.p, span.working, i);
  }
  if (spec.working == Dtype::kE4m3Blocks) {
    const std::vector<std::byte> coded = ReferenceBlocks({span.master, span.n});
    std::copy(coded.begin(), coded.end(), span.working);
  }
  for (int k = 0; k < count; ++k) {
    WriteMoment(spec, first(k), static_cast<uint32_t>(k), key, moments[k], span.moments[static_cast<size_t>(k)]);
  }
}

}  // namespace ballast::kernels
