// Ranks as processes with one GPU each. Source: NVIDIA NCCL, https://docs.nvidia.com/deeplearning/nccl
//
// Compiled where NCCL is found (library collective_nccl). Host bytes are staged through device memory: use it for a
// trainer with buffers on the host and links between GPUs.
#pragma once

#include <memory>

#include "absl/time/time.h"
#include "ballast/client/collective/collective.h"
#include "ballast/client/collective/rendezvous.h"

namespace ballast::client {

struct NcclOptions {
  int device = 0;                               // CUDA ordinal
  absl::Duration timeout = absl::Seconds(120);  // for the set-up, and for each call
};

// Blocks until all ranks are connected. Borrows `rendezvous` until return. Threads: one at a time. Errors:
// RANK_MISSING; UNAVAILABLE when NCCL reports a lost peer (without naming the peer); FAILED_PRECONDITION (UNSUPPORTED)
// without a usable GPU.
absl::StatusOr<std::unique_ptr<Collective>> MakeNccl(Rendezvous* rendezvous, int rank, int world_size,
                                                     const NcclOptions& options);

}  // namespace ballast::client
