// The candidates of a plan: each is one choice (choice.h), carried out within the budgets.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ballast/storage/placement/choice.h"
#include "ballast/storage/placement/placement.h"

namespace ballast::storage {

// The choices that differ for this request, the simplest first: tiers are filled in order, HBM first.
std::vector<Choice> Choices(const PlanRequest& request);

struct Candidate {
  Plan plan;             // without a prediction
  uint64_t missing = 0;  // bytes that the budgets lack, over all tiers; 0: the plan fits
  std::string shortage;  // if it does not fit: each tier that is short, the missing bytes, the budget to raise
  bool fits() const { return missing == 0; }
};

// Places of all chunks by `choice`. Does not predict.
Candidate Arrange(const PlanRequest& request, const Choice& choice);

// The first part of Arrange: sets the plan's chunks, and the bytes that it takes in HBM.
void FillHbm(const PlanRequest& request, const Choice& choice, Plan* plan);

}  // namespace ballast::storage
