#include "ballast/kernels/optimizer.h"

#include <cmath>
#include <cstdlib>

#include "ballast/kernels/ieee_mode.h"

namespace ballast::kernels {
namespace {

// base^t from IEEE multiplications alone: libm's pow may differ in its last bit between versions and processors.
double Power(double base, uint64_t t) {
  double result = 1;
  for (; t != 0; t >>= 1) {
    if ((t & 1) != 0) result *= base;
    base *= base;
  }
  return result;
}

bool Blockwise(MomentFormat format) { return format == MomentFormat::kI8 || format == MomentFormat::kF8; }

std::string UnsupportedMaster(const OptimizerSpec& spec) {
  if (spec.master == MasterFormat::kRemainder && spec.working != Dtype::kBf16) {
    return "a master kept as remainder needs bf16 working parameters: take these, or an fp32 master";
  }
  if (spec.master == MasterFormat::kLent && spec.working != Dtype::kF32) {
    return "a parameter is its own master in fp32 alone: take fp32 working parameters, or an fp32 master on the "
           "servers";
  }
  return "";
}

}  // namespace

std::string Unsupported(const OptimizerSpec& spec) {
  const auto listed = [](Dtype dtype) { return dtype == Dtype::kF32 || dtype == Dtype::kBf16 || dtype == Dtype::kF16; };
  if (!listed(spec.gradient)) return "gradients may be fp32, bf16 or fp16";
  if (!listed(spec.working) && spec.working != Dtype::kE4m3Blocks) {
    return "working parameters may be fp32, bf16, fp16 or blocks of e4m3";
  }
  const bool adam = spec.kind == OptimizerKind::kAdamw || spec.kind == OptimizerKind::kAdam;
  if (spec.amsgrad && !adam) return "amsgrad is AdamW's and Adam's";
  if (spec.momentum && spec.kind != OptimizerKind::kSgd) return "a momentum buffer is SGD's";
  if (spec.nesterov && !spec.momentum) return "nesterov needs momentum";
  if (spec.kind == OptimizerKind::kAdemamix && Blockwise(spec.moments)) {
    return "its slow mean changes by about a ten-thousandth in a step, which 8 bits round away: take f32 or bf16 "
           "moments";
  }
  if (spec.kind == OptimizerKind::kAdamwScheduleFree && spec.moments != MomentFormat::kF32) {
    return "it takes f32 moments: one of them is z - y, and roundings of it would be steps of z";
  }
  return UnsupportedMaster(spec);
}

int MomentCount(const OptimizerSpec& spec) {
  switch (spec.kind) {
    case OptimizerKind::kAdamw:
    case OptimizerKind::kAdam:
      return spec.amsgrad ? 3 : 2;
    case OptimizerKind::kSgd:
      return spec.momentum ? 1 : 0;
    case OptimizerKind::kAdagrad:
    case OptimizerKind::kLion:
      return 1;
    case OptimizerKind::kAdemamix:
      return 3;
    case OptimizerKind::kAdamwScheduleFree:
      return 2;
  }
  return 0;
}

bool IsSecondMoment(const OptimizerSpec& spec, int index) {
  return spec.kind == OptimizerKind::kAdemamix ? index == 1 : spec.kind == OptimizerKind::kAdagrad || index > 0;
}

uint64_t MomentBytes(MomentFormat format, uint64_t n) {
  if (format == MomentFormat::kF32) return n * sizeof(float);
  return format == MomentFormat::kBf16 ? n * sizeof(bf16) : n;
}

uint64_t MomentScaleBytes(MomentFormat format, uint64_t n) {
  return Blockwise(format) ? (n + kMomentBlock - 1) / kMomentBlock * sizeof(float) : 0;
}

Coefficients MakeCoefficients(const OptimizerSpec& spec, const Hyper& hyper, uint64_t t, float factor) {
  if (t == 0) std::abort();  // a caller's bug: the first update is t = 1
  const IeeeMode mode;
  const auto once = [](double x) { return static_cast<float>(x); };
  Coefficients c;
  c.factor = hyper.maximize ? -factor : factor;
  switch (spec.kind) {
    case OptimizerKind::kAdamw:
    case OptimizerKind::kAdam:
    case OptimizerKind::kAdemamix:
      c.weight_decay =
          once(spec.kind == OptimizerKind::kAdam ? hyper.weight_decay : hyper.learning_rate * hyper.weight_decay);
      c.take1 = once(1 - hyper.beta1);
      c.keep2 = once(hyper.beta2);
      c.take2 = once(1 - hyper.beta2);
      c.step_size = once(hyper.learning_rate / (1 - Power(hyper.beta1, t)));
      c.root_scale = once(1 / std::sqrt(1 - Power(hyper.beta2, t)));
      c.eps = once(hyper.epsilon);
      if (spec.kind != OptimizerKind::kAdemamix) break;
      c.take3 = once(1 - hyper.beta3);
      c.keep = once(hyper.alpha * (1 - Power(hyper.beta1, t)));
      break;
    case OptimizerKind::kAdamwScheduleFree:
      c.weight_decay = once(hyper.weight_decay);
      c.take1 = once(hyper.average);
      c.keep1 = once(1 - hyper.average);
      c.keep2 = once(hyper.beta2);
      c.take2 = once(1 - hyper.beta2);
      c.take3 = once((1 - hyper.average) * hyper.learning_rate * hyper.beta1);
      c.step_size = once(hyper.learning_rate * (1 - hyper.beta1 * (1 - hyper.average)));
      c.root_scale = once(1 / std::sqrt(1 - Power(hyper.beta2, t)));
      c.eps = once(hyper.epsilon);
      break;
    case OptimizerKind::kSgd:
      c.weight_decay = once(hyper.weight_decay);
      c.keep = once(hyper.beta1);
      c.keep1 = t == 1 ? 0 : c.keep;
      c.take1 = t == 1 ? 1 : once(1 - hyper.dampening);
      c.step_size = once(hyper.learning_rate);
      break;
    case OptimizerKind::kAdagrad:
      c.weight_decay = once(hyper.weight_decay);
      c.step_size = once(hyper.learning_rate / (1 + static_cast<double>(t - 1) * hyper.learning_rate_decay));
      c.eps = once(hyper.epsilon);
      c.start = t == 1 ? once(hyper.initial_accumulator) : 0;
      break;
    case OptimizerKind::kLion:
      c.weight_decay = once(hyper.learning_rate * hyper.weight_decay);
      c.take1 = once(1 - hyper.beta1);
      c.take2 = once(1 - hyper.beta2);
      c.step_size = once(hyper.learning_rate);
      break;
  }
  return c;
}

}  // namespace ballast::kernels
