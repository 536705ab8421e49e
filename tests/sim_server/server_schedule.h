// One seeded schedule of whole state servers: three machines with simulated disks, trainer groups of which older ones
// go on, a network, and faults; at the end the faults stop and two more steps have to be decided.
//
// Everything runs on one thread. A turn delivers a message, lets a rank go on, runs one task of one server's threads,
// lets a log write some, or breaks something. Trainers are those of tests/sim, with bits behind their digests; its
// oracle watches what they decide, and a reference computes what every chunk must hold after each step. Whenever a
// server has recovered, and at the end, each of its chunks is pulled and compared bit for bit.
#pragma once

#include <cstdint>
#include <string>

#include "ballast/tests/sim/sim_group.h"

namespace ballast::sim {

enum class Faults {
  kCrashes,   // power cuts anywhere, killed and stopped servers, lost ranks
  kIoErrors,  // also operations that fail: the job refuses, and a restart recovers it
  kFullDisk,  // also disks, or some of their operations, without space
  kRot,       // also bits that flip while a server is down: repaired or refused, never wrong
};

struct ServerTally {
  Tally group;
  uint64_t moments_written = 0;  // transactions of values of moments
  uint64_t power_cuts = 0;
  uint64_t cuts_in_operations = 0;  // of them amid something
  uint64_t cuts_in_recovery = 0;
  uint64_t kills = 0;
  uint64_t stops = 0;
  uint64_t recoveries = 0;
  uint64_t chunks_checked = 0;
  uint64_t chunks_ahead = 0;  // contents, of a version that the server had forgotten to be decided
  uint64_t pulls_checked = 0;
  uint64_t budget_changes = 0;
  uint64_t moves_begun = 0;  // of chunks between tiers
  uint64_t jobs_failed = 0;  // refused all after an error of the disk
  uint64_t short_of_memory = 0;
  uint64_t rotten_bits = 0;
  uint64_t refused = 0;      // schedules that ended with DATA_LOSS after rot
  uint64_t states_lost = 0;  // every-K: by servers that had one

  void Add(const ServerTally& other);
};

struct ServerScheduleResult {
  std::string violation;  // empty: every promise was kept
  ServerTally tally;
  uint64_t trace = 0;  // a digest of all that happened
};

struct ServerScheduleOptions {
  uint64_t seed = 1;
  Faults faults = Faults::kCrashes;
  // Durability every-K with a K of 1 to 4: a server's end takes all but promises, Opens and pins.
  bool every_k = false;
  std::string directory;  // that exists
};

ServerScheduleResult RunServerSchedule(const ServerScheduleOptions& options);

}  // namespace ballast::sim
