// Memory of this machine against the budget of a server.
#include <sys/mman.h>
#include <sys/resource.h>

#include <algorithm>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "ballast/proto/model/layout.h"
#include "ballast/services/daemon/machine_files.h"
#include "ballast/services/daemon/memory_room.h"
#include "ballast/services/monitoring/show.h"
#include "ballast/services/tools/doctor/checks.h"
#include "ballast/storage/memory/memory_nodes.h"

namespace ballast::services {
namespace {

constexpr char kMoreForWsl[] =
    "memory=BYTES under [wsl2] in %UserProfile%\\.wslconfig, then wsl --shutdown (WSL has half of Windows' by default)";

// A trial locks so much more than the limit; larger limits are believed.
constexpr uint64_t kTrialBytes = 1 << 20;
constexpr uint64_t kTrialLimitMax = uint64_t{64} << 20;

// Of an element of fp32 AdamW. Chunks of narrower state take less, so more of them fit the budget.
constexpr uint64_t kStateElementBytes = 12;

// PyTorch's workers that load data, and NCCL's ranks of one host, put that much there.
constexpr uint64_t kSharedFolderBytes = uint64_t{1} << 30;

// Whether this process may lock more than `limit` bytes: the right CAP_IPC_LOCK lifts the limit.
bool LocksBeyond(uint64_t limit) {
  if (limit > kTrialLimitMax) return false;
  const uint64_t bytes = limit + kTrialBytes;
  void* const memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return false;
  const bool locked = mlock(memory, bytes) == 0;
  munmap(memory, bytes);
  return locked;
}

Check CheckMemlock(const Subject& subject) {
  Check check{Verdict::kOk, "locked memory", "", "unlimited"};
  const uint64_t wanted = subject.config.has_value() ? subject.config->server.budget.dram : RLIM_INFINITY;
  if (subject.config.has_value()) check.wanted = ShowBytes(wanted) + " (budget.dram)";
  rlimit limit = {};
  getrlimit(RLIMIT_MEMLOCK, &limit);
  check.found = limit.rlim_cur == RLIM_INFINITY ? "unlimited" : ShowBytes(limit.rlim_cur);
  if (limit.rlim_cur == RLIM_INFINITY || limit.rlim_cur >= wanted) return check;
  if (LocksBeyond(limit.rlim_cur)) {
    check.found += ", and the right to lock more";
    return check;
  }
  check.verdict = Verdict::kNote;
  check.found += "; memory may be swapped out, and io_uring's buffers stay unregistered";
  check.mend = "ulimit -l unlimited; systemd: LimitMEMLOCK=infinity; podman, docker: --ulimit memlock=-1";
  return check;
}

// Windows' driver locks pages for a GPU.
Check CheckPageLocked(const Subject& subject) {
  const std::string text = ReadMachineFile(subject.root + "/proc/meminfo");
  const uint64_t most = (NumberAfter(text, "MemTotal:").value_or(0) << 10) / 2;
  Check check{Verdict::kOk, "page-locked memory",
              absl::StrCat("WSL: at most ", ShowBytes(most), ", half of the memory"),
              "the budgets for DRAM of all that use a GPU"};
  if (!subject.config.has_value()) return check;
  const uint64_t wanted = subject.config->server.budget.dram;
  check.wanted = ShowBytes(wanted) + " (budget.dram)";
  if (wanted <= most) return check;
  check.verdict = Verdict::kNote;
  check.found += "; copies between a GPU and what lies beyond are slower";
  check.mend = absl::StrCat("budget.dram: at most ", ShowBytes(most), "; or ", kMoreForWsl);
  return check;
}

// Beside a GPU each chunk in DRAM has a mapping of its own, which is page-locked (storage/store/store_addition.cc).
Check CheckMappings(const Subject& subject) {
  // Libraries, stacks, malloc's heaps, slices.
  constexpr uint64_t kBeside = 4096;
  const auto needed = [dram = subject.config->server.budget.dram](uint64_t elements) {
    return dram / (elements * kStateElementBytes) + kBeside;
  };
  const uint64_t most =
      NumberAfter(ReadMachineFile(subject.root + "/proc/sys/vm/max_map_count"), "").value_or(UINT64_MAX);
  const uint64_t usual = needed(model::kChunkElementsMax), all = needed(model::kChunkElementsMin);
  Check check{Verdict::kOk, "mappings", absl::StrCat("vm.max_map_count ", most),
              absl::StrCat(usual, " for budget.dram of fp32 AdamW in chunks of ", model::kChunkElementsMax,
                           " elements (the default), ", all, " in chunks of ", model::kChunkElementsMin)};
  if (most >= all) return check;
  check.verdict = most >= usual ? Verdict::kNote : Verdict::kBad;
  absl::StrAppend(&check.found, "; the system refuses memory to a job of ",
                  most >= usual ? "smaller chunks that fits the budget" : "any chunks that fits the budget");
  check.mend = absl::StrCat("sysctl -w vm.max_map_count=", all, ", also in /etc/sysctl.d");
  return check;
}

// Ballast shares memory by descriptors and uses nothing of this folder.
Check CheckSharedFolder(const Subject& subject) {
  Check check{Verdict::kOk, "/dev/shm", "no size of its own", "at least " + ShowBytes(kSharedFolderBytes)};
  const std::optional<uint64_t> bytes = MemoryFileSystemBytes(subject.root, "/dev/shm");
  if (!bytes.has_value()) return check;
  check.found = ShowBytes(*bytes);
  if (*bytes >= kSharedFolderBytes) return check;
  check.verdict = Verdict::kNote;
  check.found += "; PyTorch's DataLoader workers, and NCCL among ranks of one host, may fail with a bus error";
  check.mend =
      "podman, docker: --shm-size=8g or --ipc=host; Kubernetes: an emptyDir with medium: Memory at /dev/shm; else "
      "mount -o "
      "remount,size=8g /dev/shm";
  return check;
}

Check CheckHugePages(const Subject& subject) {
  Check check{Verdict::kOk, "huge pages", "", "madvise or always"};
  const std::string file = "/sys/kernel/mm/transparent_hugepage/enabled";
  const std::string text = ReadMachineFile(subject.root + file);
  if (absl::StrContains(text, "[madvise]") || absl::StrContains(text, "[always]")) {
    check.found = absl::StrContains(text, "[always]") ? "always" : "madvise";
    return check;
  }
  check.verdict = Verdict::kNote;
  check.found = text.empty() ? "this kernel has none" : "never: each update pays for many small pages";
  check.mend = absl::StrCat("echo madvise >", file);
  return check;
}

Check CheckPhysical(const Subject& subject, uint64_t budget) {
  Check check{Verdict::kOk, "memory", "", ShowBytes(budget) + " (budget.dram) and " + ShowBytes(kBesideBudgetBytes)};
  const std::string text = ReadMachineFile(subject.root + "/proc/meminfo");
  const uint64_t total = NumberAfter(text, "MemTotal:").value_or(0) << 10;
  const uint64_t free = NumberAfter(text, "MemAvailable:").value_or(0) << 10;
  check.found = absl::StrCat(ShowBytes(total), ", available ", ShowBytes(free));
  if (total < budget) {
    check.verdict = Verdict::kBad;
    check.mend = absl::StrCat("budget.dram: at most ", ShowBytes(total - std::min(total, kBesideBudgetBytes)));
    if (IsWsl(subject.root)) absl::StrAppend(&check.mend, "; or ", kMoreForWsl);
  } else if (free < budget + kBesideBudgetBytes) {
    check.verdict = Verdict::kNote;
    check.mend = "end what else uses the memory, unless it is this server; or lower budget.dram";
  }
  return check;
}

Check CheckGroup(const Subject& subject, uint64_t budget) {
  const MemoryAllowance allowance = AllowedMemory(budget, subject.root);
  const Verdict verdict = allowance.room == MemoryRoom::kEnough  ? Verdict::kOk
                          : allowance.room == MemoryRoom::kTight ? Verdict::kNote
                                                                 : Verdict::kBad;
  return {verdict, "memory limit", allowance.found, allowance.wanted, allowance.mend};
}

// Without a configuration: the limit that an embedded server runs under, too. Each container has one; it is worth a
// note if it is below what any server needs beside its budget.
Check CheckGroup(const Subject& subject) {
  Check check{Verdict::kOk, "memory limit", "no control group limits it",
              absl::StrCat("the budgets for DRAM and ", ShowBytes(kBesideBudgetBytes))};
  const std::optional<GroupLimit> limit = MemoryLimit(subject.root);
  if (!limit.has_value()) return check;
  check.found = absl::StrCat(ShowBytes(static_cast<uint64_t>(limit->amount)), " by ", limit->file,
                             "; the kernel kills what goes beyond");
  if (limit->amount >= static_cast<double>(kBesideBudgetBytes)) return check;
  check.verdict = Verdict::kNote;
  check.mend =
      "raise it: podman, docker: --memory, systemd: MemoryMax=, Kubernetes: resources.limits.memory; and keep the "
      "budgets "
      "for DRAM below it";
  return check;
}

Check CheckNuma(const Subject& subject) {
  Check check{Verdict::kOk, "NUMA", "one node", "memory on all nodes in turn"};
  const std::string nodes = ReadMachineFile(subject.root + "/sys/devices/system/node/has_memory");
  if (nodes.empty() || nodes == "0") return check;
  const std::vector<int> used = storage::MemoryNodes();
  check.found = absl::StrCat("nodes ", nodes, ", of which a server uses ", absl::StrJoin(used, ","));
  if (used.size() > 1) return check;
  check.verdict = Verdict::kNote;
  if (used.empty()) check.found = absl::StrCat("nodes ", nodes, "; a policy was set for this process, and holds");
  check.mend = "start the server without numactl and without a cpuset of one node, or run one server a node";
  return check;
}

}  // namespace

Checks CheckMemory(const Subject& subject) {
  Checks checks = {CheckMemlock(subject), CheckHugePages(subject), CheckSharedFolder(subject)};
  if (IsWsl(subject.root)) checks.push_back(CheckPageLocked(subject));
  if (subject.config.has_value()) {
    const uint64_t budget = subject.config->server.budget.dram;
    checks.push_back(CheckPhysical(subject, budget));
    checks.push_back(CheckGroup(subject, budget));
    if (subject.config->server.budget.hbm > 0) checks.push_back(CheckMappings(subject));
  } else {
    checks.push_back(CheckGroup(subject));
  }
  checks.push_back(CheckNuma(subject));
  return checks;
}

}  // namespace ballast::services
