// Communication between the ranks of one trainer group. Implementations: loopback (threads of one process), Gloo
// (CPUs), NCCL (GPUs).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace ballast::client {

// Calls are collective: every rank makes the same calls in the same order, from one thread at a time. Calls block. When
// a peer is gone, they fail with DEADLINE_EXCEEDED (RANK_MISSING, with the peer if the library names it) or
// UNAVAILABLE. After an error the group is unusable: exit and start again.
class Collective {
 public:
  virtual ~Collective() = default;
  virtual int rank() const = 0;
  virtual int world_size() const = 0;

  // Returns every rank's bytes, in rank order. For control data: at most 1 MiB per rank.
  virtual absl::StatusOr<std::vector<std::string>> Exchange(const std::string& mine) = 0;

  // `all` holds every rank's part: rank r's at [offsets[r], offsets[r + 1]) bytes, offsets.size() == world_size + 1. On
  // entry the own part is in place; on return all parts are. Memory: host.
  virtual absl::Status AllGather(absl::Span<const uint64_t> offsets, absl::Span<std::byte> all) = 0;

  // Sends to[r] to rank r and receives from[r] from rank r, for all r at once (the own entry is copied). Sizes match
  // pairwise.
  virtual absl::Status AllToAll(absl::Span<const absl::Span<const std::byte>> to,
                                absl::Span<const absl::Span<std::byte>> from) = 0;
};

}  // namespace ballast::client
