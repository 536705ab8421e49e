// Calls of the GPU tier to CUDA.
#include <future>
#include <thread>

#include "ballast/kernels/cuda/cuda_kernels.h"
#include "ballast/proto/base/status.h"
#include "ballast/storage/tier/dram_tier.h"
#include "ballast/tests/cuda_double/cuda_double.h"
#include "ballast/tests/storage/store/store_on_tiers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ballast::storage {
namespace {

constexpr TierBytes kRoom = {.hbm = 64 * kMiB, .dram = 64 * kMiB, .nvme = 0};

class HbmTierDoubleTest : public testing::Test {
 protected:
  // A store with one chunk in HBM.
  void Open(uint64_t elements, TierKind working, TiersOptions options = {.budget = kRoom}) {
    options.directory = directory_.path();
    auto tiers = Tiers::Open(options);
    ASSERT_TRUE(tiers.ok()) << tiers.status();
    tiers_ = *std::move(tiers);
    store_ = std::make_unique<ChunkStore>(tiers_.get(), kernels::OptimizerSpec());
    Plan plan;
    plan.chunks.push_back({.state = TierKind::kHbm, .working = working});
    const absl::Status added = store_->Add(std::vector<uint64_t>{elements}, plan);
    ASSERT_TRUE(added.ok()) << added;
  }
  absl::Status RunValues(uint64_t elements) {
    StepUpdates step(1);
    step.AddValues(0, elements);
    return store_->Run(step.updates(), [](size_t) {});
  }

