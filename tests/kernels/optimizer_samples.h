// Inputs of Update() with every class of float, for every optimizer.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <random>
#include <string>
#include <vector>

#include "ballast/kernels/optimizer.h"
#include "ballast/tests/kernels/samples.h"

namespace ballast::kernels {

// Random tuples per rule and moment format.
#ifndef BALLAST_PARITY_TUPLES
#define BALLAST_PARITY_TUPLES 10'000'000
#endif
inline constexpr uint64_t kTuples = BALLAST_PARITY_TUPLES;

// Memory at multiples of 64 bytes, like a server's.
template <typename T>
struct CacheLineAllocator {
  using value_type = T;
  CacheLineAllocator() = default;
  template <typename U>
  CacheLineAllocator(const CacheLineAllocator<U>&) {}  // NOLINT: allocators convert
  T* allocate(size_t n) { return static_cast<T*>(::operator new (n * sizeof(T), std::align_val_t{64})); }
  void deallocate(T* p, size_t) { ::operator delete (p, std::align_val_t{64}); }
  friend bool operator==(CacheLineAllocator, CacheLineAllocator) { return true; }
};

// Memory of one update, with guard bytes behind every array.
class UpdateArrays {
 public:
  static constexpr size_t kGuard = 64;

  // `shift`, 0 or 4: bytes by which the working parameters miss an alignment of 64. Aligned ones are written past the
  // caches.
  UpdateArrays(const OptimizerSpec& spec, uint64_t n, size_t shift = 0) : spec_(spec), n_(n), shift_(shift) {
    gradient_.resize(n * ElementBytes(spec.gradient) + kGuard, std::byte{0xa5});
    master_.resize(n + kGuard, -1.5f);
    working_.resize(BytesOf(spec.working, n) + kGuard, std::byte{0xa5});
    for (auto& values : values_) values.resize(MomentBytes(spec.moments, n) + kGuard, std::byte{0xa5});
    for (auto& scales : scales_) scales.resize(MomentScaleBytes(spec.moments, n) / sizeof(float) + kGuard, -1.5f);
  }

  // Fills the arrays in blocks of three kinds: values as in training, any finite values, or any bits.
  void Fill(std::mt19937_64& random) {
    std::vector<float> x(n_);
    for (uint64_t begin = 0; begin < n_; begin += kMomentBlock) {
      const uint64_t end = std::min(n_, begin + kMomentBlock);
      const uint64_t kind = random() % 4;
      const float size = std::ldexp(1.0f, -static_cast<int>(random() % 40));
      const auto draw = [&] {
        return kind == 0   ? AnyFloat(random)
               : kind == 1 ? AnyFloat(random, true)
                           : size * (static_cast<float>(random() % 65536) / 32768 - 1);
      };
      for (uint64_t i = begin; i < end; ++i) x[i] = draw(), master_[i] = draw();
      for (int k = 0; k < kMomentsMax; ++k) FillMoment(random, draw, begin, end, k);
    }
    std::vector<std::byte>& g = gradient_;
    for (uint64_t i = 0; i < n_; ++i) {
      const uint16_t half = spec_.gradient == Dtype::kBf16 ? ToBf16(x[i]) : ToF16(x[i]);
      if (spec_.gradient == Dtype::kF32)
        std::memcpy(g.data() + 4 * i, &x[i], 4);
      else
        std::memcpy(g.data() + 2 * i, &half, 2);
    }
  }

  UpdateSpan span() {
    UpdateSpan s{.n = n_,
                 .gradient = gradient_.data(),
                 .master = master_.data(),
                 .moments = {},
                 .working = working_.data() + shift_};
    for (size_t k = 0; k < kMomentsMax; ++k) s.moments[k] = {values_[k].data(), scales_[k].data()};
    return s;
  }

  // The arrays written by an update, guards included, in the order master, working, moments with scales.
  std::vector<absl::Span<std::byte>> written() {
    const auto bytes = [](std::vector<float>& v) {
      return absl::MakeSpan(reinterpret_cast<std::byte*>(v.data()), v.size() * sizeof(float));
    };
    std::vector<absl::Span<std::byte>> all = {bytes(master_), absl::MakeSpan(working_)};
    for (int k = 0; k < kMomentsMax; ++k) all.push_back(absl::MakeSpan(values_[k])), all.push_back(bytes(scales_[k]));
    return all;
  }
  absl::Span<const std::byte> gradient() const { return gradient_; }

