#include "ballast/proto/model/names.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "ballast/proto/base/status.h"
#include "ballast/proto/model/optimizer.h"

namespace ballast::model {
namespace {

using ::testing::HasSubstr;

TEST(NamesTest, AnUnknownNameGetsTheListOfAll) {
  EXPECT_EQ(*OptimizerNamed("lion"), kernels::OptimizerKind::kLion);
  EXPECT_EQ(*OptimizerNamed("ademamix"), kernels::OptimizerKind::kAdemamix);
  EXPECT_EQ(*OptimizerNamed("adamw_schedule_free"), kernels::OptimizerKind::kAdamwScheduleFree);
  EXPECT_EQ(*MomentsNamed("i8"), kernels::MomentFormat::kI8);
  EXPECT_EQ(*MasterNamed("lent"), kernels::MasterFormat::kLent);
  EXPECT_EQ(*DtypeNamed("f16"), kernels::Dtype::kF16);
  EXPECT_EQ(*DurabilityNamed("every-K"), v1::DURABILITY_EVERY_K);
  const absl::Status unknown = OptimizerNamed("AdamW").status();
  EXPECT_EQ(ReasonOf(unknown), kBadConfig);
  EXPECT_THAT(std::string(unknown.message()), HasSubstr("'AdamW': expected one of adamw, adam, sgd, adagrad, lion"));
}

TEST(NamesTest, JobNamesAreSafeInFileNames) {
  EXPECT_TRUE(IsJobName("a-1_B.2"));
  EXPECT_TRUE(IsJobName(std::string(128, 'a')));
  for (const std::string& name : {std::string(), std::string(129, 'a'), std::string("a/b"), std::string("a b"),
                                  std::string("\xc3\xa9"), std::string("a\0b", 3)}) {
    EXPECT_FALSE(IsJobName(name)) << name;
    EXPECT_EQ(ReasonOf(CheckJobName(name)), kBadSpec) << name;
  }
}

}  // namespace
}  // namespace ballast::model
