// The HBM of a test binary that runs over the double: the tier for GPUs. Every test of the binary fails if the double
// saw something wrong in it.
#include "ballast/tests/cuda_double/cuda_double.h"
#include "ballast/tests/storage/tier/test_hbm.h"
#include "gtest/gtest.h"

namespace ballast::storage {
namespace {

class Watch : public testing::EmptyTestEventListener {
  void OnTestStart(const testing::TestInfo&) override { cuda_double::Begin(); }
  void OnTestEnd(const testing::TestInfo&) override {
    for (const std::string& violation : cuda_double::End()) ADD_FAILURE() << "CUDA: " << violation;
  }
};

const bool watching = [] {
  testing::UnitTest::GetInstance()->listeners().Append(new Watch);
  return true;
}();

}  // namespace

HbmOpener TestHbm() { return OpenHbmTier; }

}  // namespace ballast::storage
