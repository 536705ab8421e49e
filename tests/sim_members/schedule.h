// A seeded schedule of members: four servers, one or two of them spare, a key in etcd, trainer groups (old groups go on
// beside new ones), a network, crashes, lost disks and operators' wishes. At the end the faults stop: two more steps
// have to be decided, and all copies filled.
#pragma once

#include <cstdint>
#include <string>

#include "ballast/tests/sim_members/group.h"

namespace ballast::sim_members {

struct ScheduleResult {
  std::string violation;  // empty: every promise was kept
  Tally tally;
};

struct ScheduleOptions {
  uint64_t seed = 1;
  Bug bug = Bug::kNone;
  bool leave_on_error = false;
};

ScheduleResult RunSchedule(const ScheduleOptions& options);

}  // namespace ballast::sim_members
