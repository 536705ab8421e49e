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

// Adds the prediction of a step of all the job's chunks, if the request has a machine.
void Predict(const PlanRequest& request, Plan* plan);

// Seconds that the disk and the GPU's link take to move chunks from request.present to the plan's places.
double MoveSeconds(const PlanRequest& request, const Plan& plan);

// The measure by which candidates are compared: seconds of kStepsToRepay steps with their pulls, and of the moves
// before them. So a move is made only if its gain pays for it within so many steps.
inline constexpr double kStepsToRepay = 100;
double CostOf(const PlanRequest& request, const Plan& plan);

}  // namespace ballast::storage
