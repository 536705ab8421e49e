#include "ballast/services/gateway/security/quotas.h"

#include <gtest/gtest.h>

#include <map>

#include "ballast/proto/base/status.h"

namespace ballast::services {
namespace {

void Take(const std::string& name, const std::map<std::string, uint64_t>& parts, v1::JobStatus* job) {
  v1::TierStatus* const tier = job->add_tiers();
  tier->set_tier(name);
  for (const auto& [part, bytes] : parts) {
    tier->set_used_bytes(tier->used_bytes() + bytes);
    tier->add_parts()->set_part(part);
    tier->mutable_parts()->rbegin()->set_bytes(bytes);
  }
}

v1::JobStatus Opened(const std::string& name, uint64_t dram_state, uint64_t dram_slices = 0, uint64_t nvme_log = 0) {
  v1::JobStatus job;
  job.set_name(name);
  job.set_world_size(1);
  Take("dram", {{"state", dram_state}, {"slices", dram_slices}}, &job);
  Take("nvme", {{"log", nvme_log}}, &job);
  return job;
}

TEST(Quotas, CountAllThatAJobTakesAsOpensPlanIt) {
  EXPECT_EQ(HeldBytes(Opened("a", 100, 20, 30)), (TierUse{0, 120, 30}));
  v1::OpenResponse answer;
  v1::PlannedTier* tier = answer.add_tiers();
  tier->set_tier("nvme");
  tier->set_state_bytes(130);
  tier->set_other_bytes(7);
  EXPECT_EQ(AskedBytes(answer), (TierUse{0, 0, 137}));
}

// Later a kept version's copies must be allowed to grow the job.
TEST(Quotas, LimitWhatADryRunTellsAsFree) {
  Quota quota;
  const auto free_of = [&](uint64_t free, bool told = true) {
    v1::OpenResponse answer;
    for (const char* name : {"dram", "nvme"}) {
      answer.add_tiers()->set_tier(name);
      if (told) answer.mutable_tiers()->rbegin()->set_free_bytes(free);
    }
    const std::vector<v1::JobStatus> jobs = {Opened("a1", 1, 1, 30), Opened("a2", 1, 1, 10), Opened("b1", 1, 1, 500)};
    LimitFree(
        quota, jobs, [](absl::string_view name) { return name[0] == 'a'; }, &answer);
    EXPECT_EQ(answer.tiers(0).free_bytes(), told ? free : 0) << "no quota of dram";
    EXPECT_EQ(answer.tiers(1).has_free_bytes(), told);
    return answer.tiers(1).free_bytes();
  };
  EXPECT_EQ(free_of(1000), 1000u);
  quota.bytes[2] = 100;
  EXPECT_EQ(free_of(1000), 60u);
  EXPECT_EQ(free_of(59), 59u);
  EXPECT_EQ(free_of(0, /*told=*/false), 0u);
  quota.bytes[2] = 39;
  EXPECT_EQ(free_of(1000), 0u) << "the jobs hold more than a new quota";
}

class QuotasTest : public ::testing::Test {
 protected:
  absl::StatusOr<Quotas::Lease> Ask(const std::string& job, const TierUse& asked) {
    return AskAsOf(quotas_.Now(), job, asked);
  }
  absl::StatusOr<Quotas::Lease> AskAsOf(uint64_t as_of, const std::string& job, const TierUse& asked) {
    return quotas_.Ask("a", quota_, job, asked, {as_of, jobs_}, [](absl::string_view name) { return name[0] == 'a'; });
  }
  Quotas quotas_;
  Quota quota_;
  std::vector<v1::JobStatus> jobs_ = {Opened("a1", 50, 10), Opened("b1", 1000)};
};

TEST_F(QuotasTest, SaysAskedHeldAndQuota) {
  quota_.bytes[1] = 100;
  EXPECT_TRUE(Ask("a2", {0, 40, 0}).ok()) << "the job of another does not count";
  const auto refused = Ask("a2", {0, 41, 0});
  ASSERT_EQ(refused.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(model::ReasonOf(refused.status()), model::kQuota);
  EXPECT_NE(
      std::string(refused.status().message())
          .find("asks for 41 bytes of dram. Jobs of 'a' already hold 60 (slices 10, state 50) on this server, and "
                "the quota is 100"),
      std::string::npos)
      << refused.status();
  quota_.bytes[1] = 10;
  EXPECT_TRUE(Ask("a1", {}).ok()) << "a job goes on that holds more than a new quota";
}

TEST_F(QuotasTest, CountsJobsThatAreOpen) {
  quota_.jobs = 1;
  EXPECT_TRUE(Ask("a1", {}).ok());
  EXPECT_NE(std::string(Ask("a2", {}).status().message()).find("asks for 1 job. Jobs of 'a' already hold 1 "),
            std::string::npos);
  jobs_.push_back(Opened("a2", 0));
  EXPECT_TRUE(Ask("a1", {}).ok()) << "a job goes on beside more than a new quota allows";
  jobs_.pop_back();
  jobs_[0] = Opened("a1", 0);
  jobs_[0].set_world_size(0);  // fenced only
  EXPECT_TRUE(Ask("a2", {}).ok());
}

TEST_F(QuotasTest, TwoOpensAtATimeDoNotBothTakeTheRest) {
  quota_.bytes[1] = 100;
  auto first = Ask("a2", {0, 40, 0});
  ASSERT_TRUE(first.ok());
  EXPECT_FALSE(Ask("a3", {0, 1, 0}).ok());
  auto again = Ask("a2", {0, 40, 0});
  EXPECT_TRUE(again.ok()) << "the same Open, sent again";
  first->reset();
  EXPECT_FALSE(Ask("a3", {0, 1, 0}).ok()) << "the second of them is under way";
  again->reset();
  EXPECT_TRUE(Ask("a3", {0, 1, 0}).ok());
}

TEST_F(QuotasTest, SaysWhatIsBeingTaken) {
  quota_.bytes[2] = 100;
  const auto first = Ask("a2", {0, 0, 40});
  ASSERT_TRUE(first.ok());
  EXPECT_NE(std::string(Ask("a3", {0, 0, 61}).status().message()).find("already hold 40 (being taken 40, log 0) on"),
            std::string::npos);
}

// A growing job has taken part of what it asked for, or all of it and more, when somebody looks.
TEST_F(QuotasTest, AJobUnderWayCountsAtLeastWhatItHas) {
  quota_.bytes[1] = 100;
  const auto grows = Ask("a1", {0, 10, 0});
  ASSERT_TRUE(grows.ok());
  EXPECT_TRUE(Ask("a2", {0, 30, 0}).ok());
  jobs_[0] = Opened("a1", 75);
  EXPECT_FALSE(Ask("a2", {0, 30, 0}).ok());
}

// Between a look at the server's jobs and the question, another Open may have become a job.
TEST_F(QuotasTest, AnOpenThatEndsMeanwhileIsNotOverlooked) {
  quota_.bytes[1] = 100;
  auto first = Ask("a2", {0, 40, 0});
  ASSERT_TRUE(first.ok());
  const uint64_t looked = quotas_.Now();
  first->reset();
  EXPECT_EQ(AskAsOf(looked, "a3", {0, 1, 0}).status().code(), absl::StatusCode::kAborted);
  jobs_.push_back(Opened("a2", 40));
  EXPECT_EQ(model::ReasonOf(Ask("a3", {0, 1, 0}).status()), model::kQuota);
}

TEST_F(QuotasTest, JobsThatWereNeverOpenedAreBoundedToo) {
  quota_.jobs = 2;
  for (int i = 0; i < 16; ++i) {
    EXPECT_TRUE(Ask("a-new", {}).ok()) << i;
    jobs_.push_back(Opened("a-" + std::to_string(i), 0));
    jobs_.back().set_world_size(0);
  }
  EXPECT_TRUE(Ask("a-7", {}).ok());
  EXPECT_NE(std::string(Ask("a-new", {}).status().message()).find("already has 16 jobs that were fenced and never"),
            std::string::npos);
  quota_.jobs = 20;
  EXPECT_TRUE(Ask("a-new", {}).ok());
}

}  // namespace
}  // namespace ballast::services