  ScratchDirectory directory_;
  std::unique_ptr<Tiers> tiers_;
  std::unique_ptr<ChunkStore> store_;
};

TEST_F(HbmTierDoubleTest, ARefusedPageLockDoesNotFailTheNextConversion) {
  Open(65536, TierKind::kHbm);
  cuda_double::RefusePageLocks();
  const auto block = tiers_->dram()->Allocate(kMiB, "test");
  ASSERT_TRUE(block.ok()) << block.status();
  EXPECT_EQ(cuda_double::counts().refused_page_locks, 1u);
  const absl::Status status = RunValues(65536);
  EXPECT_TRUE(status.ok()) << status;
}

TEST_F(HbmTierDoubleTest, AServersContextIsOnItsGpuAlone) {
  Open(65536, TierKind::kHbm, {.budget = kRoom, .hbm_device = 1});
  // Like a server's short-lived threads: the first allocates memory, the second frees it.
  std::optional<DramBlock> block;
  std::thread([&] { block = *tiers_->dram()->Allocate(kMiB, "test"); }).join();
  std::thread([&] { block.reset(); }).join();
  std::thread([&] { EXPECT_TRUE(RunValues(65536).ok()); }).join();
  EXPECT_THAT(cuda_double::contexts(), testing::ElementsAre(1));
  std::thread([&] { store_.reset(), tiers_.reset(); }).join();
  EXPECT_THAT(cuda_double::contexts(), testing::ElementsAre(1));
}

TEST_F(HbmTierDoubleTest, AGpuWithoutMemoryPoolsIsNamedAsSuch) {
  cuda_double::Begin({.memory_pools = false});
  const absl::Status status = Tiers::Open({.budget = kRoom, .directory = directory_.path()}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(model::ReasonOf(status), model::kBadConfig);
  EXPECT_THAT(std::string(status.message()), testing::HasSubstr("memory pools"));
}

// A chunk of many small tensors, whose working copies go to the host.
TEST_F(HbmTierDoubleTest, AnUpdateOfManySmallTensorsWaitsOnce) {
  constexpr uint64_t kTensors = 200, kElements = 1000, kPlace = 1024;
  Open(kTensors * kPlace, TierKind::kDram);
  ASSERT_TRUE(RunValues(kTensors * kPlace).ok());
  const std::vector<kernels::bf16> gradient(kTensors * kPlace, kernels::ToBf16(0.5f));
  ChunkUpdate update{.chunk = 0};
  update.gradient = {reinterpret_cast<const std::byte*>(gradient.data()), 2 * gradient.size()};
  for (uint64_t i = 0; i < kTensors; ++i) {
    const auto coefficients = kernels::MakeCoefficients({}, {1e-2, 0.9, 0.999, 1e-8, 0.1}, 1, 1.0f);
    update.segments.push_back({i * kPlace, i * kPlace + kElements, coefficients});
  }
  const GpuCounters& gpu = tiers_->hbm()->counters();
  const uint64_t kernels = gpu.kernels, in_copies = gpu.in.count, in_bytes = gpu.in.bytes, out_bytes = gpu.out.bytes;
  const int64_t waited = gpu.update_wait_nanoseconds;
  const cuda_double::Counts before = cuda_double::counts();
  ASSERT_EQ(store_->Run({&update, 1}, [](size_t) {}), absl::OkStatus());
  const cuda_double::Counts after = cuda_double::counts();
  constexpr uint64_t kLaunches = (kTensors + kernels::cuda::kUpdatePartsMax - 1) / kernels::cuda::kUpdatePartsMax;
  EXPECT_EQ(after.kernels - before.kernels, kLaunches);
  EXPECT_EQ(after.waits - before.waits, 1u);
  EXPECT_EQ(after.pageable_copies - before.pageable_copies, 1u) << "the gradients, in one copy";
  EXPECT_EQ(gpu.kernels - kernels, kLaunches);
  EXPECT_EQ(gpu.in.count - in_copies, 1u);
  EXPECT_EQ(gpu.in.bytes - in_bytes, 2 * ((kTensors - 1) * kPlace + kElements));
  EXPECT_EQ(gpu.out.bytes - out_bytes, 2 * kTensors * kElements) << "the working parameters, without the gaps";
  EXPECT_GT(gpu.update_wait_nanoseconds, waited);
}

// The GPU has the next chunks' work before the first chunk's is done: copies of one go beside the kernel of another.
TEST_F(HbmTierDoubleTest, ChunksOfAStepAreUnderWayTogether) {
  constexpr uint64_t kChunks = 3, kElements = 65536;
  auto tiers = Tiers::Open({.budget = kRoom, .directory = directory_.path()});
  ASSERT_TRUE(tiers.ok()) << tiers.status();
  ChunkStore store(tiers->get(), kernels::OptimizerSpec());
  Plan plan;
  StepUpdates step(1);
  for (uint64_t i = 0; i < kChunks; ++i) {
    plan.chunks.push_back({.state = TierKind::kHbm, .working = TierKind::kHbm});
    step.AddValues(i, kElements);
  }
  ASSERT_EQ(store.Add(std::vector<uint64_t>(kChunks, kElements), plan), absl::OkStatus());
  const GpuCounters& gpu = (*tiers)->hbm()->counters();
  const uint64_t before = gpu.kernels;
  std::vector<uint64_t> queued;  // launches, at each kernel
  cuda_double::BeforeKernels([&] { queued.push_back(gpu.kernels - before); });
  std::vector<size_t> done;
  ASSERT_EQ(store.Run(step.updates(), [&](size_t i) { done.push_back(i); }), absl::OkStatus());
  cuda_double::BeforeKernels(nullptr);
  EXPECT_THAT(queued, testing::ElementsAre(kChunks, kChunks, kChunks));
  EXPECT_THAT(done, testing::ElementsAre(0, 1, 2));
}

TEST_F(HbmTierDoubleTest, AReadDoesNotWaitForAnUpdate) {
  Open(65536, TierKind::kHbm);
  ASSERT_TRUE(RunValues(65536).ok());
  const auto other = tiers_->hbm()->Allocate(kMiB, "another chunk's working copy");
  ASSERT_TRUE(other.ok()) << other.status();
  std::promise<void> begun, released;
  cuda_double::BeforeKernels([&, once = std::make_shared<std::once_flag>()] {
    std::call_once(*once, [&] {
      begun.set_value();
      released.get_future().wait();
    });
  });
  std::thread update([&] { EXPECT_TRUE(RunValues(65536).ok()); });
  begun.get_future().wait();
  std::vector<std::byte> to(kMiB);
  auto read = std::async(std::launch::async, [&] { return tiers_->hbm()->CopyOut(other->data(), absl::MakeSpan(to)); });
  const bool beside = read.wait_for(std::chrono::seconds(20)) == std::future_status::ready;
  released.set_value();
  update.join();
  EXPECT_TRUE(beside);
  EXPECT_EQ(read.get(), absl::OkStatus());
}

TEST_F(HbmTierDoubleTest, StateIsReadInLargePieces) {
  Open(kMiB / sizeof(float), TierKind::kHbm);
  ASSERT_TRUE(RunValues(kMiB / sizeof(float)).ok());
  const uint64_t before = cuda_double::counts().waits;
  std::vector<float> master(kMiB / sizeof(float));
  ASSERT_EQ(store_->ReadState(0, StateArray::kMaster, 0, absl::MakeSpan(master)), absl::OkStatus());
  EXPECT_EQ(cuda_double::counts().waits - before, 1u);
  EXPECT_EQ(tiers_->hbm()->counters().out.bytes, kMiB);
  EXPECT_GT(tiers_->hbm()->counters().copy_wait_nanoseconds, 0);
}

// Jobs of one server, and their readers, share its GPU.
TEST_F(HbmTierDoubleTest, ManyThreadsShareTheGpu) {
  StoreOnTiers jobs[] = {{kRoom, 2}, {kRoom, 2}};
  for (StoreOnTiers& job : jobs) job.store.reset(), job.tiers.reset();
  auto tiers = *Tiers::Open({.budget = {.hbm = 128 * kMiB, .dram = 64 * kMiB}, .directory = directory_.path()});
  std::vector<std::thread> threads;
  for (StoreOnTiers& job : jobs) {
    job.store = std::make_unique<ChunkStore>(tiers.get(), kernels::OptimizerSpec());
    Plan plan = job.PlanOf({TierKind::kHbm});
    plan.chunks[0].working = TierKind::kHbm;
    ASSERT_EQ(job.store->Add(Sizes(), plan), absl::OkStatus());
    threads.emplace_back([&job] {
      EXPECT_TRUE(job.RunValues(1).ok());
      for (uint64_t t = 1; t <= 4; ++t) EXPECT_TRUE(job.RunSegments(t).ok());
    });
    threads.emplace_back([&job] {
      std::vector<kernels::bf16> working(Sizes()[0]);
      for (int i = 0; i < 50; ++i) {
        EXPECT_EQ(job.store->ReadWorking(0, 0, Bytes(absl::MakeSpan(working))), absl::OkStatus());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (StoreOnTiers& job : jobs) {
    for (size_t i = 0; i < Sizes().size(); ++i) EXPECT_TRUE(Holds(*job.store, i, job.reference[i])) << i;
    job.store.reset();
  }
}

}  // namespace
}  // namespace ballast::storage
