// The GPU gives the bits of the CPU.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <bit>
#include <cstdio>
#include <cstring>
#include <deque>
#include <limits>
#include <random>
#include <vector>

#include "ballast/kernels/cuda/cuda_kernels.h"
#include "ballast/kernels/cuda/device_processor.h"
#include "ballast/tests/kernels/optimizer_samples.h"
#include "ballast/tests/kernels/samples.h"

namespace ballast::kernels {
namespace {

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
  RandomKey AnyKey() {
    return {.seed = random_(),
            .unit = static_cast<uint32_t>(random_() >> 34),
            .step = random_(),
            .first_element = (random_() >> 12) * kMomentBlock};
  }
  // Two updates of the same arrays on both, the second of what the first wrote.
  void Compare(const NamedSpec& named, uint64_t n) {
    UpdateArrays cpu(named.spec, n);
    cpu.Fill(random_);
    UpdateArrays gpu = cpu;
    const UpdateOnDevice device(&gpu, named.spec);
    for (uint64_t t = 1; t <= 2; ++t) {
      const Coefficients c = MakeCoefficients(named.spec, AnyHyper(random_), t, t == 1 ? 1.0f : 0.37f);
      const RandomKey key = AnyKey();
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
    for (const MomentFormat format : FormatsOf(rule.spec)) {
      rule.spec.moments = format;
      SCOPED_TRACE(testing::Message() << rule.name << " format " << static_cast<int>(format));
      constexpr uint64_t kEach = 250'007;
      for (uint64_t done = 0; done < kTuples; done += 2 * kEach) ASSERT_NO_FATAL_FAILURE(Compare(rule, kEach));
      for (const uint64_t n : {1, 7, 8, 255, 256, 257, 1025}) ASSERT_NO_FATAL_FAILURE(Compare(rule, n));
    }
  }
}

// The tensors of a chunk, in one call: more than a launch takes, of odd lengths, empty ones too, with coefficients of
// their own. Those without momentum ask for another loop than their neighbours.
TEST_F(CudaUpdateParityTest, ManySpansOfOneCall) {
  for (NamedSpec rule : Rules()) {
    for (const MomentFormat format : FormatsOf(rule.spec)) {
      rule.spec.moments = format;
      std::vector<UpdateArrays> cpu, gpu;
      for (size_t i = 0; i < 2 * cuda::kUpdatePartsMax + 9; ++i) {
        cpu.emplace_back(rule.spec, i == 5 ? 100'003 : i % 7 == 0 ? i % 2 : random_() % 3000).Fill(random_);
      }
      gpu = cpu;
      std::deque<UpdateOnDevice> device;
      for (UpdateArrays& arrays : gpu) device.emplace_back(&arrays, rule.spec);
      for (uint64_t t = 1; t <= 2; ++t) {
        std::vector<cuda::UpdatePart> parts;
        for (size_t i = 0; i < cpu.size(); ++i) {
          Hyper hyper = AnyHyper(random_);
          hyper.beta1 = i >= 30 && i < 35 ? 0 : 0.9;
          const UpdateSpan span = cpu[i].span();
          parts.push_back({.coefficients = MakeCoefficients(rule.spec, hyper, t + i, t == 1 ? 1.0f : 0.37f),
                           .key = AnyKey(),
                           .span = device[i].span(span.n)});
          Update(rule.spec, parts[i].coefficients, parts[i].key, span);
        }
        const absl::StatusOr<uint64_t> launches = cuda::Update(rule.spec, parts, nullptr);
        ASSERT_TRUE(launches.ok()) << launches.status();
        EXPECT_EQ(*launches, rule.spec.momentum ? 4u : 3u) << "the loop changes twice, within the second launch";
      }
      for (size_t i = 0; i < cpu.size(); ++i) {
        device[i].Read();
        ASSERT_NO_FATAL_FAILURE(ExpectSameBits(cpu[i], gpu[i], rule.name + (" span " + std::to_string(i))));
      }
    }
  }
}

TEST_F(CudaUpdateParityTest, EveryGradientAndWorkingDtype) {
  for (NamedSpec rule : Rules()) {
    for (const Dtype gradient : {Dtype::kF32, Dtype::kBf16, Dtype::kF16}) {
      for (const Dtype working : {Dtype::kF32, Dtype::kBf16, Dtype::kF16, Dtype::kE4m3Blocks}) {
        rule.spec.gradient = gradient, rule.spec.working = working;
        ASSERT_NO_FATAL_FAILURE(Compare(rule, 100'003));
      }
    }
  }
}

// Everything else: both processors by the same calls, on the host's arrays.
class CudaFunctionsTest : public CudaParityTest {
 protected:
  std::vector<float> Floats(size_t n, bool finite = false) {
    std::vector<float> x(n);
    for (float& value : x) value = AnyFloat(random_, finite);
    return x;
  }
  std::vector<std::byte> As(Dtype dtype, const std::vector<float>& x) {
    std::vector<std::byte> bytes(BytesOf(dtype, x.size()));
    FromF32(x, dtype, bytes.data());
    return bytes;
  }

  absl::Status status_;
  const Processor gpu_ = cuda::DeviceProcessor(&status_);
  const Processor cpu_ = CpuProcessor();
};

constexpr Dtype kDtypes[] = {Dtype::kF32, Dtype::kBf16, Dtype::kF16, Dtype::kE4m3, Dtype::kE5m2, Dtype::kE4m3Blocks};
constexpr size_t kFunctionSizes[] = {1, 7, 255, 256, 257, 1023, 1024, 1025, 4099, 100000, 1 << 20, kTuples};

TEST_F(CudaFunctionsTest, SquaredNorm) {
  for (const Dtype dtype : {Dtype::kF32, Dtype::kBf16, Dtype::kF16}) {
    for (const size_t n : kFunctionSizes) {
      std::vector<float> x = Floats(n, true);
      for (const bool bad : {false, true}) {
        if (bad) x[random_() % n] = std::numeric_limits<float>::infinity();
        const std::vector<std::byte> bytes = As(dtype, x);
        const NormResult cpu = cpu_.squared_norm(dtype, bytes.data(), n),
                         gpu = gpu_.squared_norm(dtype, bytes.data(), n);
        ASSERT_TRUE(status_.ok()) << status_;
        ASSERT_EQ(gpu.finite, cpu.finite) << n;
        ASSERT_EQ(std::bit_cast<uint64_t>(gpu.squared_norm), std::bit_cast<uint64_t>(cpu.squared_norm)) << n;
      }
    }
  }
}

TEST_F(CudaFunctionsTest, ConversionsAndSums) {
  for (const Dtype dtype : kDtypes) {
    for (const size_t n : kFunctionSizes) {
      const std::vector<float> x = Floats(n);
      const std::vector<std::byte> cpu = As(dtype, x);
      std::vector<std::byte> gpu(cpu.size());
      gpu_.from_f32(x, dtype, gpu.data());
      ASSERT_TRUE(status_.ok()) << status_;
      ASSERT_EQ(gpu, cpu) << n << " from_f32 " << static_cast<int>(dtype);
      std::vector<float> cpu_wide(n), gpu_wide(n), sum = Floats(n), gpu_sum = sum;
      cpu_.to_f32(dtype, cpu.data(), absl::MakeSpan(cpu_wide));
      gpu_.to_f32(dtype, cpu.data(), absl::MakeSpan(gpu_wide));
      ASSERT_EQ(std::memcmp(cpu_wide.data(), gpu_wide.data(), n * sizeof(float)), 0) << n;
      if (dtype == Dtype::kE4m3Blocks) continue;  // no gradient
      cpu_.add_into(dtype, cpu.data(), absl::MakeSpan(sum));
      gpu_.add_into(dtype, cpu.data(), absl::MakeSpan(gpu_sum));
      ASSERT_TRUE(status_.ok()) << status_;
      ASSERT_EQ(std::memcmp(sum.data(), gpu_sum.data(), n * sizeof(float)), 0) << n;
    }
  }
}

TEST_F(CudaFunctionsTest, Quantizers) {
  for (const QuantFormat format : {QuantFormat::kInt8, QuantFormat::kInt4}) {
    for (const Dtype dtype : {Dtype::kF32, Dtype::kBf16, Dtype::kF16}) {
      for (const size_t n : kFunctionSizes) {
        const std::vector<std::byte> x = As(dtype, Floats(n, random_() % 2 == 0));
        std::vector<std::byte> cpu(QuantBytes(format, n)), gpu(cpu.size()), cpu_back(x.size()), gpu_back(x.size());
        std::vector<float> cpu_scales(QuantScales(n)), gpu_scales(cpu_scales.size());
        cpu_.quantize(format, dtype, x.data(), n, cpu.data(), cpu_scales.data());
        gpu_.quantize(format, dtype, x.data(), n, gpu.data(), gpu_scales.data());
        ASSERT_TRUE(status_.ok()) << status_;
        ASSERT_EQ(gpu, cpu) << n;
        ASSERT_EQ(std::memcmp(cpu_scales.data(), gpu_scales.data(), cpu_scales.size() * sizeof(float)), 0) << n;
        cpu_.dequantize(format, cpu.data(), cpu_scales.data(), n, dtype, cpu_back.data());
        gpu_.dequantize(format, cpu.data(), cpu_scales.data(), n, dtype, gpu_back.data());
        ASSERT_TRUE(status_.ok()) << status_;
        ASSERT_EQ(gpu_back, cpu_back) << n;
      }
    }
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
