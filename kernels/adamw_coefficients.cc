#include <cmath>

#include "ballast/kernels/kernels.h"

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

}  // namespace

AdamwCoefficients MakeAdamwCoefficients(const AdamwHyper& hyper, uint64_t t, float factor) {
  AdamwCoefficients c;
  c.factor = factor;
  c.decay = static_cast<float>(1 - hyper.learning_rate * hyper.weight_decay);
  c.one_minus_beta1 = static_cast<float>(1 - hyper.beta1);
  c.beta2 = static_cast<float>(hyper.beta2);
  c.one_minus_beta2 = static_cast<float>(1 - hyper.beta2);
  c.step_size = static_cast<float>(hyper.learning_rate / (1 - Power(hyper.beta1, t)));
  c.sqrt_bias2 = static_cast<float>(std::sqrt(1 - Power(hyper.beta2, t)));
  c.eps = static_cast<float>(hyper.epsilon);
  return c;
}

}  // namespace ballast::kernels
