// The GPU gives the bits of the CPU.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <random>
#include <vector>

#include "ballast/kernels/cuda/cuda_kernels.h"
#include "ballast/kernels/cuda/device_processor.h"
#include "ballast/tests/kernels/optimizer_samples.h"
#include "ballast/tests/kernels/samples.h"

namespace ballast::kernels {
namespace {

constexpr size_t kSizes[] = {1, 7, 255, 256, 257, 1025, 4099, 100000, 1 << 20};

// Device memory with the contents of a vector.
template <typename T>
class OnDevice {
 public:
  explicit OnDevice(const std::vector<T>& values) : count_(values.size()) {
    EXPECT_EQ(cudaMalloc(reinterpret_cast<void**>(&data_), count_ * sizeof(T)), cudaSuccess);
    EXPECT_EQ(cudaMemcpy(data_, values.data(), count_ * sizeof(T), cudaMemcpyHostToDevice), cudaSuccess);
  }
  ~OnDevice() { cudaFree(data_); }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;
  T* data() const { return data_; }
  std::vector<T> Read() const {
    std::vector<T> values(count_);
    EXPECT_EQ(cudaMemcpy(values.data(), data_, count_ * sizeof(T), cudaMemcpyDeviceToHost), cudaSuccess);
    return values;
  }

 private:
  T* data_ = nullptr;
  size_t count_;
};

class CudaParityTest : public testing::Test {
 protected:
  std::mt19937_64 random_{11};
};

// A copy of an update's arrays in device memory.
class UpdateOnDevice {
 public:
  UpdateOnDevice(UpdateArrays* host, const OptimizerSpec& spec) : host_(host), spec_(spec) {
    gradient_ = Copy(host->gradient());
    for (const auto array : host->written()) written_.push_back(Copy(array));
  }
  ~UpdateOnDevice() {
    cudaFree(gradient_);
    for (std::byte* array : written_) cudaFree(array);
  }
  UpdateOnDevice(const UpdateOnDevice&) = delete;
  UpdateOnDevice& operator=(const UpdateOnDevice&) = delete;

  UpdateSpan span(uint64_t n) const {
    UpdateSpan s{.n = n,
                 .gradient = gradient_,
                 .master = reinterpret_cast<float*>(written_[0]),
                 .moments = {},
                 .working = written_[1]};
    for (size_t k = 0; k < kMomentsMax; ++k)
      s.moments[k] = {written_[2 + 2 * k], reinterpret_cast<float*>(written_[3 + 2 * k])};
    return s;
  }
  // Into the host's arrays.
  void Read() const {
    const auto arrays = host_->written();
    for (size_t i = 0; i < arrays.size(); ++i) {
      EXPECT_EQ(cudaMemcpy(arrays[i].data(), written_[i], arrays[i].size(), cudaMemcpyDeviceToHost), cudaSuccess);
    }
  }

