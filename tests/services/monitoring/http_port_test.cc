#include "ballast/services/monitoring/http_port.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "ballast/services/monitoring/doorman.h"
#include "ballast/tests/services/gateway/rpc_fixture.h"
#include "ballast/tests/services/hung_disk.h"
#include "ballast/tests/services/monitoring/http_fixture.h"
#include "ballast/tests/services/shut_executors.h"

namespace ballast::services {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

class HttpPortTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto port = HttpPort::Start("127.0.0.1:0", &progress_);
    ASSERT_TRUE(port.ok()) << port.status();
    port_ = *std::move(port);
  }
  void Serve() { port_->Serve(server_.get(), "127.0.0.1:7070"); }
  const std::string& address() const { return port_->address(); }

  RecoveryProgress progress_;
  TestServer server_{"s"};
  std::unique_ptr<HttpPort> port_;
};

TEST_F(HttpPortTest, SaysHowFarARecoveryIsBeforeThereIsAServer) {
  progress_.total_bytes = 4000;
  progress_.done_bytes = 1000;
  EXPECT_EQ(Get(address(), "/livez").status, 200);
  const HttpAnswer ready = Get(address(), "/readyz");
  EXPECT_EQ(ready.status, 503);
  EXPECT_EQ(ready.body, "{\"state\":\"recovering\",\"recovery_done_bytes\":1000,\"recovery_total_bytes\":4000}\n");
  const std::string metrics = Get(address(), "/metrics").body;
  EXPECT_THAT(metrics, HasSubstr("ballast_server_state{state=\"recovering\"} 1\n"));
  EXPECT_THAT(metrics, HasSubstr("ballast_server_state{state=\"ready\"} 0\n"));
  EXPECT_THAT(metrics, HasSubstr("ballast_recovery_bytes{kind=\"done\"} 1000\n"));
  EXPECT_THAT(metrics, HasSubstr("ballast_recovery_bytes{kind=\"total\"} 4000\n"));
  const std::string status = Get(address(), "/status.json").body;
  EXPECT_THAT(status, HasSubstr("\"verdict\":\"degraded\""));
  EXPECT_THAT(status, HasSubstr("recovers its jobs: 1000 B of 3.9 KiB"));
  EXPECT_THAT(status, HasSubstr("\"recovery_done_bytes\":\"1000\""));
}

TEST_F(HttpPortTest, TurnsReadyAndThenStops) {
  Serve();
  EXPECT_EQ(Get(address(), "/readyz").status, 200);
  const HttpAnswer metrics = Get(address(), "/metrics");
  EXPECT_THAT(metrics.head, HasSubstr("Content-Type: text/plain; version=0.0.4"));
  EXPECT_THAT(metrics.body, HasSubstr("ballast_server_state{state=\"ready\"} 1\n"));
  EXPECT_THAT(metrics.body, HasSubstr("ballast_tier_capacity_bytes{tier=\"dram\"} 67108864\n"));
  const HttpAnswer status = Get(address(), "/status.json");
  EXPECT_THAT(status.head, HasSubstr("Content-Type: application/json"));
  EXPECT_THAT(status.body, HasSubstr("\"verdict\":\"healthy\""));
  EXPECT_THAT(status.body, HasSubstr("\"address\":\"127.0.0.1:7070\""));
  EXPECT_THAT(status.body, HasSubstr("\"server_id\":\"s\""));
  const HttpAnswer page = Get(address(), "/");
  EXPECT_EQ(page.status, 200);
  EXPECT_THAT(page.head, HasSubstr("Content-Security-Policy: default-src 'self'"));
  port_->Withdraw();
  EXPECT_EQ(Get(address(), "/livez").status, 200);
  EXPECT_THAT(Get(address(), "/readyz").body, HasSubstr("\"stopping\""));
  EXPECT_THAT(Get(address(), "/metrics").body, Not(HasSubstr("ballast_tier_capacity_bytes")));
}