  // Compares every array written by an update, guards included.
  friend inline void ExpectSameBits(const UpdateArrays& a, const UpdateArrays& b, const std::string& what) {
    ASSERT_EQ(std::memcmp(a.master_.data(), b.master_.data(), a.master_.size() * sizeof(float)), 0)
        << what << " master";
    ASSERT_EQ(a.working_, b.working_) << what;
    for (int k = 0; k < kMomentsMax; ++k) {
      ASSERT_EQ(std::memcmp(a.values_[k].data(), b.values_[k].data(), a.values_[k].size()), 0)
          << what << " moment " << k;
      ASSERT_EQ(std::memcmp(a.scales_[k].data(), b.scales_[k].data(), a.scales_[k].size() * sizeof(float)), 0)
          << what << " scales " << k;
    }
  }

 private:
  template <typename Draw>
  void FillMoment(std::mt19937_64& random, const Draw& draw, uint64_t begin, uint64_t end, int k) {
    if (MomentScaleBytes(spec_.moments, 1) != 0) scales_[k][begin / kMomentBlock] = std::fabs(draw());
    for (uint64_t i = begin; i < end; ++i) {
      // A second moment is mostly not negative.
      float x = draw();
      if (IsSecondMoment(spec_, k)) x = random() % 64 == 0 ? x : std::fabs(x);
      const uint16_t half = ToBf16(x);
      if (spec_.moments == MomentFormat::kF32)
        std::memcpy(values_[k].data() + 4 * i, &x, 4);
      else if (spec_.moments == MomentFormat::kBf16)
        std::memcpy(values_[k].data() + 2 * i, &half, 2);
      else
        values_[k][i] = static_cast<std::byte>(random());
    }
  }

  OptimizerSpec spec_;
  uint64_t n_;
  size_t shift_;
  std::vector<std::byte> gradient_;
  std::vector<std::byte, CacheLineAllocator<std::byte>> working_;
  std::vector<float> master_;
  std::vector<std::byte> values_[kMomentsMax];
  std::vector<float> scales_[kMomentsMax];
};

struct NamedSpec {
  const char* name;
  OptimizerSpec spec;
};

inline std::vector<NamedSpec> Rules() {
  std::vector<NamedSpec> rules;
  const auto add = [&rules](const char* name, OptimizerKind kind, bool amsgrad, bool momentum, bool nesterov) {
    rules.push_back({name, {.kind = kind, .amsgrad = amsgrad, .momentum = momentum, .nesterov = nesterov}});
  };
  add("adamw", OptimizerKind::kAdamw, false, false, false);
  add("adamw amsgrad", OptimizerKind::kAdamw, true, false, false);
  add("adam", OptimizerKind::kAdam, false, false, false);
  add("adam amsgrad", OptimizerKind::kAdam, true, false, false);
  add("sgd", OptimizerKind::kSgd, false, false, false);
  add("sgd momentum", OptimizerKind::kSgd, false, true, false);
  add("sgd nesterov", OptimizerKind::kSgd, false, true, true);
  add("adagrad", OptimizerKind::kAdagrad, false, false, false);
  add("lion", OptimizerKind::kLion, false, false, false);
  add("ademamix", OptimizerKind::kAdemamix, false, false, false);
  add("adamw schedule-free", OptimizerKind::kAdamwScheduleFree, false, false, false);
  return rules;
}

inline constexpr MomentFormat kFormats[] = {MomentFormat::kF32, MomentFormat::kBf16, MomentFormat::kI8,
                                            MomentFormat::kF8};
// Those that a rule takes.
inline std::vector<MomentFormat> FormatsOf(OptimizerSpec spec) {
  std::vector<MomentFormat> formats;
  for (const MomentFormat format : kFormats) {
    spec.moments = format;
    if (Unsupported(spec).empty()) formats.push_back(format);
  }
  return formats;
}

inline Hyper AnyHyper(std::mt19937_64& random) {
  const auto one_of = [&random](std::initializer_list<double> values) {
    return values.begin()[random() % values.size()];
  };
  return {.learning_rate = one_of({1e-3, 3e-5, 0.1}),
          .beta1 = one_of({0.9, 0.0, 0.95}),
          .beta2 = one_of({0.999, 0.95, 0.99}),
          .epsilon = one_of({1e-8, 1e-15, 1e-3}),
          .weight_decay = one_of({0, 0.1, 1e-4}),
          .dampening = one_of({0, 0.5}),
          .learning_rate_decay = one_of({0, 1e-3}),
          .initial_accumulator = one_of({0, 0.1}),
          .maximize = random() % 4 == 0,
          .beta3 = one_of({0.9999, 0.9, 0.0}),
          .alpha = one_of({5, 0, 0.25}),
          .average = one_of({1, 0.5, 1e-4, 0})};
}

}  // namespace ballast::kernels
