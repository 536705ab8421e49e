// The kernels alone: one SGD step of one parameter.
#include <cstdio>

#include "ballast/kernels/optimizer.h"
#include "ballast/kernels/self_test.h"

int main() {
  using namespace ballast::kernels;
  const OptimizerSpec spec{.kind = OptimizerKind::kSgd, .gradient = Dtype::kF32, .working = Dtype::kF32};
  float gradient = 2, master = 1, working = 0;
  Update(spec, MakeCoefficients(spec, {.learning_rate = 0.25}, 1, 1), {},
         {.n = 1,
          .gradient = reinterpret_cast<const std::byte*>(&gradient),
          .master = &master,
          .moments = {},
          .working = reinterpret_cast<std::byte*>(&working)});
  const bool same = DigestMismatch(DigestsOf(CpuProcessor())).empty();
  std::printf("1 - 0.25 x 2 = %g on %s, self-test %s\n", static_cast<double>(working), ActiveIsa(),
              same ? "passed" : "failed");
  return working == 0.5f && same ? 0 : 1;
}