TEST_F(HttpPortTest, IsNotReadyWhileSomethingKeepsTrainersOut) {
  std::string fault;
  port_->Serve(server_.get(), "127.0.0.1:7070", [&] { return fault; });
  EXPECT_EQ(Get(address(), "/readyz").status, 200);
  fault = "the catalog's disk: \"no space\"";
  const HttpAnswer ready = Get(address(), "/readyz");
  EXPECT_EQ(ready.status, 503);
  EXPECT_THAT(ready.body, HasSubstr(R"("state":"ready")"));
  EXPECT_THAT(ready.body, HasSubstr(R"("fault":"the catalog's disk: \"no space\"")"));
  EXPECT_EQ(Get(address(), "/livez").status, 200);
}

TEST_F(HttpPortTest, ServesThePageWithoutInlineCode) {
  const HttpAnswer page = Get(address(), "/");
  EXPECT_THAT(page.head, HasSubstr("Content-Type: text/html"));
  for (const auto& [path, type] :
       {std::pair{"/page.css", "text/css"}, {"/page.js", "text/javascript"}, {"/page.svg", "image/svg+xml"}}) {
    EXPECT_THAT(page.body, HasSubstr(absl::StrCat("\"", path, "\""))) << "the document does not ask for it";
    const HttpAnswer part = Get(address(), path);
    EXPECT_EQ(part.status, 200) << path;
    EXPECT_THAT(part.head, HasSubstr(absl::StrCat("Content-Type: ", type)));
    EXPECT_GT(part.body.size(), 100u) << path;
  }
  // The policy default-src 'self' would refuse these.
  for (const char* const refused : {"<script>", "<style", "style=", "onload=", "onclick=", "http://", "https://"}) {
    EXPECT_THAT(page.body, Not(HasSubstr(refused)));
  }
}

TEST_F(HttpPortTest, TellsTheLastSteps) {
  EXPECT_EQ(Get(address(), "/steps.json").status, 200);  // there are none before the server is ready
  TrainerGroup group({server_.get()}, MakeSpec("job", SmallModel()), 1);
  ASSERT_EQ(group.Start(), absl::OkStatus());
  ASSERT_EQ(group.Initialise(Ones), absl::OkStatus());
  for (int i = 0; i < 4; ++i) ASSERT_EQ(Step(group), absl::OkStatus());
  Serve();
  const std::string all = Get(address(), "/steps.json").body;
  EXPECT_THAT(all, HasSubstr("\"job\":\"job\""));
  EXPECT_THAT(all, HasSubstr("\"step\":\"0\""));
  EXPECT_THAT(all, HasSubstr("\"stage\":\"kernel\""));
  const std::string last = Get(address(), "/steps.json?job=job&last=2").body;
  EXPECT_THAT(last, Not(HasSubstr("\"step\":\"2\"")));
  EXPECT_THAT(last, HasSubstr("\"step\":\"3\""));
  EXPECT_THAT(last, HasSubstr("\"step\":\"4\""));
  EXPECT_THAT(Get(address(), "/steps.json?job=another").body, HasSubstr("\"jobs\":[]"));
  EXPECT_EQ(Get(address(), "/steps.json?last=few").status, 400);
}

struct Progress {
  uint64_t done = 0, total = 0;
};

TEST_F(HttpPortTest, AnswersWhileJobsAreRecovered) {
  // The server asks as long as it lives: what follows a start in the background asks too.
  absl::Mutex mu;
  std::vector<Progress> asked;
  TestServer server("durable", {0, uint64_t{64} << 20, uint64_t{256} << 20});
  TrainerGroup group({server.get()}, Spec("job", v1::DURABILITY_STEP), 1);
  ASSERT_EQ(group.Start(), absl::OkStatus());
  ASSERT_EQ(group.Initialise(Ones), absl::OkStatus());
  for (int i = 0; i < 6; ++i) ASSERT_EQ(Step(group), absl::OkStatus());
  server.options().progress = &progress_;
  // Asks amid the start, which goes on after the answers.
  server.options().interrupt = [&] {
    absl::MutexLock lock(&mu);
    EXPECT_EQ(Get(address(), "/livez").status, 200);
    EXPECT_EQ(Get(address(), "/readyz").status, 503);
    EXPECT_THAT(Get(address(), "/metrics").body, HasSubstr("ballast_server_state{state=\"recovering\"} 1\n"));
    asked.push_back({progress_.done_bytes, progress_.total_bytes});
    return absl::OkStatus();
  };
  server.Restart();
  const std::vector<Progress> seen = [&] {
    absl::MutexLock lock(&mu);
    return asked;
  }();
  ASSERT_GE(seen.size(), 6u);
  EXPECT_EQ(seen.front().done, 0u);
  EXPECT_GT(seen.front().total, 0u);
  size_t amid = 0;
  for (size_t i = 1; i < seen.size(); ++i) {
    EXPECT_GE(seen[i].done, seen[i - 1].done);
    EXPECT_LE(seen[i].total, seen[i - 1].total);
    EXPECT_LE(seen[i].done, seen[i].total);
    if (seen[i].done > seen[i - 1].done && seen[i].done < seen[i].total) ++amid;
  }
  EXPECT_GE(amid, 3u);
  EXPECT_EQ(progress_.done_bytes, progress_.total_bytes);
}

// A status waits for each job's lock. Probes, and the server's end, wait for no status.
TEST_F(HttpPortTest, ProbesWaitForNoJob) {
  ShutExecutors machine;
  TestServer server("s");
  server.options().foundation = &machine;
  server.Restart();
  TrainerGroup group({server.get()}, MakeSpec("job", SmallModel()), 1);
  ASSERT_EQ(group.Start(), absl::OkStatus());
  port_->Serve(server.get(), "127.0.0.1:7070");
  machine.Shut();
  v1::FenceRequest fence;
  fence.set_job("job");
  fence.mutable_epoch()->set_counter(9);
  fence.set_protocol_version(model::kProtocolVersion);
  Answer<v1::FenceResponse> fenced;
  std::thread keeper([&] { server->Fence(fence, absl::Now() + absl::Minutes(1), fenced.reply()); });
  machine.AwaitTask();  // under the job's lock

  std::vector<HttpAnswer> scrapes(4);
  std::vector<std::thread> scrapers;
  for (HttpAnswer& scrape : scrapes) {
    scrapers.emplace_back([&] { scrape = Get(address(), "/metrics"); });
  }
  absl::SleepFor(absl::Milliseconds(500));
  EXPECT_EQ(Get(address(), "/livez").status, 200);
  EXPECT_EQ(Get(address(), "/readyz?verbose").status, 200);
  absl::Notification withdrawn;
  std::thread ending([&] {
    port_->Withdraw();
    withdrawn.Notify();
    port_->AwaitAnswers();
  });
  EXPECT_TRUE(withdrawn.WaitForNotificationWithTimeout(absl::Minutes(1)));
  EXPECT_THAT(Get(address(), "/readyz").body, HasSubstr("\"stopping\""));
  machine.Open();
  ending.join();
  keeper.join();
  for (std::thread& scraper : scrapers) scraper.join();
  EXPECT_THAT(scrapes[0].body + scrapes[1].body + scrapes[2].body + scrapes[3].body,
              HasSubstr("ballast_job_info{training_job=\"job\""));
}

TEST_F(HttpPortTest, AnswersOnlyReads) {
  EXPECT_EQ(Get(address(), "/nothing").status, 404);
  EXPECT_EQ(Ask(address(), "POST /livez HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\n\r\nabc").status, 405);
  const HttpAnswer head = Ask(address(), "HEAD /livez HTTP/1.1\r\nHost: h\r\n\r\n");
  EXPECT_EQ(head.status, 200);
  EXPECT_EQ(head.body, "");
  EXPECT_EQ(Ask(address(), "GET\r\n\r\n").status, 400);
  // Ranges would be copies: as many as a request can name.
  const HttpAnswer ranges = Ask(address(), "GET /livez HTTP/1.1\r\nHost: h\r\nRange: bytes=0-1,0-1,0-1\r\n\r\n");
  EXPECT_EQ(ranges.status, 200);
  EXPECT_EQ(ranges.body, "ok\n");
  // Longer than any request: given up, and the port goes on.
  EXPECT_EQ(Ask(address(), "GET /" + std::string(Doorman::kRequestBytesMax, 'x')).status, 0);
  EXPECT_EQ(Get(address(), "/livez").status, 200);
}

TEST_F(HttpPortTest, SurvivesRandomBytes) {
  constexpr uint64_t kSeed = 20'240'602;
  SendRandomBytes(address(), kSeed);
  EXPECT_EQ(Get(address(), "/livez").status, 200) << "seed " << kSeed;
}

TEST_F(HttpPortTest, IdleConnectionsKeepNoScrapeOut) {
  const std::string half = "GET /metrics HTTP/1.0\r\nHost: loc";
  // A thread for each would be waited for: nobody may wait for a client's patience to end, which is some seconds. A
  // slow machine delays some.
  absl::Duration least = absl::InfiniteDuration();
  for (int tries = 0; tries < 5 && least >= absl::Seconds(2); ++tries) {
    std::vector<int> idle;
    for (int i = 0; i < 300; ++i) {
      idle.push_back(ConnectTo(address()));
      ASSERT_GE(idle.back(), 0) << i;
      if (i % 2 == 0) continue;
      ASSERT_EQ(::send(idle.back(), half.data(), half.size(), MSG_NOSIGNAL), static_cast<ssize_t>(half.size()));
    }
    const absl::Time began = absl::Now();
    for (int i = 0; i < 20; ++i) EXPECT_EQ(Get(address(), "/metrics").status, 200);
    least = std::min(least, absl::Now() - began);
    for (const int fd : idle) ::close(fd);
  }
  EXPECT_LT(least, absl::Seconds(2));
}

// Connections that come while an answer is being made do not push its client out.
TEST(Doorman, AnAnswerUnderWayKeepsItsPlace) {
  absl::Notification asked, go_on;
  const auto doorman = Doorman::Start("127.0.0.1:0", [&](const auto&...) {
    asked.Notify();
    go_on.WaitForNotification();
    return std::string("HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nok\n");
  });
  ASSERT_TRUE(doorman.ok()) << doorman.status();
  HttpAnswer answer;
  std::thread client([&] { answer = Get((*doorman)->address(), "/"); });
  asked.WaitForNotification();
  std::vector<int> idle;
  for (size_t i = 0; i < Doorman::kConnectionsMax + 10; ++i) idle.push_back(ConnectTo((*doorman)->address()));
  // The oldest of them has been given up once the last was accepted.
  char byte = 0;
  EXPECT_EQ(::recv(idle[0], &byte, 1, 0), 0);
  go_on.Notify();
  client.join();
  EXPECT_EQ(answer.status, 200);
  EXPECT_EQ(answer.body, "ok\n");
  for (const int fd : idle) ::close(fd);
}

TEST_F(HttpPortTest, SlowClientsKeepNoScrapeOut) {
  Serve();
  const std::string whole = "GET /metrics HTTP/1.1\r\nHost: h\r\n\r\n";
  absl::Duration least_time = absl::InfiniteDuration();  // a slow machine delays some
  for (int tries = 0; tries < 5 && least_time >= absl::Seconds(4); ++tries) {
    std::vector<int> slow;
    for (int i = 0; i < 100; ++i) {
      const int fd = ConnectTo(address());
      ASSERT_GE(fd, 0);
      slow.push_back(fd);
      const int least = 1;  // answers do not fit into what the kernel holds for a client that does not read
      (void)::setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &least, sizeof least);
      const std::string request = i % 2 == 0 ? whole : "";
      ASSERT_EQ(::send(fd, request.data(), request.size(), MSG_NOSIGNAL), static_cast<ssize_t>(request.size()));
    }
    const absl::Time began = absl::Now();
    for (size_t byte = 0; byte < 20; ++byte) {
      for (size_t i = 1; i < slow.size(); i += 2) (void)::send(slow[i], whole.data() + byte, 1, MSG_NOSIGNAL);
      EXPECT_EQ(Get(address(), "/metrics").status, 200);
    }
    least_time = std::min(least_time, absl::Now() - began);
    for (const int fd : slow) ::close(fd);
  }
  EXPECT_LT(least_time, absl::Seconds(4));
}

TEST_F(HttpPortTest, AClientThatSendsTooSlowlyIsCut) {
  const int fd = ConnectTo(address());
  ASSERT_GE(fd, 0);
  const absl::Time began = absl::Now();
  const std::string drip = "GET /livez HTTP/1.1\r\nX: ";
  ssize_t n = -1;
  for (size_t i = 0; absl::Now() - began < absl::Minutes(1); ++i) {
    (void)::send(fd, i < drip.size() ? &drip[i] : "x", 1, MSG_NOSIGNAL);
    char byte = 0;
    n = ::recv(fd, &byte, 1, MSG_DONTWAIT);
    if (n == 0 || (n < 0 && errno != EAGAIN)) break;
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
  EXPECT_LT(absl::Now() - began, absl::Minutes(1)) << "still open";
  ::close(fd);
}

TEST_F(HttpPortTest, RefusesWhatIsNoAddress) {
  const absl::Status status = HttpPort::Start("127.0.0.1:99999", &progress_).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
}

TEST_F(HttpPortTest, RefusesAPortInUse) {
  const absl::Status status = HttpPort::Start(address(), &progress_).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("cannot serve metrics on '" + address() + "': the port is in use"));
}

}  // namespace
}  // namespace ballast::services
