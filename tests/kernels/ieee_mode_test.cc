// Kernels give the release's bits whatever mode their caller's thread is in, and leave it in that.
#include "ballast/kernels/ieee_mode.h"

#include <gtest/gtest.h>

#include <bit>
#include <cfenv>
#include <cstdint>
#include <limits>
#include <string>
#include <thread>
#include <utility>

#include "ballast/kernels/kernels.h"
#include "ballast/kernels/optimizer.h"
#include "ballast/kernels/self_test.h"
#include "ballast/tests/instruction_sets.h"

namespace ballast::kernels {
namespace {

// The processor's control word, and its flags beside rounding. Other processors are tried with roundings alone.
#if defined(__x86_64__)
constexpr uint64_t kFlushToZero = 0x8000, kDenormalsAreZero = 0x40, kControl = 0xffc0, kIeee = 0x1f80;
uint64_t ControlWord() { return _mm_getcsr(); }
void SetControlWord(uint64_t word) { _mm_setcsr(static_cast<uint32_t>(word)); }
#elif defined(__aarch64__)
constexpr uint64_t kFlushToZero = 1 << 24, kFlushFp16ToZero = 1 << 19, kDefaultNan = 1 << 25, kControl = ~uint64_t{0};
constexpr uint64_t kIeee = 0;
uint64_t ControlWord() {
  uint64_t word = 0;
  asm volatile("mrs %0, fpcr" : "=r"(word));
  return word;
}
void SetControlWord(uint64_t word) { asm volatile("msr fpcr, %0" ::"r"(word) : "memory"); }
#else
constexpr uint64_t kFlushToZero = 0, kControl = 0, kIeee = 0;
uint64_t ControlWord() { return 0; }
void SetControlWord(uint64_t) {}
#endif

struct Mode {
  const char* name;
  int rounding = FE_TONEAREST;
  uint64_t flags = 0;
};

constexpr Mode kModes[] = {
    {"ieee"},
    {"flush_to_zero", FE_TONEAREST, kFlushToZero},
#if defined(__x86_64__)
    {"denormals_are_zero", FE_TONEAREST, kDenormalsAreZero},
    {"torch_set_flush_denormal", FE_TONEAREST, kFlushToZero | kDenormalsAreZero},
#elif defined(__aarch64__)
    {"flush_fp16_to_zero", FE_TONEAREST, kFlushFp16ToZero},
    {"default_nan", FE_TONEAREST, kDefaultNan},
#endif
    {"upward", FE_UPWARD},
    {"downward", FE_DOWNWARD},
    {"toward_zero", FE_TOWARDZERO},
};

// The thread's mode while it lives.
class CallersMode {
 public:
  explicit CallersMode(const Mode& mode) {
    std::fegetenv(&before_);
    std::fesetround(mode.rounding);
    SetControlWord(ControlWord() | mode.flags);
  }
  ~CallersMode() { std::fesetenv(&before_); }

 private:
  std::fenv_t before_;
};

// Shows the caller's floating-point mode: half of a denormal is 0 where denormals are flushed, and the sum's last bit
// tells the rounding.
std::pair<float, float> Shown() {
  volatile float denormal = std::numeric_limits<float>::denorm_min() * 4, one = 1, less = 0x1p-30f;
  return {denormal * 0.5f, one + less};
}

// `function`, called in that mode; it must come back in it.
template <typename Result, typename... Arguments>
std::function<Result(Arguments...)> Under(const Mode& mode, std::function<Result(Arguments...)> function) {
  return [mode, function = std::move(function)](Arguments... arguments) -> Result {
    const CallersMode callers(mode);
    const auto before = Shown();
    if constexpr (std::is_void_v<Result>) {
      function(arguments...);
      EXPECT_EQ(Shown(), before);
    } else {
      const Result result = function(arguments...);
      EXPECT_EQ(Shown(), before);
      return result;
    }
  };
}

class KernelsInMode : public InstructionSetTest {};

TEST_P(KernelsInMode, GiveTheBitsOfTheRelease) {
  for (const Mode& mode : kModes) {
    SCOPED_TRACE(mode.name);
    Processor processor = CpuProcessor();
    processor.update = Under(mode, std::move(processor.update));
    processor.squared_norm = Under(mode, std::move(processor.squared_norm));
    processor.from_f32 = Under(mode, std::move(processor.from_f32));
    processor.to_f32 = Under(mode, std::move(processor.to_f32));
    processor.add_into = Under(mode, std::move(processor.add_into));
    processor.quantize = Under(mode, std::move(processor.quantize));
    processor.dequantize = Under(mode, std::move(processor.dequantize));
    EXPECT_EQ(DigestMismatch(DigestsOf(processor)), "");
    const CallersMode callers(mode);
    EXPECT_EQ(DigestMismatch(DigestsOf(CpuProcessor())), "");
  }
}

INSTANTIATE_TEST_SUITE_P(Isa, KernelsInMode, testing::ValuesIn(InstructionSets()), InstructionSetName);

TEST(CoefficientsInMode, AreTheSame) {
  // fp32 denormals, and quotients that are rounded.
  const Hyper hyper{.learning_rate = 1e-40,
                    .beta1 = 0.9,
                    .beta2 = 0.999,
                    .epsilon = 1e-41,
                    .weight_decay = 1e-39,
                    .beta3 = 0.9999,
                    .alpha = 1e-38,
                    .average = 1e-40};
  for (const OptimizerKind kind :
       {OptimizerKind::kAdamw, OptimizerKind::kAdam, OptimizerKind::kSgd, OptimizerKind::kAdagrad, OptimizerKind::kLion,
        OptimizerKind::kAdemamix, OptimizerKind::kAdamwScheduleFree}) {
    const OptimizerSpec spec{.kind = kind, .momentum = kind == OptimizerKind::kSgd};
    const Coefficients expected = MakeCoefficients(spec, hyper, 3, 0.37f);
    EXPECT_GT(expected.step_size, 0);
    for (const Mode& mode : kModes) {
      SCOPED_TRACE(mode.name);
      Coefficients came;
      {
        const CallersMode callers(mode);
        came = MakeCoefficients(spec, hyper, 3, 0.37f);
      }
      for (const auto member :
           {&Coefficients::factor, &Coefficients::weight_decay, &Coefficients::take1, &Coefficients::keep1,
            &Coefficients::keep, &Coefficients::take2, &Coefficients::keep2, &Coefficients::step_size,
            &Coefficients::root_scale, &Coefficients::eps, &Coefficients::start, &Coefficients::take3}) {
        EXPECT_EQ(std::bit_cast<uint32_t>(came.*member), std::bit_cast<uint32_t>(expected.*member));
      }
    }
  }
}

// Why a server's threads are no shelter: they are made by the trainer's.
TEST(IeeeMode, IsNotWhatAThreadIsBornWith) {
  if (kFlushToZero == 0) GTEST_SKIP() << "flags of x86 and Arm are tried";
  const CallersMode callers({.name = "flush_to_zero", .flags = kFlushToZero});
  uint64_t born = 0, within = 0;
  std::thread([&] {
    born = ControlWord();
    const IeeeMode mode;
    within = ControlWord();
  }).join();
  EXPECT_NE(born & kFlushToZero, 0u);
  EXPECT_EQ(within & kControl, kIeee);
}

}  // namespace
}  // namespace ballast::kernels
