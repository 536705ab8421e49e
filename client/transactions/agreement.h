// The ranks' offers for a transaction, and their agreement. Pure functions: every rank computes the same from the same
// offers.
//
// An offer is a SealRequest that is not complete yet. Its field `job` holds the name of the call. Its gradient presence
// and its single blob are this rank's alone.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "ballast/client/transfers/unit_map.h"
#include "ballast/v1/state_service.pb.h"

namespace ballast::client {

// What the ranks have agreed on, before they seal or ask for the norm.
struct Agreement {
  v1::StepHeader header;  // its presence: all ranks' together
  std::vector<std::string> blobs;
};

using Offers = std::vector<v1::SealRequest>;  // by rank

absl::StatusOr<Offers> ParseOffers(absl::Span<const std::string> said);

// PLAN_MISMATCH if a rank's offer differs from rank 0's; the message names the difference. `places`, here and below, is
// true if ranks have different tensors. Then each offers values of its own tensors, and value presence and step counts
// may differ.
absl::Status CheckSameOffers(const Offers& offers, bool places);

// REQUIRES: CheckSameOffers is OK.
Agreement Join(const Offers& offers, bool places);

// PLAN_MISMATCH if another rank wrote a tensor of which this rank has a part, and this rank did not write it, or wrote
// another step count.
absl::Status CheckWritten(const UnitMap& units, const v1::StepHeader& own, const v1::StepHeader& agreed);

// Whether some rank lacks a gradient that another rank has.
bool GradientsDiffer(const Offers& offers, const v1::StepHeader& agreed);

bool AnyBit(const std::string& bitmap);

}  // namespace ballast::client
