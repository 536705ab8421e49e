// The real bits behind the digests of tests/sim/intent.h, as pushed by the groups of this simulation.
//
// tests/sim knows a slice by its digest alone. Here a digest is the CRC32C of a payload, and a payload is a pure
// function of (seed, group, step, attempt, kind, slice). PayloadOf finds the payload of every digest seen so far.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "ballast/tests/sim/intent.h"

namespace ballast::sim {

using Payload = std::shared_ptr<const std::vector<std::byte>>;

// Tensors that a group may give new values beside gradients have few elements, so that tight budgets hold the values.
inline constexpr uint64_t kEditedElementsMax = 1024;

// Sets the moment format of jobs from now on, and forgets all payloads. `large`: several whole chunks per server, so
// that logs have segments to spare, chunks stay dirty over restarts, and cuts matter. `pin_interval`: the K of
// durability every-K; 0: durability `step`. `table`: the job has one. REQUIRES: no plan of an earlier world is in use.
void BeginWorld(v1::MomentFormat moments, bool large, uint64_t pin_interval, bool table);
// Member.disk of a server where the job has a table.
inline uint64_t DiskOf(int server) { return static_cast<uint64_t>(server) + 1; }
// The payload of a digest computed in this world; null for any other digest.
Payload PayloadOf(uint32_t digest);

}  // namespace ballast::sim
