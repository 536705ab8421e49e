#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "ballast/proto/base/status.h"
#include "ballast/services/monitoring/error_reasons.h"
#include "ballast/services/monitoring/family_builder.h"
#include "ballast/services/monitoring/job_families.h"
#include "ballast/services/monitoring/security_families.h"

namespace ballast::services {
namespace {

using ::testing::Contains;
using ::testing::Key;
using ::testing::Not;
using ::testing::Pair;

// Values of the families by "name{label=value,...}".
std::map<std::string, double> ValuesOf(const Families& families) {
  std::map<std::string, double> values;
  for (const prometheus::MetricFamily& family : families) {
    for (const prometheus::ClientMetric& metric : family.metric) {
      std::string labels;
      for (const auto& label : metric.label)
        absl::StrAppend(&labels, labels.empty() ? "" : ",", label.name, "=", label.value);
      const bool counter = family.type == prometheus::MetricType::Counter;
      const bool fresh =
          values
              .emplace(absl::StrCat(family.name, "{", labels, "}"), counter ? metric.counter.value : metric.gauge.value)
              .second;
      EXPECT_TRUE(fresh) << family.name << labels;
    }
  }
  return values;
}

TEST(FamilyBuilderTest, AFamilyWithoutSeriesIsLeftOut) {
  Families families;
  { const Gauge nothing(&families, "ballast_nothing", "help"); }
  EXPECT_TRUE(families.empty());
  Counter(&families, "ballast_calls_total", "help").Add({{"call", "Push"}}, 3).Add({{"call", "Pull"}}, 4);
  ASSERT_EQ(families.size(), 1u);
  ASSERT_EQ(families[0].metric.size(), 2u);
  EXPECT_EQ(families[0].metric[1].counter.value, 4);
  EXPECT_EQ(families[0].metric[1].label[0].value, "Pull");
}

TEST(FamilyBuilderTest, AHistogramsBucketsAreCumulativeUpToInfinity) {
  storage::DurationHistogram histogram;
  const absl::Span<const double> bounds = histogram.bounds_seconds();
  histogram.Observe(absl::Seconds(bounds[0] / 2));
  histogram.Observe(absl::Seconds(bounds[1] * 0.99));
  histogram.Observe(absl::Seconds(bounds.back() * 2));
  Families families;
  Histogram(&families, "ballast_seconds", "help").Add({}, histogram);
  ASSERT_EQ(families.size(), 1u);
  const auto& out = families[0].metric[0].histogram;
  ASSERT_EQ(out.bucket.size(), bounds.size() + 1);
  EXPECT_EQ(out.bucket[0].cumulative_count, 1u);
  EXPECT_EQ(out.bucket[1].cumulative_count, 2u);
  EXPECT_EQ(out.bucket[bounds.size() - 1].cumulative_count, 2u);
  EXPECT_EQ(out.bucket.back().cumulative_count, 3u);
  EXPECT_EQ(out.sample_count, 3u);
}

TEST(ErrorReasonsTest, EachReasonOfACallIsNamedOnce) {
  const auto& errors = ExpectedErrors();
  const std::set<std::pair<Call, std::string>> once(errors.begin(), errors.end());
  EXPECT_EQ(once.size(), errors.size());
  EXPECT_THAT(errors, Contains(Pair(Call::kPush, model::kChecksum)));
  EXPECT_THAT(errors, Contains(Pair(Call::kSetBudget, model::kBadConfig)));
  EXPECT_THAT(errors, Not(Contains(Pair(Call::kPull, model::kDiskFull))));
}

TEST(SecurityFamiliesTest, CountsAndEndsCarryTheirOwnLabels) {
  SecurityCounters counters;
  counters.certificate_not_after = 1700;
  counters.tokens.taken = 2;
  counters.rights.refused = 3;
  counters.Count(Denial::kNoRight);
  counters.Count(Denial::kNoTls);
  counters.Count(Denial::kNoTls);
  Families families;
  AddSecurity(counters, &families);
  const auto values = ValuesOf(families);
  EXPECT_THAT(values, Contains(Pair("ballast_tls_not_after_timestamp_seconds{what=certificate}", 1700)));
  EXPECT_THAT(values, Not(Contains(Key("ballast_tls_not_after_timestamp_seconds{what=crl}"))));
  EXPECT_THAT(values, Contains(Pair("ballast_tls_reloads_total{what=tokens,result=taken}", 2)));
  EXPECT_THAT(values, Contains(Pair("ballast_tls_reloads_total{what=tokens,result=refused}", 0)));
  EXPECT_THAT(values, Contains(Pair("ballast_tls_reloads_total{what=rights,result=refused}", 3)));
  EXPECT_THAT(values, Contains(Pair("ballast_auth_denied_total{why=no_right}", 1)));
  EXPECT_THAT(values, Contains(Pair("ballast_auth_denied_total{why=no_tls}", 2)));
  EXPECT_THAT(values, Contains(Pair("ballast_auth_denied_total{why=quota}", 0)));
}

class JobFamiliesTest : public ::testing::Test {
 protected:
  JobFamiliesTest() {
    v1::JobStatus& whole = *status_.add_jobs();
    whole.set_name("whole");
    whole.set_committed(7);
    whole.set_durability(v1::DURABILITY_EVERY_K);
    whole.set_pin_interval(5);
    whole.add_durable_versions(3);
    whole.add_durable_versions(6);
    whole.add_pinned_versions(7);
    whole.set_queued_steps(2);
    whole.set_log_capacity_bytes(4096);
    whole.set_log_used_bytes(1024);
    whole.set_unfilled_chunks(5);
    whole.set_short_chunks(9);
    whole.set_differing_chunks(3);
    whole.set_replicas(2);
    v1::JobStatus& lost = *status_.add_jobs();
    lost.set_name("lost");
    lost.set_committed(-1);
    lost.set_state_lost(true);
    v1::JobStatus& failed = *status_.add_jobs();
    failed.set_name("failed");
    failed.set_failure("IO: no answer");
  }

