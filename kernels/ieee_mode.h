// The floating-point mode in which the kernels' bits are defined: round to nearest, denormals kept, no traps. A thread
// inherits its mode from the thread that made it, and callers may have changed the mode by torch.set_flush_denormal,
// fesetround, or a library built with -ffast-math. So every function that computes sets the mode for itself, on any
// thread, and restores the caller's mode.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#elif !defined(__aarch64__)
#include <cfenv>
#endif

namespace ballast::kernels {

#if defined(__x86_64__) || defined(__aarch64__)

// Sets the thread's mode while the object lives. Costs a few nanoseconds, and writes no register where the mode is
// right. Read inputs through references after the constructor, so that no compiler computes with them before the mode
// is set.
class IeeeMode {
 public:
  IeeeMode() : callers_(Read()) {
    if (differs()) Write(kDefault);
  }
  ~IeeeMode() {
    if (differs()) Write(callers_);
  }
  IeeeMode(const IeeeMode&) = delete;
  IeeeMode& operator=(const IeeeMode&) = delete;

 private:
#if defined(__x86_64__)
  // MXCSR: flush to zero, rounding, exceptions' masks, denormals are zero; the low bits are status flags.
  using Word = uint32_t;
  static constexpr Word kControl = 0xffc0, kDefault = 0x1f80;
  static Word Read() { return _mm_getcsr(); }
  static void Write(Word word) {
    asm volatile("" ::: "memory");
    _mm_setcsr(word);
    asm volatile("" ::: "memory");
  }
#else
  // FPCR holds control bits alone, all 0 by default.
  using Word = uint64_t;
  static constexpr Word kControl = ~Word{0}, kDefault = 0;
  static Word Read() {
    Word word = 0;
    asm volatile("mrs %0, fpcr" : "=r"(word));
    return word;
  }
  static void Write(Word word) { asm volatile("msr fpcr, %0" ::"r"(word) : "memory"); }
#endif
  bool differs() const { return (callers_ & kControl) != kDefault; }

  const Word callers_;
};

#else

class IeeeMode {
 public:
  IeeeMode() {
    std::fegetenv(&callers_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~IeeeMode() { std::fesetenv(&callers_); }
  IeeeMode(const IeeeMode&) = delete;
  IeeeMode& operator=(const IeeeMode&) = delete;

 private:
  std::fenv_t callers_;
};

#endif

}  // namespace ballast::kernels
