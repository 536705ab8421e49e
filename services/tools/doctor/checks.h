// The checks of `ballastctl doctor`. Each compares one value of this machine, or of its peers, with the value that a
// server wants, and names the command that fixes it.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "ballast/kernels/self_test.h"
#include "ballast/services/daemon/config.h"
#include "ballast/services/tools/cluster.h"

namespace ballast::services {

enum class Verdict {
  kOk,
  kNote,  // a server runs, but more slowly, less safely, or with other settings than its peers
  kBad,   // stops a server, or a job that fits its budgets
};

// A line of the doctor. `mend`: a command or a key of the configuration; empty with kOk.
struct Check {
  Verdict verdict = Verdict::kOk;
  std::string what;
  std::string found;
  std::string wanted;
  std::string mend;
};
using Checks = std::vector<Check>;

// The machine as the doctor sees it.
struct Subject {
  // Absent: none was given; then budgets, data directory and ports are not checked.
  std::optional<Config> config;
  // Peers: addresses, or the URL of a registry. The time that each has to answer.
  std::vector<std::string> servers;
  Asking asking = {absl::Seconds(5), {}};
  // Folder in front of /proc and /sys: empty, or a copy in a test.
  std::string root;
};

// Memory: RLIMIT_MEMLOCK, huge pages, /dev/shm, physical memory, its half under WSL, limits of control groups and,
// beside a GPU, of mappings against budget.dram, NUMA nodes.
Checks CheckMemory(const Subject& subject);

// Disk: io_uring; the data directory's file system, O_DIRECT, and free space against budget.nvme. Writes a file of one
// block into the directory, or into the nearest folder above that is there, and removes the file.
Checks CheckDisk(const Subject& subject);

// Processor: instruction set, the kernels' self-test, compute_threads against the processors that this process may use,
// clock. `kernels`: the functions under test.
Checks CheckProcessor(const Subject& subject, const kernels::Processor& kernels);

// The GPU of budget.hbm, copies over its link included.
Checks CheckGpu(const Subject& subject);

// Network: whether both ports can be taken, who else can reach them, certificates, the registry, versions of peers.
// Blocks for up to `subject.asking.timeout` each for a taken port, the registry and the peers.
Checks CheckNetwork(const Subject& subject);

}  // namespace ballast::services
