// Ranks as processes on CPUs, over TCP. Source: https://github.com/facebookincubator/gloo, its point-to-point layer.
#pragma once

#include <memory>
#include <string>

#include "absl/time/time.h"
#include "ballast/client/collective/collective.h"
#include "ballast/client/collective/rendezvous.h"

namespace ballast::client {

struct GlooOptions {
  // Address where this rank listens, and which the other ranks connect to: a host name or address. `interface` names a
  // network interface instead.
  std::string host = "127.0.0.1";
  std::string interface;
  absl::Duration timeout = absl::Seconds(120);  // for the set-up, and for each call
};

// Blocks until all ranks are connected. Borrows `rendezvous` until return. Threads: one at a time; Gloo runs a thread
// of its own. Errors: RANK_MISSING, UNAVAILABLE (names the lost peer), BAD_CONFIG (host or interface).
absl::StatusOr<std::unique_ptr<Collective>> MakeGloo(Rendezvous* rendezvous, int rank, int world_size,
                                                     const GlooOptions& options);

}  // namespace ballast::client
