// Checks an Open against the epoch before it: what a later epoch may change, and what a repeated Open of the same epoch
// must have. Private to services/step.
#pragma once

#include "absl/status/status.h"
#include "ballast/v1/state_service.pb.h"

namespace ballast::services {

// A later epoch may add tensors, and change the tiling and the table. Without a table chunks and their servers stay.
// INVALID_ARGUMENT (BAD_SPEC) if the spec differs otherwise than by further registrations; UNIMPLEMENTED (UNSUPPORTED)
// for other members or weights without a table, for a table with other shards, and for no table where there was one.
absl::Status CheckContinues(const v1::OpenRequest& older, const v1::OpenRequest& newer);

// Registrations after the first `known` are new and must name this epoch's base as their version: INVALID_ARGUMENT
// (BAD_SPEC). A job with durability every-K takes none once it has state: UNIMPLEMENTED (UNSUPPORTED).
absl::Status CheckRegistered(const v1::OpenRequest& open, int known);

// The same members, and every chunk on the same ones? A server may have moved to another address.
bool SamePlaces(const v1::OpenRequest& a, const v1::OpenRequest& b);

// Rule 26: does `newer` keep the slices of step base + 1 that came under `older`? It must be of the same group, with
// the same spec and tiling.
bool Continues(const v1::OpenRequest& older, const v1::OpenRequest& newer);

// Is `b` the same Open as `a` but for epoch and base: tiling, spec, members, group and step counts?
bool SamePlan(const v1::OpenRequest& a, const v1::OpenRequest& b);

}  // namespace ballast::services
