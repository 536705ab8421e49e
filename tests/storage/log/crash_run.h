// Seeded lives of a gradient log on a simulated disk. Each life ends with a crash. Every function returns an empty
// string, or the broken promise.
#pragma once

#include <cstdint>
#include <string>

#include "ballast/tests/sim_disk/sim_disk.h"

namespace ballast::storage {

struct CrashTally {
  uint64_t records = 0, durable = 0, lost = 0, recovered_beyond_durable = 0;
  uint64_t rolls = 0, cuts = 0, extends = 0, no_room = 0;
  uint64_t crashes_by_operation = 0, crashes_in_recovery = 0, torn_batches = 0, live_segments = 0;
  uint64_t kills = 0, errors = 0, rotten_bits = 0, refused = 0;
};

// Six lives of records, cuts and failing operations. Each ends with a power cut or the end of the process, followed by
// a recovery. After one more life a bit or three blocks rot at rest.
std::string RunLives(uint64_t seed, CrashTally* tally);

// Two lives. A power cut voids the last batches of the first life, in its first segment or in a new one whose head may
// be lost. The second life writes at most as many batches of the same size in the same place, and is killed. Then a bit
// rots in the first copy of an earlier batch's meta; the second copy repairs the meta.
std::string RunVoidBatches(uint64_t seed);

// Three lives. A power cut voids a batch that records a cut. The second life overwrites the cut segment and the void
// batch, and a power cut loses the heads of its segments. The third recovers.
std::string RunVoidCut(uint64_t seed);

// CrashInCreation cuts the power at the n-th operation of a log's creation. ErrorInCreation fails the n-th `operation`
// of a creation with ENOSPC. `*created`: the creation succeeded, because it was over before operation n.
std::string CrashInCreation(uint64_t seed, uint64_t n, bool* created);
std::string ErrorInCreation(SimOperation operation, uint64_t n, bool* created);

}  // namespace ballast::storage
