// Runs a test once per instruction set that is compiled in and supported by this machine.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "ballast/kernels/cpu/highway_targets.h"
#include "ballast/kernels/kernels.h"
#include "hwy/highway.h"

namespace ballast::kernels {

inline std::vector<int64_t> InstructionSets() {
  std::vector<int64_t> targets;
  for (int64_t left = (hwy::SupportedTargets() & HWY_TARGETS) | HWY_BASELINE_SCALAR; left != 0; left &= left - 1) {
    targets.push_back(left & -left);
  }
  return targets;
}

// While the object lives, kernels use this instruction set.
class UseInstructionSet {
 public:
  explicit UseInstructionSet(int64_t target) {
    hwy::SetSupportedTargetsForTest(target);
    hwy::GetChosenTarget().Update(target);
    EXPECT_STREQ(ActiveIsa(), hwy::TargetName(target));
  }
  ~UseInstructionSet() {
    hwy::SetSupportedTargetsForTest(0);
    hwy::GetChosenTarget().DeInit();
  }
  UseInstructionSet(const UseInstructionSet&) = delete;
};

class InstructionSetTest : public testing::TestWithParam<int64_t> {
 protected:
  const UseInstructionSet use_{GetParam()};
};

inline std::string InstructionSetName(const testing::TestParamInfo<int64_t>& info) {
  return hwy::TargetName(info.param);
}

}  // namespace ballast::kernels
