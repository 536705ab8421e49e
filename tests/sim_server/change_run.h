// A run of whole state servers whose job has two copies of each chunk and tables that change: a server joins, leaves,
// is replaced, is left out and comes back, comes back with an empty disk. Chunks are copied and given up while steps go
// on. A power cut hits one server at a chosen operation of its disk, or a chosen write of its catalog, from the first
// such Open to the end of the last; then the server comes back at once, after another cut amid its recovery, or after
// the others have gone on without it.
//
// Everything is checked against the trainers' gradients, run through the kernels (reference.h), as change_checks.h
// says; and in the end each chunk has two filled copies, on servers that take the space of fresh ones, also after all
// servers lose their power.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace ballast::sim {

enum class CutAt { kNever, kDiskOperation, kCatalogWrite };

struct ChangeCut {
  int server = 0;
  CutAt at = CutAt::kNever;
  uint64_t n = 0;  // counted from 1
};

// What a server takes that begins with these chunks: bytes by tier.
using TakenByFresh = std::map<std::pair<int, std::vector<uint64_t>>, std::map<std::string, uint64_t>>;

struct ChangeRunOptions {
  uint64_t seed = 1;
  ChangeCut cut;
  TakenByFresh* taken = nullptr;  // borrowed; kept over the runs of a seed, which all need the same
  std::string directory;          // must exist
};

struct ChangeRunResult {
  std::string violation;  // empty: every promise was kept
  // Of each server in the part of the run that a cut may hit.
  uint64_t disk_operations[3] = {};
  uint64_t catalog_writes[3] = {};
  bool cut = false;       // it was hit
  uint64_t left_out = 0;  // times that a server which was cut was left out
  uint64_t cuts_in_recovery = 0;
  uint64_t copies = 0;
  uint64_t given_up = 0;  // times that a server gave chunks up
  uint64_t steps = 0;
  uint64_t pulls = 0;  // compared
};

ChangeRunResult RunChanges(const ChangeRunOptions& options);

}  // namespace ballast::sim
