// The cost of a plan, and the cheapest of several.
#pragma once

#include <optional>
#include <utility>

#include "ballast/storage/placement/placement.h"

namespace ballast::storage {

// Adds the prediction of a step of all the job's chunks, if the request has a machine.
void Predict(const PlanRequest& request, Plan* plan);

// Seconds that the disk and the GPU's link take to move chunks from request.present to the plan's places.
double MoveSeconds(const PlanRequest& request, const Plan& plan);

// The measure by which candidates are compared: seconds of kStepsToRepay steps with their pulls, and of the moves
// before them. So a move is made only if its gain pays for it within so many steps.
inline constexpr double kStepsToRepay = 100;
double CostOf(const PlanRequest& request, const Plan& plan);

// The two cheapest of the plans that were offered; of equal ones the first.
template <typename T>
class CheapestTwo {
 public:
  void Offer(T plan, double cost) {
    if (!best_.has_value() || cost < best_->second) {
      second_ = std::exchange(best_, std::pair(std::move(plan), cost));
    } else if (!second_.has_value() || cost < second_->second) {
      second_ = std::pair(std::move(plan), cost);
    }
  }
  // Null if so many were not offered.
  T* best() { return best_.has_value() ? &best_->first : nullptr; }
  T* second() { return second_.has_value() ? &second_->first : nullptr; }

 private:
  std::optional<std::pair<T, double>> best_, second_;
};

}  // namespace ballast::storage
