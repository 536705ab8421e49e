#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <thread>
#include <vector>

#include "ballast/services/metrics/metrics_server.h"
#include "ballast/tests/services/rpc/rpc_fixture.h"

namespace ballast::services {
namespace {

float Ones(uint32_t, uint64_t) { return 1.0f; }

// The body of GET /metrics; empty if a piece of it takes longer than Prometheus gives a scrape by default.
std::string Scrape(const std::string& address) {
  const int fd = ConnectTo(address);
  if (fd < 0) return "";
  const timeval wait_max = {.tv_sec = 10, .tv_usec = 0};
  (void)::setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &wait_max, sizeof wait_max);
  const std::string request = "GET /metrics HTTP/1.0\r\nHost: localhost\r\n\r\n";
  (void)::send(fd, request.data(), request.size(), MSG_NOSIGNAL);
  std::string answer;
  char piece[4096];
  for (ssize_t n = 0; (n = ::recv(fd, piece, sizeof piece, 0)) > 0;) answer.append(piece, n);
  ::close(fd);
  const size_t body = answer.find("\r\n\r\n");
  return answer.rfind("HTTP/1.1 200", 0) == 0 && body != std::string::npos ? answer.substr(body + 4) : "";
}

class MetricsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto metrics = MetricsServer::Start("127.0.0.1:0", server_.get());
    ASSERT_TRUE(metrics.ok()) << metrics.status();
    metrics_ = *std::move(metrics);
  }
  TestServer server_{"s"};
  std::unique_ptr<MetricsServer> metrics_;
};

TEST_F(MetricsTest, ScrapeTellsTheStoryAndPassesPromtool) {
  TrainerGroup group({server_.get()}, MakeSpec("job", SmallModel()), 1);
  ASSERT_EQ(group.Start(), absl::OkStatus());
  ASSERT_EQ(group.Initialise(Ones), absl::OkStatus());
  ASSERT_TRUE(group.Read(0, v1::CONTENT_WORKING, 0).ok());
  ASSERT_FALSE(group.Read(0, v1::CONTENT_WORKING, -1).ok());
  // A read of the result does not wait for the end of the update, and only then is the duration counted.
  const std::string updated = "ballast_stage_duration_seconds_count{stage=\"update\"} 1\n";
  std::string scrape = Scrape(metrics_->address());
  for (int i = 0; i < 1000 && scrape.find(updated) == std::string::npos; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    scrape = Scrape(metrics_->address());
  }
  uint64_t elements = 0, state_bytes = 0;
  for (const model::Chunk& chunk : group.plan().layout().chunks()) {
    elements += chunk.range.size();
    state_bytes += storage::StateLayout().StateBytes(chunk.range.size());
  }
  for (const std::string& line : {
           std::string("ballast_tier_capacity_bytes{tier=\"dram\"} 67108864"),
           absl::StrCat("ballast_tier_state_bytes{tier=\"dram\"} ", state_bytes),
           std::string("ballast_job_committed_version{job=\"job\"} 0"),
           std::string("ballast_job_skipped_steps_total{job=\"job\"} 0"),
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

TEST_F(MetricsTest, SurvivesRandomBytes) {
  constexpr uint64_t kSeed = 20'240'602;
  SendRandomBytes(metrics_->address(), kSeed);
  EXPECT_NE(Scrape(metrics_->address()).find("ballast_uptime_seconds"), std::string::npos) << "seed " << kSeed;
}

TEST_F(MetricsTest, AnswersBesideClientsThatDoNot) {
  std::vector<int> idle;
  for (int i = 0; i < 300; ++i) {
    idle.push_back(ConnectTo(metrics_->address()));
    ASSERT_GE(idle.back(), 0) << i;
    const std::string half = "GET /metrics HTTP/1.0\r\nHost: loc";
    if (i % 2 == 0) continue;
    ASSERT_EQ(::send(idle.back(), half.data(), half.size(), MSG_NOSIGNAL), static_cast<ssize_t>(half.size()));
  }
  const absl::Time began = absl::Now();
  EXPECT_NE(Scrape(metrics_->address()).find("ballast_uptime_seconds"), std::string::npos);
  EXPECT_LT(absl::Now() - began, absl::Seconds(10));
  for (const int fd : idle) ::close(fd);
}

TEST_F(MetricsTest, RefusesWhatIsNoAddress) {
  const absl::Status status = MetricsServer::Start("127.0.0.1:99999", server_.get()).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
}

TEST_F(MetricsTest, RefusesAPortInUse) {
  const absl::Status status = MetricsServer::Start(metrics_->address(), server_.get()).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_NE(
      status.message().find(absl::StrCat("cannot serve metrics on '", metrics_->address(), "': the port is in use")),
      absl::string_view::npos)
      << status;
}

}  // namespace
}  // namespace ballast::services
