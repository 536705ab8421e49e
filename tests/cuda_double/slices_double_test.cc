// The memory of a step's slices and of answers to pulls, beside a GPU. Copies use page-locked memory, as do the copies
// measured by `ballastctl iotune`.
#include "ballast/services/job_state/intake.h"
#include "ballast/storage/tier/hbm_tier.h"
#include "ballast/tests/cuda_double/cuda_double.h"
#include "ballast/tests/services/gateway/rpc_fixture.h"
#include "gtest/gtest.h"

namespace ballast::services {
namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;

class SlicesBesideAGpu : public testing::Test {
 protected:
  void SetUp() override {
    tiers_ = *storage::Tiers::Open({.budget = {.hbm = 64 * kMiB, .dram = 64 * kMiB}, .directory = directory_.path()});
    device_.emplace(*tiers_->hbm()->Allocate(4 * kMiB, "test"));
    memory_ = std::make_shared<SliceMemory>(tiers_.get());
  }
  std::shared_ptr<SliceMemory::Buffer> Take(uint64_t bytes) {
    auto buffer = SliceMemory::Allocate(memory_, bytes);
    EXPECT_TRUE(buffer.ok()) << buffer.status();
    return *std::move(buffer);
  }
  uint64_t PageableCopiesFrom(const SliceMemory::Buffer& buffer) {
    const uint64_t before = cuda_double::counts().pageable_copies;
    EXPECT_EQ(tiers_->hbm()->CopyIn({buffer.data(), buffer.bytes()}, device_->data()), absl::OkStatus());
    return cuda_double::counts().pageable_copies - before;
  }

  ScratchDirectory directory_;
  std::unique_ptr<storage::Tiers> tiers_;
  std::optional<storage::HbmBlock> device_;
  std::shared_ptr<SliceMemory> memory_;
};

TEST_F(SlicesBesideAGpu, GradientsAndReadBackBuffersArePageLocked) {
  ASSERT_EQ(memory_->Reserve(8 * kMiB), absl::OkStatus());
  for (const uint64_t bytes : {uint64_t{1000}, uint64_t{128} << 10, 2 * kMiB, 4 * kMiB}) {
    EXPECT_EQ(PageableCopiesFrom(*Take(bytes)), 0u) << bytes;
  }
  EXPECT_EQ(tiers_->used().dram, 8 * kMiB);
}

TEST_F(SlicesBesideAGpu, WhereThatIsRefusedSlicesAreThereAllTheSame) {
  cuda_double::RefusePageLocks();
  ASSERT_EQ(memory_->Reserve(8 * kMiB), absl::OkStatus());
  EXPECT_EQ(PageableCopiesFrom(*Take(2 * kMiB)), 1u);
  EXPECT_EQ(cuda_double::counts().refused_page_locks, 1u) << "once for all buffers";
}

TEST_F(SlicesBesideAGpu, MemoryOfAReservationThatIsTakenBackGoes) {
  ASSERT_EQ(memory_->Reserve(8 * kMiB), absl::OkStatus());
  ASSERT_EQ(memory_->Reserve(4 * kMiB), absl::OkStatus());
  memory_->Unreserve(4 * kMiB);
  EXPECT_EQ(tiers_->used().dram, 8 * kMiB);
  EXPECT_EQ(PageableCopiesFrom(*Take(4 * kMiB)), 0u);
}

// A whole server on the wire.
class ServerWithGpu : public RpcTest {
 protected:
  ServerWithGpu() {
    server_.options().budget = {.hbm = 64 * kMiB, .dram = 256 * kMiB};
    server_.Restart();
  }
};

TEST_F(ServerWithGpu, StepsAndPullsCopyFromAndToPageLockedMemory) {
  const std::vector<TestTensor> model = SmallModel();
  TrainerGroup group({server_.get()}, MakeSpec("job", model), 1);
  ASSERT_EQ(group.Start(), absl::OkStatus());
  ASSERT_EQ(group.Initialise(Ones), absl::OkStatus());
  for (uint32_t tensor = 0; tensor < model.size(); ++tensor) {  // so the first values are on the GPU
    ASSERT_TRUE(group.Read(tensor, v1::CONTENT_MASTER, 0).ok());
  }
  const cuda_double::Counts before = cuda_double::counts();
  const auto tensors = static_cast<uint32_t>(model.size());
  ASSERT_EQ(group.PushAll(v1::SLICE_KIND_GRADIENT, AllTensors(tensors), Ones), absl::OkStatus());
  ASSERT_TRUE(group.Finish(UpdateHeader(tensors)).ok());
  for (const uint64_t end : {uint64_t{1}, uint64_t{30'000}, uint64_t{65'536}}) {
    v1::PullRequest request;
    request.set_job("job");
    request.set_content(v1::CONTENT_WORKING);
    request.set_version(group.step() - 1);
    request.set_end(end);
    v1::PullResponse response;
    ASSERT_EQ(Call(&v1::StateService::Stub::Pull, request, &response), absl::OkStatus());
    EXPECT_EQ(response.payload().size(), 2 * end);
  }
  const cuda_double::Counts after = cuda_double::counts();
  EXPECT_GE(after.page_locked_copies - before.page_locked_copies, 3u);
  EXPECT_EQ(after.pageable_copies - before.pageable_copies, 0u);
}

}  // namespace
}  // namespace ballast::services
