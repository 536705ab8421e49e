// Checks an Open against the epoch before it: what a later epoch may change, and what a repeated Open of the same epoch
// must have. Private to services/step.
#pragma once

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "ballast/v1/state_service.pb.h"

namespace ballast::services {

// A later epoch may add tensors and change the tiling; this server's chunks stay. With a table other servers may leave;
// without one all stay. INVALID_ARGUMENT (BAD_SPEC) if the spec differs otherwise than by further registrations,
// UNIMPLEMENTED (UNSUPPORTED) for other members or weights, or other chunks on the server `id`.
absl::Status CheckContinues(const v1::OpenRequest& older, const v1::OpenRequest& newer, absl::string_view id);

// Registrations after the first `known` are new and must name this epoch's base as their version: INVALID_ARGUMENT
// (BAD_SPEC). A job with durability every-K takes none once it has state: UNIMPLEMENTED (UNSUPPORTED).
absl::Status CheckRegistered(const v1::OpenRequest& open, int known);

// Is `b` the same Open as `a` but for epoch and base: tiling, spec and members?
bool SamePlan(const v1::OpenRequest& a, const v1::OpenRequest& b);

}  // namespace ballast::services
