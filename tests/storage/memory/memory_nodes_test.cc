#include "ballast/storage/memory/memory_nodes.h"

#include <linux/mempolicy.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <set>
#include <thread>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ballast::storage {
namespace {

constexpr size_t kBytes = size_t{4} << 20;

int PolicyAt(const std::byte* address) {
  int policy = -1;
  return syscall(SYS_get_mempolicy, &policy, nullptr, 0, address, MPOL_F_ADDR) == 0 ? policy : -1;
}

int NodeOf(const std::byte* address) {
  int node = -1;
  return syscall(SYS_get_mempolicy, &node, nullptr, 0, address, MPOL_F_NODE | MPOL_F_ADDR) == 0 ? node : -1;
}

class MemoryNodesTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (nodes_.empty()) GTEST_SKIP() << "the system does not tell memory nodes, or a policy is set";
  }
  const std::vector<int> nodes_ = MemoryNodes();
};

TEST_F(MemoryNodesTest, InterleavedPagesLieOnThemInTurn) {
  void* const mapped = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(mapped, MAP_FAILED);
  const absl::Cleanup unmap = [mapped] { munmap(mapped, kBytes); };
  auto* const bytes = static_cast<std::byte*>(mapped);
  madvise(bytes, kBytes, MADV_NOHUGEPAGE);
  ASSERT_EQ(PolicyAt(bytes), MPOL_DEFAULT);
  ASSERT_TRUE(Interleave({bytes, kBytes}, nodes_));
  EXPECT_EQ(PolicyAt(bytes), MPOL_INTERLEAVE);
  EXPECT_EQ(PolicyAt(bytes + kBytes - 1), MPOL_INTERLEAVE);
  std::set<int> found;
  for (size_t at = 0; at < kBytes; at += 4096) {
    bytes[at] = std::byte{1};
    found.insert(NodeOf(bytes + at));
  }
  EXPECT_EQ(found, std::set<int>(nodes_.begin(), nodes_.end()));
  EXPECT_FALSE(Interleave({bytes, kBytes}, {1000})) << "there is no such node";
}

TEST_F(MemoryNodesTest, AChosenPolicyHolds) {
  std::vector<int> nodes = {-1};
  // In a thread of its own, so that the policy ends with the thread.
  std::thread([&] {
    unsigned long first = 1ul << nodes_.front() % 64;
    ASSERT_LT(nodes_.front(), 64);
    ASSERT_EQ(syscall(SYS_set_mempolicy, MPOL_BIND, &first, 65), 0);
    nodes = MemoryNodes();
  }).join();
  EXPECT_THAT(nodes, ::testing::IsEmpty());
}

}  // namespace
}  // namespace ballast::storage
