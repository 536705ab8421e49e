#include "ballast/storage/memory/memory_nodes.h"

#include <linux/mempolicy.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <filesystem>
#include <string>

#include "absl/strings/str_cat.h"

namespace ballast::storage {
namespace {

// The most nodes that a kernel can be built for (CONFIG_NODES_SHIFT).
constexpr size_t kNodesMax = 1024;
constexpr size_t kWordBits = sizeof(unsigned long) * CHAR_BIT;

struct NodeMask {
  unsigned long words[kNodesMax / kWordBits] = {};
  bool Has(size_t node) const { return (words[node / kWordBits] >> node % kWordBits & 1) != 0; }
  void Add(size_t node) { words[node / kWordBits] |= 1ul << node % kWordBits; }
};

// In /sys each node's folder has an entry for each of its processors.
bool HasProcessorOf(size_t node, const cpu_set_t& processors) {
  for (int processor = 0; processor < CPU_SETSIZE; ++processor) {
    if (!CPU_ISSET(processor, &processors)) continue;
    std::error_code error;
    if (std::filesystem::exists(absl::StrCat("/sys/devices/system/node/node", node, "/cpu", processor), error)) {
      return true;
    }
  }
  return false;
}

}  // namespace

// Two system calls instead of libnuma, which a wheel would have to bring along.
std::vector<int> MemoryNodes() {
  int policy = MPOL_DEFAULT;
  NodeMask mask;
  if (syscall(SYS_get_mempolicy, &policy, nullptr, 0, nullptr, 0) != 0 || policy != MPOL_DEFAULT) return {};
  if (syscall(SYS_get_mempolicy, nullptr, mask.words, kNodesMax, nullptr, MPOL_F_MEMS_ALLOWED) != 0) return {};
  cpu_set_t processors;
  if (sched_getaffinity(getpid(), sizeof(processors), &processors) != 0) return {};
  std::vector<int> nodes;
  for (size_t node = 0; node < kNodesMax; ++node) {
    if (mask.Has(node) && HasProcessorOf(node, processors)) nodes.push_back(static_cast<int>(node));
  }
  return nodes;
}

bool Interleave(absl::Span<std::byte> bytes, absl::Span<const int> nodes) {
  NodeMask mask;
  for (const int node : nodes) mask.Add(static_cast<size_t>(node));
  // The kernel subtracts 1 from the number of bits.
  return syscall(SYS_mbind, bytes.data(), bytes.size(), MPOL_INTERLEAVE, mask.words, kNodesMax + 1, 0) == 0;
}

}  // namespace ballast::storage
