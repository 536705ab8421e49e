// Power cuts at every disk operation and catalog write of a run whose servers change their chunks (change_run.h).
#pragma once

#include <cstdint>
#include <string>

#include "ballast/tests/sim_server/change_run.h"

namespace ballast::sim {

struct ChangeCutsTally {
  uint64_t runs = 0;
  uint64_t places = 0;  // where a cut may strike, in all seeds
  uint64_t cut = 0;     // runs that a cut has hit
  uint64_t cuts_in_recovery = 0;
  uint64_t left_out = 0;
  uint64_t copies = 0;
  uint64_t given_up = 0;
  uint64_t steps = 0;
  uint64_t pulls = 0;
};

struct ChangeCutsOptions {
  uint64_t seed = 1;
  uint64_t cuts_max = 0;  // of the seed's places, chosen by the seed; 0: all
  uint64_t only = 0;      // the place with this number, from 1, alone
  std::string directory;  // must exist
};

// Runs the seed without a cut, which counts the places, and then once for each place. The first broken promise, with
// the place's number; empty: all were kept.
std::string SearchCuts(const ChangeCutsOptions& options, ChangeCutsTally* tally);

}  // namespace ballast::sim
