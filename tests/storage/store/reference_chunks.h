// The expected content of a chunk store: the same updates on plain vectors by direct kernel calls.
#pragma once

#include <cstring>
#include <deque>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ballast/kernels/kernels.h"
#include "ballast/storage/store/chunk_store.h"
#include "ballast/tests/adamw_step.h"
#include "gtest/gtest.h"

namespace ballast::storage {

inline constexpr uint64_t kMiB = uint64_t{1} << 20;

template <typename T>
bool SameBits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

// AdamW with fp32 moments, bf16 gradients and working parameters. formats_test covers other formats.
inline constexpr size_t kStateArrays = 3;

template <typename T>
absl::Span<std::byte> Bytes(absl::Span<T> values) {
  return {reinterpret_cast<std::byte*>(values.data()), values.size() * sizeof(T)};
}

struct ReferenceChunk {
  explicit ReferenceChunk(uint64_t n) : arrays(kStateArrays, std::vector<float>(n)), working(n) {}
  uint64_t elements() const { return working.size(); }

  void Apply(const ChunkUpdate& update) {
    for (const ChunkUpdate::Values& values : update.values) {
      std::copy(values.values.begin(), values.values.end(), arrays[0].begin() + values.begin);
    }
    for (const ChunkUpdate::SegmentUpdate& segment : update.segments) {
      const auto part = [&](std::vector<float>& array) {
        return absl::MakeSpan(array).subspan(segment.begin, segment.end - segment.begin);
      };
      std::vector<kernels::bf16> ignored(segment.end - segment.begin);
      const auto* gradient = reinterpret_cast<const kernels::bf16*>(update.gradient.data()) + segment.begin;
      AdamwStep(segment.coefficients, {gradient, ignored.size()}, part(arrays[0]), part(arrays[1]), part(arrays[2]),
                absl::MakeSpan(ignored));
    }
    kernels::Bf16FromF32(arrays[0], absl::MakeSpan(working));
  }

  std::vector<std::vector<float>> arrays;  // by StateArray
  std::vector<kernels::bf16> working;
};

// Updates of all chunks, and the memory borrowed by the updates.
class StepUpdates {
 public:
  explicit StepUpdates(uint64_t seed) : random_(seed) {}
  StepUpdates(const StepUpdates&) = delete;

  // Adds initial values, in two parts that meet at an odd element. The end of the chunk stays zero, like padding.
  void AddValues(uint64_t chunk, uint64_t elements) {
    const std::vector<float>& values = floats_.emplace_back(Random<float>(elements - elements / 8));
    const uint64_t middle = values.size() / 2 | 1;
    updates_.push_back({.chunk = chunk});
    updates_.back().values = {{0, absl::MakeSpan(values).subspan(0, middle)},
                              {middle, absl::MakeSpan(values).subspan(middle)}};
  }

  // Adds two segments, each with its own coefficients. Elements between and after the two are absent from the step.
  void AddSegments(uint64_t chunk, uint64_t elements, uint64_t t) {
    const std::vector<kernels::bf16>& gradient = gradients_.emplace_back(Random<kernels::bf16>(elements));
    const uint64_t first = elements / 3 / 256 * 256, second = elements / 2 / 256 * 256;
    updates_.push_back({.chunk = chunk});
    updates_.back().gradient = {reinterpret_cast<const std::byte*>(gradient.data()), 2 * gradient.size()};
    if (first > 0) {
      updates_.back().segments.push_back(
          {0, first, kernels::MakeCoefficients({}, {1e-2, 0.9, 0.999, 1e-8, 0.1}, t, 0.5f)});
    }
    updates_.back().segments.push_back(
        {second, elements - elements / 8, kernels::MakeCoefficients({}, {3e-3, 0.8, 0.95, 1e-6, 0}, t + 3, 1.0f)});
  }

  absl::Span<const ChunkUpdate> updates() const { return updates_; }

  void ApplyTo(std::vector<ReferenceChunk>& reference) const {
    for (const ChunkUpdate& update : updates_) reference[update.chunk].Apply(update);
  }

 private:
  template <typename T>
  std::vector<T> Random(uint64_t n) {
    std::vector<T> values(n);
    for (T& value : values) {
      const float x = static_cast<float>(static_cast<int32_t>(random_())) * 0x1p-31f;
      if constexpr (std::is_same_v<T, float>) {
        value = x;
      } else {
        value = kernels::ToBf16(x);
      }
    }
    return values;
  }

  std::mt19937 random_;
  std::vector<ChunkUpdate> updates_;
  std::deque<std::vector<float>> floats_;  // deques, so that spans into elements stay valid
  std::deque<std::vector<kernels::bf16>> gradients_;
};

// True if reading the whole chunk with the given functions yields `expected`.
template <typename ReadWorking, typename ReadState>
::testing::AssertionResult Holds(const ReferenceChunk& expected, ReadWorking read_working, ReadState read_state) {
  std::vector<kernels::bf16> working(expected.elements());
  if (absl::Status s = read_working(absl::MakeSpan(working)); !s.ok()) return ::testing::AssertionFailure() << s;
  if (!SameBits(working, expected.working)) return ::testing::AssertionFailure() << "working copy differs";
  for (uint64_t i = 0; i < kStateArrays; ++i) {
    std::vector<float> state(expected.elements());
    if (absl::Status s = read_state(static_cast<StateArray>(i), absl::MakeSpan(state)); !s.ok()) {
      return ::testing::AssertionFailure() << s;
    }
    if (!SameBits(state, expected.arrays[i])) return ::testing::AssertionFailure() << "array " << i << " differs";
  }
  return ::testing::AssertionSuccess();
}

inline ::testing::AssertionResult Holds(const ChunkStore& store, uint64_t chunk, const ReferenceChunk& expected) {
  return Holds(
      expected, [&](absl::Span<kernels::bf16> to) { return store.ReadWorking(chunk, 0, Bytes(to)); },
      [&](StateArray array, absl::Span<float> to) { return store.ReadState(chunk, array, 0, to); });
}

inline ::testing::AssertionResult HoldsPinned(const ChunkStore& store, int64_t pin, uint64_t chunk,
                                              const ReferenceChunk& expected) {
  return Holds(
      expected, [&](absl::Span<kernels::bf16> to) { return store.ReadPinnedWorking(pin, chunk, 0, Bytes(to)); },
      [&](StateArray array, absl::Span<float> to) { return store.ReadPinnedState(pin, chunk, array, 0, to); });
}

}  // namespace ballast::storage
