// Seeded lives of a gradient log on a simulated disk, each of which ends with a crash.
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

// Six lives: records, cuts, failing operations; a power cut or the end of the process; recovery. Then a bit rots.
// Empty, or what was broken.
std::string RunLives(uint64_t seed, CrashTally* tally);

// Two lives: the first leaves batches that a power cut made void, within its segment or in one without a head; the
// second writes as many and as large ones where they would go on, and is killed. Then the first copy of a meta before
// them rots, which the second repairs. Empty, or what was broken.
std::string RunVoidBatches(uint64_t seed);

// Three lives: a power cut voids a batch that tells of a cut; the second life writes where the cut segment and that
// batch lie, and a power cut takes the heads of its segments. Empty, or what was broken.
std::string RunVoidCut(uint64_t seed);

// The making of a log ends with a power cut at its n-th operation / with an error of its n-th operation of that kind.
// Empty, or what was broken. `created`: it was over before.
std::string CrashInCreation(uint64_t seed, uint64_t n, bool* created);
std::string ErrorInCreation(SimOperation operation, uint64_t n, bool* created);

}  // namespace ballast::storage
