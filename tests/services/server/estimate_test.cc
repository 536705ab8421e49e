// Estimates: the plan of an unused server, beside ZeRO's arithmetic.
#include "ballast/services/server/estimate.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "ballast/proto/base/status.h"
#include "ballast/services/tools/plan_command.h"
#include "ballast/tests/services/daemon.h"
#include "ballast/tests/services/trainer_group.h"

namespace ballast::services {
namespace {

using ::testing::HasSubstr;

constexpr uint64_t kMiB = uint64_t{1} << 20;

EstimateRequest Request(uint32_t ranks, uint32_t servers) {
  EstimateRequest request;
  request.spec = MakeSpec("job", {{"a", "u0", 1 << 20, 0}, {"b", "u1", 1 << 20, 0}});
  request.ranks = ranks;
  request.servers = servers;
  request.server.budget = {.dram = 256 * kMiB};
  request.server.staging_bytes = 6 * kMiB;
  return request;
}

TEST(Estimate, ZeroStagesAreSpecialCases) {
  const auto estimate = EstimateJob(Request(4, 1));
  ASSERT_TRUE(estimate.ok()) << estimate.status();
  const uint64_t p = 2 << 20;  // bf16 gradients and parameters, 12 bytes of AdamW's state
  EXPECT_EQ(estimate->parameters, p);
  // Arrays are padded to pages.
  const auto about = [](uint64_t bytes) {
    return ::testing::AllOf(::testing::Ge(bytes), ::testing::Le(bytes + bytes / 64));
  };
  EXPECT_THAT(estimate->zero[0].all(), about(16 * p));
  EXPECT_THAT(estimate->zero[1].all(), about(4 * p + 12 * p / 4));
  EXPECT_THAT(estimate->zero[2].all(), about(2 * p + 14 * p / 4));
  EXPECT_THAT(estimate->zero[3].all(), about(16 * p / 4));
  EXPECT_EQ(estimate->whole.all(), 4 * p);
  EXPECT_EQ(estimate->sharded.all(), p);
  ASSERT_TRUE(estimate->fits.ok()) << estimate->fits;
  EXPECT_THAT(estimate->server.tiers(1).state_bytes(), about(12 * p));
  EXPECT_EQ(estimate->server.tiers(1).working_bytes(), 2 * p);
  EXPECT_THAT(estimate->Explain(Request(4, 1)), HasSubstr("without: ZeRO stage 3"));
}

TEST(Estimate, ServersShareAJob) {
  const auto one = EstimateJob(Request(1, 1)), two = EstimateJob(Request(1, 2));
  ASSERT_TRUE(one.ok() && two.ok());
  EXPECT_EQ(one->server_parameters, one->parameters);
  EXPECT_LT(two->server_parameters, one->parameters);
  EXPECT_GE(two->server_parameters, one->parameters / 2);
}

TEST(Estimate, SaysWhatIsShort) {
  EstimateRequest request = Request(1, 1);
  request.server.budget = {.dram = 8 * kMiB};
  const auto estimate = EstimateJob(request);
  ASSERT_TRUE(estimate.ok()) << estimate.status();
  EXPECT_EQ(model::ReasonOf(estimate->fits), model::kBudget);
  EXPECT_THAT(estimate->Explain(request), HasSubstr("It does not fit"));
  EXPECT_THAT(estimate->Explain(request), HasSubstr("nvme budget"));
  request = Request(1, 1);
  request.spec.set_durability(v1::DURABILITY_STEP);
  EXPECT_THAT(EstimateJob(request)->Explain(request), HasSubstr("It does not fit"));
  request.server.budget.nvme = 1024 * kMiB;
  EXPECT_TRUE(EstimateJob(request)->fits.ok()) << EstimateJob(request)->fits;
  for (const uint32_t ranks : {0u, ~0u}) {
    request.ranks = ranks;
    EXPECT_EQ(model::ReasonOf(EstimateJob(request).status()), model::kBadConfig);
  }
}

TEST(PlanCommand, Counts) {
  EXPECT_EQ(ParseCount("268435456"), 268435456u);
  EXPECT_EQ(ParseCount("7B"), 7'000'000'000u);
  EXPECT_EQ(ParseCount("1.5e9"), 1'500'000'000u);
  EXPECT_EQ(ParseCount("8.03B"), 8'030'000'000u);
  EXPECT_EQ(ParseCount("1.07K"), 1070u);
  for (const char* bad : {"", "B", "0", "-1", "0.5", "nan", "inf", "1e30", "7 apples"}) {
    EXPECT_EQ(ParseCount(bad), std::nullopt) << bad;
  }
}

TEST(PlanCommand, AnswersForPeopleAndMachines) {
  const std::vector<std::string> plan = {CtlPath(), "plan",           "--params", "7B",     "--ranks",
                                         "8",       "--server-count", "2",        "--dram", "64GiB"};
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.begin(), plan.begin(), plan.end());
    return RunProcess(more);
  };
  const Finished text = with({"--durability", "none"});
  EXPECT_EQ(text.code, 0) << text.err;
  EXPECT_THAT(text.out, HasSubstr("7000000000 parameters, 8 rank(s), 2 state server(s)"));
  const Finished json = with({"--nvme", "1TiB", "--json"});
  EXPECT_EQ(json.code, 0) << json.err;
  EXPECT_THAT(json.out, HasSubstr("\"fits\":true"));
  const Finished short_of = with({"--json"});  // durability step, and no nvme
  EXPECT_EQ(short_of.code, 1);
  EXPECT_THAT(short_of.out, HasSubstr("\"fits\":false"));
  const Finished more = with({"--durability", "none", "--amsgrad"});  // 16 bytes of state
  EXPECT_EQ(more.code, 1) << more.out;
  EXPECT_THAT(more.out, HasSubstr("short of"));
  EXPECT_EQ(more.err, "");
  const auto staged = [&](const char* bytes) {
    return with({"--durability", "none", "--amsgrad", "--nvme", "1TiB", "--staging", bytes, "--json"});
  };
  EXPECT_EQ(staged("1GiB").code, 0) << staged("1GiB").err;
  EXPECT_NE(staged("1GiB").out, staged("2GiB").out);
  EXPECT_EQ(with({"--durability", "none", "--optimizer", "sgd", "--momentum"}).code, 0);
  EXPECT_THAT(with({"--optimizer", "sgd", "--amsgrad"}).err, HasSubstr("amsgrad is AdamW's and Adam's"));
  const Finished wrong = with({"--moments", "i9"});
  EXPECT_EQ(wrong.code, 2);
  EXPECT_THAT(wrong.err, HasSubstr("expected one of f32, bf16, i8, f8"));
}

}  // namespace
}  // namespace ballast::services
