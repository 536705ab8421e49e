// One rank per GPU of this machine, as threads of this process.
#include "ballast/client/collective/nccl_collective.h"

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstdio>

#include "ballast/tests/client/collective/group.h"

namespace ballast::client {
namespace {

TEST(NcclCollective, AllCallsBetweenAllGpus) {
  int world_size = 0;
  ASSERT_EQ(cudaGetDeviceCount(&world_size), cudaSuccess);
  const ScratchDirectory directory;
  OnEveryRank(world_size, [&](int r) {
    auto rendezvous = FileRendezvous::Join({.directory = directory.path(), .rank = r, .world_size = world_size});
    ASSERT_TRUE(rendezvous.ok()) << rendezvous.status();
    NcclOptions options;
    options.device = r;
    const auto seat = MakeNccl(rendezvous->get(), r, world_size, options);
    ASSERT_TRUE(seat.ok()) << seat.status();
    const auto all = (*seat)->Exchange(absl::StrCat("rank ", r));
    ASSERT_TRUE(all.ok()) << all.status();
    for (int peer = 0; peer < world_size; ++peer) EXPECT_EQ((*all)[peer], absl::StrCat("rank ", peer));

    std::vector<uint64_t> offsets = {0};
    for (int peer = 0; peer < world_size; ++peer) offsets.push_back(offsets.back() + 1000 * peer + 3);
    std::vector<std::byte> bytes(offsets.back());
    std::fill(bytes.begin() + offsets[r], bytes.begin() + offsets[r + 1], static_cast<std::byte>(r + 1));
    const absl::Status status = (*seat)->AllGather(offsets, absl::MakeSpan(bytes));
    ASSERT_TRUE(status.ok()) << status;
    for (int peer = 0; peer < world_size; ++peer) {
      for (uint64_t i = offsets[peer]; i < offsets[peer + 1]; ++i)
        ASSERT_EQ(bytes[i], static_cast<std::byte>(peer + 1));
    }
  });
}

}  // namespace
}  // namespace ballast::client

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
