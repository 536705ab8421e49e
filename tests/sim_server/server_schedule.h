// A seeded schedule of whole state servers: three machines with simulated disks, trainer groups (old groups go on
// beside new ones), a network, and faults. At the end the faults stop, and at least two more steps have to be decided.
//
// Everything runs on one thread. Each turn delivers a message, lets a rank run, runs a task of a server's threads, lets
// a log write, or breaks something. The trainers come from tests/sim, with bits behind their digests. The oracle of
// tests/sim checks their decisions, and a reference computes the content of every chunk after each step. After every
// recovery, and at the end, each chunk of the server is pulled and compared bit for bit.
#pragma once

#include <cstdint>
#include <string>

#include "ballast/tests/sim/sim_group.h"

namespace ballast::sim {

enum class Faults {
  kCrashes,   // power cuts anywhere, killed and stopped servers, lost ranks
  kIoErrors,  // also failing operations: the job refuses, and a restart recovers the job
  kFullDisk,  // also disks, or some of their operations, without space
  kRot,       // also bits that flip while a server is down: repaired or refused, never wrong
};

struct ServerTally {
  Tally group;
  uint64_t moments_written = 0;  // transactions of values of moments
  uint64_t power_cuts = 0;
  uint64_t cuts_in_operations = 0;  // power cuts during an operation
  uint64_t cuts_in_recovery = 0;
  uint64_t kills = 0;
  uint64_t stops = 0;
  uint64_t recoveries = 0;
  uint64_t chunks_checked = 0;
  uint64_t without_copies = 0;  // comparisons of a server's chunks of which some have no working copy
  uint64_t chunks_ahead = 0;    // contents (of a chunk) durable at a version whose decision the server had lost
  uint64_t pulls_checked = 0;
  uint64_t budget_changes = 0;
  uint64_t moves_begun = 0;  // of chunks between tiers
  uint64_t jobs_failed = 0;  // jobs that refused everything after a disk error
  uint64_t short_of_memory = 0;
  uint64_t rotten_bits = 0;
  uint64_t scrubs = 0;       // pieces that servers were asked to scrub
  uint64_t refused = 0;      // schedules that ended with DATA_LOSS after rot
  uint64_t states_lost = 0;  // every-K: starts of servers that had lost their state
  uint64_t went_on = 0;      // groups' own next epochs

  void Add(const ServerTally& other);
};

struct ServerScheduleResult {
  std::string violation;  // empty: every promise was kept
  ServerTally tally;
  uint64_t trace = 0;  // a digest of all events
};

struct ServerScheduleOptions {
  uint64_t seed = 1;
  Faults faults = Faults::kCrashes;
  // Durability every-K with a K of 1 to 4: the end of a server loses everything but promises, Opens and pins.
  bool every_k = false;
  // The job has a table, and groups go on in their own next epochs, which keep slices.
  bool goes_on = false;
  std::string directory;  // must exist
};

ServerScheduleResult RunServerSchedule(const ServerScheduleOptions& options);

}  // namespace ballast::sim
