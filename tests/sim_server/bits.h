// The real bits behind the digests of tests/sim/intent.h: what the groups of this simulation push.
//
// tests/sim knows a slice by its digest alone. Here digests are the CRC32C of payloads, which are pure functions of
// (seed, group, step, attempt, slice); whoever has seen a digest can have its payload.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "ballast/tests/sim/intent.h"

namespace ballast::sim {

using Payload = std::shared_ptr<const std::vector<std::byte>>;

// Tensors that a group may give new values beside gradients: few elements, so that tight budgets hold them.
inline constexpr uint64_t kEditedElementsMax = 1024;

// From now on jobs keep their moments so, and no payload is known. `large`: several whole chunks a server, so that logs
// have segments to spare, chunks stay dirty over restarts, and cuts matter. `pin_interval`: the K of durability every-K;
// 0: durability `step`. REQUIRES: no plan of an earlier world is in use.
void BeginWorld(v1::MomentFormat moments, bool large, uint64_t pin_interval);
// Of a slice whose digest somebody computed in this world; null else.
Payload PayloadOf(uint32_t digest);

}  // namespace ballast::sim
