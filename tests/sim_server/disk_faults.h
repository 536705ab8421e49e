// What goes wrong with one machine's disk besides crashes, in the schedules that have it.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "ballast/tests/sim/random.h"
#include "ballast/tests/sim_server/machine.h"
#include "ballast/tests/sim_server/server_schedule.h"

namespace ballast::sim {

class DiskFaults {
 public:
  // Borrows all but `faults`.
  DiskFaults(Faults faults, Machine* machine, Random* random, ServerTally* tally)
      : faults_(faults), machine_(machine), random_(random), tally_(tally) {}

  // Something happens to the disk, or will to one of its next operations. False if there is nothing of that kind.
  bool Happen();
  // Before a server starts again: has an operation failed since the machine was last off? Then it is turned off and on.
  // A sync that failed leaves pages in the system's cache that look whole and are on no disk; a log that is recovered
  // from them is lost with the next power cut (DATA_LOSS). See tests/sim_disk/sim_content.h, FailSync.
  bool NeedsPowerCut();
  // From now on the disk is a good one again; what is rotten stays so.
  void End();
  // Is this error what must come of it? `refused`: set if the job is lost by that.
  bool Explains(const absl::Status& status, bool* refused) const;

 private:
  bool Rot();
  bool EndIsKnown(const std::string& file);

  Faults faults_;
  Machine* machine_;
  Random* random_;
  ServerTally* tally_;
  uint64_t errors_seen_ = 0;
};

}  // namespace ballast::sim
