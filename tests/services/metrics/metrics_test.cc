#include <gtest/gtest.h>

#include <cstdio>
#include <fstream>
#include <thread>
#include <vector>

#include "ballast/services/metrics/families.h"
#include "ballast/tests/services/rpc/rpc_fixture.h"

namespace ballast::services {
namespace {

float Ones(uint32_t, uint64_t) { return 1.0f; }

class MetricsTest : public ::testing::Test {
 protected:
  std::string Scrape() { return ShowMetrics(server_.get(), ServerState::kReady, RecoveryProgress()); }
  TestServer server_{"s"};
};

TEST_F(MetricsTest, ScrapeTellsTheStoryAndPassesPromtool) {
  TrainerGroup group({server_.get()}, MakeSpec("job", SmallModel()), 1);
  ASSERT_EQ(group.Start(), absl::OkStatus());
  ASSERT_EQ(group.Initialise(Ones), absl::OkStatus());
  ASSERT_TRUE(group.Read(0, v1::CONTENT_WORKING, 0).ok());
  ASSERT_FALSE(group.Read(0, v1::CONTENT_WORKING, -1).ok());
  // A read of the result does not wait for the end of the update, and only then is the duration counted.
  const std::string updated = "ballast_stage_duration_seconds_count{stage=\"update\"} 1\n";
  std::string scrape = Scrape();
  for (int i = 0; i < 1000 && scrape.find(updated) == std::string::npos; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    scrape = Scrape();
  }
  uint64_t elements = 0, state_bytes = 0;
  for (const model::Chunk& chunk : group.plan().layout().chunks()) {
    elements += chunk.range.size();
    state_bytes += storage::StateLayout().StateBytes(chunk.range.size());
  }
  for (const std::string& line : {
           std::string("ballast_tier_capacity_bytes{tier=\"dram\"} 67108864"),
           absl::StrCat("ballast_tier_state_bytes{tier=\"dram\"} ", state_bytes),
           std::string("ballast_job_committed_version{training_job=\"job\"} 0"),
           std::string("ballast_job_skipped_steps_total{training_job=\"job\"} 0"),
           std::string("ballast_rpc_errors_total{method=\"Pull\",reason=\"BAD_REQUEST\"} 1"),
           absl::StrCat("ballast_received_bytes_total ", 4 * elements),
           std::string("ballast_sent_bytes_total 140000"),
           std::string("ballast_waiting_requests 0"),
           std::string("ballast_stage_duration_seconds_count{stage=\"update\"} 1"),
           std::string("ballast_rpc_duration_seconds_count{method=\"Identify\"} 0"),
           std::string("ballast_rpc_duration_seconds_count{method=\"Fence\"} 1"),
           std::string("ballast_rpc_duration_seconds_count{method=\"SetBudget\"} 0"),
       }) {
    EXPECT_NE(scrape.find(line), std::string::npos) << line << " in\n" << scrape;
  }
  const std::string file = server_.directory() + "/scrape";
  std::ofstream(file) << scrape;
  std::FILE* promtool = ::popen(("promtool check metrics < " + file + " 2>&1").c_str(), "r");
  ASSERT_NE(promtool, nullptr);
  std::string complaint;
  for (int c = 0; (c = std::fgetc(promtool)) != EOF;) complaint.push_back(static_cast<char>(c));
  EXPECT_EQ(::pclose(promtool), 0) << complaint;
  EXPECT_EQ(complaint, "");
}

}  // namespace
}  // namespace ballast::services
