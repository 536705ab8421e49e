// The GPU gives the bits of the CPU.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <random>
#include <vector>

#include "ballast/kernels/cuda/cuda_kernels.h"
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

TEST_F(CudaParityTest, Adamw) {
  for (const size_t n : kSizes) {
    AdamwArrays cpu = AnyAdamwArrays(random_, n);
    const OnDevice gradient(cpu.gradient), working(cpu.working);
    const OnDevice master(cpu.master), moment1(cpu.moment1), moment2(cpu.moment2);
    const AdamwHyper hyper{.learning_rate = 1e-3, .beta1 = 0.9, .beta2 = 0.999, .epsilon = 1e-8, .weight_decay = 0.1};
    for (uint64_t t = 1; t <= 5; ++t) {
      const AdamwCoefficients c = MakeAdamwCoefficients(hyper, t, 0.37f);
      Adamw(c, cpu.gradient, absl::MakeSpan(cpu.master), absl::MakeSpan(cpu.moment1), absl::MakeSpan(cpu.moment2),
            absl::MakeSpan(cpu.working));
      const absl::Status status =
          cuda::Adamw(c, gradient.data(), master.data(), moment1.data(), moment2.data(), working.data(), n, nullptr);
      ASSERT_TRUE(status.ok()) << status;
    }
    ASSERT_EQ(Bits(master.Read()), Bits(cpu.master)) << n;
    ASSERT_EQ(Bits(moment1.Read()), Bits(cpu.moment1)) << n;
    ASSERT_EQ(Bits(moment2.Read()), Bits(cpu.moment2)) << n;
    ASSERT_EQ(working.Read(), cpu.working) << n;
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
