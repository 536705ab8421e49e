// Faults of a machine's disk and catalog besides crashes, in schedules with such faults.
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
  // Borrows the pointers.
  DiskFaults(Faults faults, Machine* machine, Random* random, ServerTally* tally)
      : faults_(faults), machine_(machine), random_(random), tally_(tally) {}

  // Harms the disk now, or plans faults of its next operations. False if this kind of schedule has nothing to do.
  bool Happen();
  // Ask before a server starts again. True if an operation has failed since the last call: then cut the power first. A
  // failed sync leaves pages in the system's cache that look whole and are on no disk. A log recovered from such pages
  // is lost with the next power cut (DATA_LOSS). See tests/sim_disk/sim_content.h, FailSync.
  bool NeedsPowerCut();
  // Makes the disk sound again. Rotten bits stay rotten.
  void End();
  // True if the faults of this kind of schedule explain `status`. Sets `*refused` if the job is lost through rot.
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
