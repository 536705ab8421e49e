#include "ballast/tests/services/training_bits.h"

#include <gtest/gtest.h>

namespace ballast::services {

float Initial(uint32_t tensor, uint64_t element) {
  return static_cast<float>(tensor + 1) + 1e-3f * static_cast<float>(element % 1000);
}

Fill GradientOf(int64_t step) {
  return [step](uint32_t tensor, uint64_t element) {
    return static_cast<float>(static_cast<int>((element * 7 + tensor * 3 + static_cast<uint64_t>(step) * 5) % 61) -
                              30) /
           64.0f;
  };
}

void ExpectSame(TrainerGroup& group, TrainerGroup& other, int64_t version) {
  const auto tensors = static_cast<uint32_t>(group.plan().layout().tensors().size());
  for (uint32_t tensor = 0; tensor < tensors; ++tensor) {
    for (const v1::Content content :
         {v1::CONTENT_MASTER, v1::CONTENT_MOMENT1, v1::CONTENT_MOMENT2, v1::CONTENT_WORKING}) {
      const auto mine = group.Read(tensor, content, version), theirs = other.Read(tensor, content, version);
      ASSERT_TRUE(mine.ok()) << mine.status();
      ASSERT_TRUE(theirs.ok()) << theirs.status();
      ASSERT_EQ(*mine, *theirs) << "tensor " << tensor << ", content " << content << ", version " << version;
    }
  }
}

}  // namespace ballast::services
