// The elementwise optimizers: one fused pass per chunk from reduced gradient to working parameters.
//
// Bit-exact everywhere: every CPU path (no vectors, AVX2, AVX-512; Highway picks one at run time) and CUDA give the
// same bits. Hence explicit FMA, IEEE divide and square root, no contraction, integer rounding. A NaN stored as fp32 is
// always 0x7fc00000. Threads: any, in any floating-point mode (ieee_mode.h); no state is shared.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "absl/types/span.h"
#include "ballast/kernels/float_formats.h"

namespace ballast::kernels {

// Formulas, for gradient g, master p, first moment m, second moment v (semantics and names of torch.optim):
//
//   all                  g = factor * grad
//   kAdam, kSgd, kAdagrad  g = fma(weight_decay, p, g)                                     (L2, coupled)
//   kAdamw, kAdam        m = fma(take1, g - m, m);  v = fma(take2 * g, g, keep2 * v)
//     amsgrad            x = max(x, v), and x in v's place below
//     kAdam              p = fma(-step_size, m / fma(sqrt(v), root_scale, eps), p)
//     kAdamw             p = p - fma(weight_decay, p, step_size * (m / fma(sqrt(v), root_scale, eps)))
//   kAdemamix            m, v as kAdamw;  s = fma(take3, g - s, s);  and fma(keep, s, m) in m's place in kAdamw's p
//   kAdamwScheduleFree   v as kAdamw;  u = fma(weight_decay, p, g / fma(sqrt(v), root_scale, eps))
//                        p = p - fma(-take1, w, step_size * u);  w = fma(-take3, u, keep1 * w)
//   kSgd                 p = fma(-step_size, g, p)
//     momentum           m = fma(take1, g, keep1 * m), and m in g's place
//     nesterov           m = fma(take1, g, keep1 * m), and fma(keep, m, g) in g's place; keep = momentum
//     keep = 0           as without momentum, and m stays, as in torch
//   kAdagrad             v = fma(g, g, v + start);  p = fma(-step_size, g / (sqrt(v) + eps), p)
//   kLion                u = sign(fma(take1, g - m, m));  m = fma(take2, g - m, m)
//                        p = p - fma(weight_decay, p, step_size * u)
//
// Sources: AdamW: Loshchilov & Hutter 2019, algorithm 2. Adam: Kingma & Ba 2015, algorithm 1. AMSGrad: Reddi et al.
// 2018, algorithm 2, on uncorrected v. SGD: Sutskever et al. 2013, in torch's form, whose first momentum is the
// gradient. Adagrad: Duchi et al. 2011. Lion: Chen et al. 2023, algorithm 2. AdEMAMix: Pagliardini et al. 2024,
// algorithm 1; s is its slow mean m2, which has no bias correction. Schedule-free: Defazio et al. 2024, algorithm 1; p
// is y, and w = z - y, which begins at 0. So x = p + (1 - 1 / beta1) * w.
enum class OptimizerKind : uint8_t { kAdamw, kAdam, kSgd, kAdagrad, kLion, kAdemamix, kAdamwScheduleFree };

// How moments are stored. kF8 and kI8 keep a byte per element and an fp32 scale per block of kMomentBlock elements.
enum class MomentFormat : uint8_t {
  kF32,
  kBf16,  // stochastic rounding, see RandomKey
  kI8,    // the dynamic map of Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization", section 2.2
  kF8,    // first moment: sign, 4-bit exponent, 3-bit mantissa; second: the root of v with 4-bit exponent and mantissa
};

// How servers keep the fp32 master: as it is; as the bits that a working copy beside it lacks (SplitF32), for bf16
// working parameters alone; or not at all, since the trainer's fp32 parameter is the master, and is lent for each
// update. The kernels here always take the fp32 master.
enum class MasterFormat : uint8_t { kF32, kRemainder, kLent };

inline constexpr uint64_t kMomentBlock = 256;
inline constexpr int kMomentsMax = 3;

// The part of an optimizer that is fixed for a job's life.
struct OptimizerSpec {
  OptimizerKind kind = OptimizerKind::kAdamw;
  bool amsgrad = false;   // kAdamw, kAdam
  bool momentum = false;  // kSgd keeps a momentum buffer
  bool nesterov = false;  // kSgd with momentum
  MomentFormat moments = MomentFormat::kF32;
  MasterFormat master = MasterFormat::kF32;
  Dtype gradient = Dtype::kBf16;  // kF32, kBf16, kF16
  Dtype working = Dtype::kBf16;   // kF32, kBf16, kF16, kE4m3Blocks
  friend bool operator==(const OptimizerSpec&, const OptimizerSpec&) = default;
};

// Returns an empty text, or the reason why no kernel computes `spec`: an unlisted dtype, nesterov without momentum,
// amsgrad of a kind other than kAdamw and kAdam, moments of kAdemamix in 8 bits, a remainder of another dtype than
// bf16, a lent master of another dtype than fp32.
std::string Unsupported(const OptimizerSpec& spec);

// Moments per parameter: AdamW and Adam {m, v} or {m, v, x} with amsgrad, SGD {} or {m}, Adagrad {v}, Lion {m},
// AdEMAMix {m, v, s}, schedule-free AdamW {w, v}.
int MomentCount(const OptimizerSpec& spec);

// Whether moment `index` (below MomentCount) is a sum, mean or maximum of squares, and so never negative.
bool IsSecondMoment(const OptimizerSpec& spec, int index);

// Bytes of `n` elements of one moment; MomentScaleBytes: bytes of its scales (0 unless kI8, kF8).
uint64_t MomentBytes(MomentFormat format, uint64_t n);
uint64_t MomentScaleBytes(MomentFormat format, uint64_t n);

// A parameter group's hyper-parameters for one step. torch.optim's names and defaults are up to the caller.
struct Hyper {
  double learning_rate = 0;
  double beta1 = 0;  // kSgd: momentum
  double beta2 = 0;
  double epsilon = 0;
  double weight_decay = 0;
  double dampening = 0;            // kSgd
  double learning_rate_decay = 0;  // kAdagrad
  double initial_accumulator = 0;  // kAdagrad: v before the first update
  bool maximize = false;
  double beta3 = 0;    // kAdemamix, of s in this step
  double alpha = 0;    // kAdemamix: the weight of s in this step
  double average = 0;  // kAdamwScheduleFree: the weight of this step's z in x, 0 to 1
};

// The kernel's factors: each computed in fp64 and rounded once (1f - 0.999f would be off by 1.3e-5). Fields not named
// above for a kind stay 0.
struct Coefficients {
  float factor = 1;        // fp32(gradient scale x clip), negated to maximize
  float weight_decay = 0;  // L2: the decay; decoupled: lr * decay
  // keep: SGD's momentum; kAdemamix: alpha * (1 - beta1^t), since step_size has the correction of m.
  float keep = 0, keep1 = 0, take1 = 0, keep2 = 0, take2 = 0, take3 = 0;
  float step_size = 0;   // lr, over Adam's first bias correction
  float root_scale = 0;  // 1 / sqrt(1 - beta2^t)
  float eps = 0;
  float start = 0;  // the initial accumulator when t = 1, else 0
  friend bool operator==(const Coefficients&, const Coefficients&) = default;
};

// t: this update's step count for the tensor, from 1 (REQUIRES). factor: fp32(gradient scale x clip).
Coefficients MakeCoefficients(const OptimizerSpec& spec, const Hyper& hyper, uint64_t t, float factor);

// The random bits of stochastic rounding depend only on these fields, so every split of the work gives the same bits.
// Philox4x32-10 (Salmon et al. 2011), key = seed; the 128 bits of counter {e / 8, step mod 2^32, unit << 2 | moment}
// are the 16-bit numbers of elements e, e + 1, ... e + 7 of the unit, e a multiple of 8.
struct RandomKey {
  uint64_t seed = 0;
  uint32_t unit = 0;  // below 2^30
  uint64_t step = 0;
  uint64_t first_element = 0;  // the span's first element, in its unit; a multiple of kMomentBlock
};

struct MomentSpan {
  std::byte* values = nullptr;  // MomentBytes(n)
  float* scales = nullptr;      // MomentScaleBytes(n)
};

// Borrowed until return; no two overlap. Alignment: the dtype's own; 64 bytes is fastest.
struct UpdateSpan {
  uint64_t n = 0;
  const std::byte* gradient = nullptr;
  float* master = nullptr;                      // in place
  std::array<MomentSpan, kMomentsMax> moments;  // in place; entries beyond MomentCount are not read
  // Written. The CPU's kernels do not read the pointer where the master is lent (kLent), so it may be null there. The
  // GPU's kernels always write it, and do not support lent masters.
  std::byte* working = nullptr;
};

// The span begins at a multiple of kMomentBlock elements of its chunk; its last block may be short. REQUIRES:
// Unsupported(spec).empty(), else the process ends.
void Update(const OptimizerSpec& spec, const Coefficients& c, const RandomKey& key, const UpdateSpan& span);

// Reads the values of moment `index` (below MomentCount), kF8's second moments squared again. `moment` begins at a
// multiple of kMomentBlock elements of its chunk, like the span of its updates. A block with Inf or NaN reads as NaN.
void ReadMoment(const OptimizerSpec& spec, int index, const MomentSpan& moment, absl::Span<float> to);

// The reverse of ReadMoment, with the rounding of an update. Values from ReadMoment get their old codes again; scales
// of kI8 and kF8 may differ in the last bit. `from` must be finite, and at least 0 for a second moment. `moment` begins
// at a multiple of kMomentBlock elements of its chunk, `key` is of its first element; the last block's content behind
// `from` is undefined.
void WriteMoment(const OptimizerSpec& spec, int index, const RandomKey& key, absl::Span<const float> from,
                 const MomentSpan& moment);

}  // namespace ballast::kernels
