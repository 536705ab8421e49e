// A seeded schedule: three servers, trainer groups (old groups go on beside new ones), a network and crashes. At the
// end the faults stop, and two more steps have to be decided.
#pragma once

#include <cstdint>
#include <string>

#include "ballast/tests/sim/sim_group.h"

namespace ballast::sim {

struct ScheduleResult {
  std::string violation;  // empty: every promise was kept
  Tally tally;
};

struct ScheduleOptions {
  uint64_t seed = 1;
  ClientBug bug = ClientBug::kNone;
  // Durability every-K with a K of 1 to 3: a crash loses everything but promises, Opens and pins.
  bool every_k = false;
  // See SimGroup::Surroundings.
  bool leave_on_error = false;
};

ScheduleResult RunSchedule(const ScheduleOptions& options);

}  // namespace ballast::sim