  v1::GetServerStatusResponse status_;
};

TEST_F(JobFamiliesTest, AJobsStatusIsToldUnderItsName) {
  Families families;
  AddJobs(status_, &families);
  const auto values = ValuesOf(families);
  EXPECT_THAT(values, Contains(Pair("ballast_job_info{training_job=whole,durability=every-5}", 1)));
  EXPECT_THAT(values, Contains(Pair("ballast_job_committed_version{training_job=whole}", 7)));
  EXPECT_THAT(values, Contains(Pair("ballast_job_committed_version{training_job=lost}", -1)));
  EXPECT_THAT(values, Contains(Pair("ballast_job_unfilled_chunks{training_job=whole}", 5)));
  EXPECT_THAT(values, Contains(Pair("ballast_job_short_chunks{training_job=whole}", 9)));
  EXPECT_THAT(values, Contains(Pair("ballast_job_differing_chunks{training_job=whole}", 3)));
  EXPECT_THAT(values, Contains(Pair("ballast_job_copies{training_job=whole}", 2)));
  EXPECT_THAT(values, Contains(Pair("ballast_job_short_chunks{training_job=failed}", 0)));
  EXPECT_THAT(values, Contains(Pair("ballast_job_pins{training_job=whole,kind=durable}", 2)));
  EXPECT_THAT(values, Contains(Pair("ballast_job_pins{training_job=whole,kind=read}", 1)));
  EXPECT_THAT(values, Contains(Pair("ballast_job_newest_durable_pin_version{training_job=whole}", 6)));
  EXPECT_THAT(values, Contains(Pair("ballast_job_newest_durable_pin_version{training_job=lost}", -1)));
}

TEST_F(JobFamiliesTest, ALostJobIsAlsoFailedAndAFailedOneNotLost) {
  Families families;
  AddJobs(status_, &families);
  const auto values = ValuesOf(families);
  const std::map<std::string, std::pair<double, double>> expected = {
      {"whole", {0, 0}}, {"lost", {1, 1}}, {"failed", {1, 0}}};
  for (const auto& [job, flags] : expected) {
    EXPECT_THAT(values, Contains(Pair(absl::StrCat("ballast_job_failed{training_job=", job, "}"), flags.first)));
    EXPECT_THAT(values, Contains(Pair(absl::StrCat("ballast_job_state_lost{training_job=", job, "}"), flags.second)));
  }
}

TEST_F(JobFamiliesTest, CountersAreThoseOfTheJobOfTheSameName) {
  const auto counters = std::make_shared<JobCounters>();
  counters->received_bytes = 100;
  counters->sent_bytes = 200;
  counters->fences = 3;
  ServerFigures figures;
  figures.jobs = {{"whole", counters}, {"gone", std::make_shared<JobCounters>()}};
  Families families;
  AddTraffic(status_, figures, &families);
  AddSteps(status_, figures, &families);
  const auto values = ValuesOf(families);
  EXPECT_THAT(values, Contains(Pair("ballast_received_bytes_total{training_job=whole}", 100)));
  EXPECT_THAT(values, Contains(Pair("ballast_sent_bytes_total{training_job=whole}", 200)));
  EXPECT_THAT(values, Contains(Pair("ballast_fences_total{training_job=whole}", 3)));
  EXPECT_THAT(values, Contains(Pair("ballast_log_used_bytes{training_job=whole}", 1024)));
  EXPECT_THAT(values, Contains(Pair("ballast_queued_steps{training_job=whole}", 2)));
  // A job without counters, counters without a job, and a step that was never made: no series.
  EXPECT_THAT(values, Not(Contains(Key("ballast_received_bytes_total{training_job=lost}"))));
  EXPECT_THAT(values, Not(Contains(Key("ballast_received_bytes_total{training_job=gone}"))));
  EXPECT_THAT(values, Not(Contains(Key("ballast_last_step_seconds{training_job=whole}"))));
}

}  // namespace
}  // namespace ballast::services