 private:
  static std::byte* Copy(absl::Span<const std::byte> from) {
    void* to = nullptr;
    EXPECT_EQ(cudaMalloc(&to, from.size()), cudaSuccess);
    EXPECT_EQ(cudaMemcpy(to, from.data(), from.size(), cudaMemcpyHostToDevice), cudaSuccess);
    return static_cast<std::byte*>(to);
  }
  UpdateArrays* host_;
  OptimizerSpec spec_;
  std::byte* gradient_;
  std::vector<std::byte*> written_;
};

class CudaUpdateParityTest : public CudaParityTest {
 protected:
  // Two updates of the same arrays on both, the second of what the first wrote.
  void Compare(const NamedSpec& named, uint64_t n) {
    UpdateArrays cpu(named.spec, n);
    cpu.Fill(random_);
    UpdateArrays gpu = cpu;
    const UpdateOnDevice device(&gpu, named.spec);
    for (uint64_t t = 1; t <= 2; ++t) {
      const Coefficients c = MakeCoefficients(named.spec, AnyHyper(random_), t, t == 1 ? 1.0f : 0.37f);
      const RandomKey key{.seed = random_(),
                          .unit = static_cast<uint32_t>(random_() >> 34),
                          .step = random_(),
                          .first_element = (random_() >> 12) * kMomentBlock};
      Update(named.spec, c, key, cpu.span());
      const absl::Status status = cuda::Update(named.spec, c, key, device.span(n), nullptr);
      ASSERT_TRUE(status.ok()) << status;
    }
    device.Read();
    ASSERT_NO_FATAL_FAILURE(ExpectSameBits(cpu, gpu, std::string(named.name) + " n=" + std::to_string(n)));
  }
};

TEST_F(CudaUpdateParityTest, EveryRuleAndMomentFormat) {
  for (NamedSpec rule : Rules()) {
    for (const MomentFormat format : kFormats) {
      rule.spec.moments = format;
      SCOPED_TRACE(testing::Message() << rule.name << " format " << static_cast<int>(format));
      constexpr uint64_t kEach = 250'007;
      for (uint64_t done = 0; done < kTuples; done += 2 * kEach) ASSERT_NO_FATAL_FAILURE(Compare(rule, kEach));
      for (const uint64_t n : {1, 7, 8, 255, 256, 257, 1025}) ASSERT_NO_FATAL_FAILURE(Compare(rule, n));
    }
  }
}

TEST_F(CudaUpdateParityTest, EveryGradientAndWorkingDtype) {
  for (NamedSpec rule : Rules()) {
    for (const Dtype gradient : {Dtype::kF32, Dtype::kBf16, Dtype::kF16}) {
      for (const Dtype working : {Dtype::kF32, Dtype::kBf16, Dtype::kF16}) {
        rule.spec.gradient = gradient, rule.spec.working = working;
        ASSERT_NO_FATAL_FAILURE(Compare(rule, 100'003));
      }
    }
  }
}

TEST_F(CudaParityTest, SquaredNorm) {
  for (const size_t n : kSizes) {
    std::vector<bf16> x(n);
    for (bf16& b : x) b = static_cast<bf16>(std::bit_cast<uint32_t>(AnyFloat(random_, /*finite=*/true)) >> 16);
    for (const bool bad : {false, true}) {
      if (bad) x[random_() % n] = 0x7f80;
      const NormResult cpu = SquaredNorm(x);
      const OnDevice gradient(x);
      const OnDevice leaves(std::vector<double>((n + 255) / 256));
      const OnDevice result(std::vector<cuda::DeviceNorm>(1));
      const absl::Status status = cuda::SquaredNorm(gradient.data(), n, leaves.data(), result.data(), nullptr);
      ASSERT_TRUE(status.ok()) << status;
      const cuda::DeviceNorm gpu = result.Read()[0];
      ASSERT_EQ(gpu.finite, cpu.finite ? 1u : 0u) << n;
      ASSERT_EQ(std::bit_cast<uint64_t>(gpu.squared_norm), std::bit_cast<uint64_t>(cpu.squared_norm)) << n;
    }
  }
}

TEST_F(CudaParityTest, Bf16FromF32) {
  for (const size_t n : kSizes) {
    std::vector<float> from(n);
    for (float& x : from) x = AnyFloat(random_);
    std::vector<bf16> cpu(n);
    Bf16FromF32(from, absl::MakeSpan(cpu));
    const OnDevice source(from);
    const OnDevice target(std::vector<bf16>(n, 0));
    const absl::Status status = cuda::Bf16FromF32(source.data(), target.data(), n, nullptr);
    ASSERT_TRUE(status.ok()) << status;
    ASSERT_EQ(target.Read(), cpu) << n;
  }
}

TEST(CudaSelfTest, GivesTheBitsOfTheRelease) {
  absl::Status status;
  EXPECT_EQ(DigestMismatch(DigestsOf(cuda::DeviceProcessor(&status))), "");
  EXPECT_TRUE(status.ok()) << status;
}

}  // namespace
}  // namespace ballast::kernels

// Instead of gtest_main's: a run without a GPU must show as skipped, not as passed.
int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  int devices = 0;
  const cudaError_t error = cudaGetDeviceCount(&devices);
  if (error != cudaSuccess || devices == 0) {
    std::fprintf(stderr, "SKIPPED: no GPU here (%s)\n", cudaGetErrorString(error));
    return 77;
  }
  return RUN_ALL_TESTS();
}
