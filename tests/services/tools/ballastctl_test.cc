#include <gmock/gmock.h>
#include <google/protobuf/struct.pb.h>
#include <google/protobuf/util/json_util.h>
#include <gtest/gtest.h>

#include <fstream>
#include <map>
#include <set>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "ballast/services/tools/cluster.h"
#include "ballast/tests/services/daemon.h"
#include "ballast/tests/services/gateway/rpc_fixture.h"

namespace ballast::services {
namespace {

using ::testing::HasSubstr;

float Ones(uint32_t, uint64_t) { return 1.0f; }

google::protobuf::Struct Parse(const std::string& json) {
  google::protobuf::Struct parsed;
  EXPECT_TRUE(google::protobuf::util::JsonStringToMessage(json, &parsed).ok()) << json;
  return parsed;
}

class Ballastctl : public ::testing::Test {
 protected:
  void SetUp() override {
    for (TestServer* server : {&one_, &two_}) {
      auto rpc = RpcServer::Start({}, server->get());
      ASSERT_TRUE(rpc.ok()) << rpc.status();
      rpcs_.push_back(*std::move(rpc));
    }
    servers_ = rpcs_[0]->address() + "," + rpcs_[1]->address();
    ASSERT_EQ(group_.Start(), absl::OkStatus());
    ASSERT_EQ(group_.Initialise(Ones), absl::OkStatus());
    for (TestServer* server : {&one_, &two_}) AwaitIdle(server->get(), "job");
  }
  Finished Status(const std::vector<std::string>& extra = {}) const {
    std::vector<std::string> command = {CtlPath(), "status", "--timeout", "60", "--servers", servers_};
    command.insert(command.end(), extra.begin(), extra.end());
    return RunProcess(command);
  }
  Finished Drop(const std::string& job) const {
    return RunProcess({CtlPath(), "drop", "--job", job, "--timeout", "60", "--servers", servers_});
  }

  TestServer one_{"one"}, two_{"two"};
  std::vector<std::unique_ptr<RpcServer>> rpcs_;
  std::string servers_;
  TrainerGroup group_{{one_.get(), two_.get()}, MakeSpec("job", SmallModel()), 2};
};

TEST_F(Ballastctl, ShowsAHealthyClusterVerdictFirst) {
  const Finished status = Status();
  EXPECT_EQ(status.code, 0) << status.err;
  EXPECT_EQ(status.out.rfind("HEALTHY: 2 server(s), 1 job(s)\n", 0), 0u) << status.out;
  const size_t servers = status.out.find("\nServers\n"), jobs = status.out.find("\nJobs\n"),
               tiers = status.out.find("\nTiers\n");
  EXPECT_LT(servers, jobs);
  EXPECT_LT(jobs, tiers);
  EXPECT_NE(tiers, std::string::npos);
  EXPECT_THAT(status.out, HasSubstr("210400"));  // parameters
  EXPECT_THAT(status.out, HasSubstr("64.0 MiB"));
}

TEST_F(Ballastctl, TracesAJobsSteps) {
  const auto trace = [&](const std::string& job, const std::vector<std::string>& extra = {}) {
    std::vector<std::string> command = {CtlPath(), "trace", "--job", job, "--timeout", "60", "--servers", servers_};
    command.insert(command.end(), extra.begin(), extra.end());
    return RunProcess(command);
  };
  const Finished told = trace("job");
  ASSERT_EQ(told.code, 0) << told.err;
  std::map<std::string, int> spans;  // by name
  std::set<double> processes;
  std::map<double, double> step_us, stages_us;  // by process
  const google::protobuf::Struct parsed = Parse(told.out);
  for (const auto& event : parsed.fields().at("traceEvents").list_value().values()) {
    const auto& fields = event.struct_value().fields();
    const double process = fields.at("pid").number_value();
    processes.insert(process);
    if (fields.at("ph").string_value() != "X") continue;
    if (fields.at("tid").number_value() != 4) ++spans[fields.at("name").string_value()];  // a stage may be `push` too
    EXPECT_GE(fields.at("dur").number_value(), 0);
    if (fields.at("tid").number_value() == 1) step_us[process] += fields.at("dur").number_value();
    if (fields.at("tid").number_value() == 4) stages_us[process] += fields.at("dur").number_value();
  }
  EXPECT_EQ(processes.size(), 2u);
  for (const char* name : {"step 0", "push", "seals", "prepare", "decision", "update 0"}) {
    EXPECT_EQ(spans[name], 2) << name << " in\n" << told.out;
  }
  for (const auto& [process, us] : step_us) EXPECT_NEAR(stages_us[process], us, 0.05 * us + 100);
  const std::string file = one_.directory() + "/trace.json";
  EXPECT_EQ(trace("job", {"--out", file}).code, 0);
  std::ifstream written(file);
  std::ostringstream text;
  text << written.rdbuf();
  EXPECT_EQ(Parse(text.str()).fields().at("traceEvents").list_value().values_size(),
            parsed.fields().at("traceEvents").list_value().values_size());
  const Finished unknown = trace("another");
  EXPECT_EQ(unknown.code, 1);
  EXPECT_THAT(unknown.err, HasSubstr("no job 'another' is served there"));
  EXPECT_EQ(unknown.out, "");
}

TEST_F(Ballastctl, ChangesBudgets) {
  const auto budget = [&](const std::vector<std::string>& options) {
    std::vector<std::string> command = {CtlPath(), "budget", "--timeout", "60", "--servers", servers_};
    command.insert(command.end(), options.begin(), options.end());
    return RunProcess(command);
  };
  const Finished raised = budget({"--dram", "96MiB"});
  EXPECT_EQ(raised.code, 0) << raised.out << raised.err;
  EXPECT_THAT(raised.out, HasSubstr("budgets changed until the server restarts"));
  EXPECT_THAT(raised.out, HasSubstr("job 'job': 0 chunks move to nvme, 0 to dram, 0 to hbm. Of "));
  EXPECT_THAT(Status().out, HasSubstr("96.0 MiB"));
  // Both refuse: what is fixed does not fit.
  const Finished refused = budget({"--dram", "1KiB"});
  EXPECT_EQ(refused.code, 1);
  EXPECT_THAT(refused.out, HasSubstr("a dram budget of 1024 bytes is short of"));
  EXPECT_THAT(Status().out, HasSubstr("96.0 MiB"));
  EXPECT_EQ(budget({"--dram", "many"}).code, 2);
}

TEST_F(Ballastctl, SpeaksJson) {
  const Finished status = Status({"--json"});
  EXPECT_EQ(status.code, 0) << status.err;
  const google::protobuf::Struct parsed = Parse(status.out);
  const auto& json = parsed.fields();
  EXPECT_EQ(json.at("verdict").string_value(), "healthy");
  EXPECT_EQ(json.at("servers").list_value().values_size(), 2);
  const auto& first = json.at("servers").list_value().values(0).struct_value().fields();
  EXPECT_EQ(first.at("status").struct_value().fields().at("server_id").string_value(), "one");
  const auto& job = json.at("jobs").list_value().values(0).struct_value().fields();
  EXPECT_EQ(job.at("name").string_value(), "job");
  EXPECT_EQ(job.at("committed_min").number_value(), 0);
  EXPECT_EQ(job.at("parameters").number_value(), 210'400);
}

TEST_F(Ballastctl, ReportsAServerThatIsDown) {
  rpcs_[1]->Stop(absl::ZeroDuration());
  rpcs_[1].reset();
  const Finished status = Status();
  EXPECT_EQ(status.code, 1);
  EXPECT_THAT(status.out, HasSubstr("DEGRADED: server "));
  EXPECT_THAT(status.out, HasSubstr("does not answer"));
  const google::protobuf::Struct parsed = Parse(Status({"--json"}).out);
  const auto& json = parsed.fields();
  EXPECT_EQ(json.at("verdict").string_value(), "degraded");
  EXPECT_FALSE(json.at("servers").list_value().values(1).struct_value().fields().at("reachable").bool_value());
}

TEST_F(Ballastctl, ReportsLostStateAndDropsTheJob) {
  rpcs_[0].reset();
  one_.Restart();
  auto rpc = RpcServer::Start({}, one_.get());
  ASSERT_TRUE(rpc.ok()) << rpc.status();
  rpcs_[0] = *std::move(rpc);
  servers_ = rpcs_[0]->address() + "," + rpcs_[1]->address();
  const Finished lost = Status();
  EXPECT_EQ(lost.code, 1);
  EXPECT_THAT(lost.out, HasSubstr("job 'job' lost its state on " + rpcs_[0]->address()));
  const Finished drop = Drop("job");
  EXPECT_EQ(drop.code, 0) << drop.out;
  EXPECT_THAT(drop.out, HasSubstr(rpcs_[1]->address() + ": dropped job 'job'"));
  EXPECT_EQ(Status().code, 0);
  const Finished again = Drop("job");
  EXPECT_EQ(again.code, 0);
  EXPECT_THAT(again.out, HasSubstr("has no job 'job'"));
}

TEST_F(Ballastctl, ReportsAJobThatIsGoneFromOneOfItsServers) {
  const std::string all = servers_;
  servers_ = rpcs_[0]->address();
  const Finished partial = Status();
  EXPECT_EQ(partial.code, 1);
  EXPECT_THAT(partial.out, HasSubstr("DEGRADED: job 'job' also lives on server(s) 'two', none of which was asked"));
  EXPECT_EQ(Drop("job").code, 0);
  servers_ = all;
  const Finished status = Status();
  EXPECT_EQ(status.code, 1);
  EXPECT_THAT(status.out,
              HasSubstr("DEGRADED: job 'job' is gone from its server 'one' (" + rpcs_[0]->address() + "): drop it"));
  EXPECT_EQ(Drop("job").code, 0);
  EXPECT_EQ(Status().code, 0);
}

TEST_F(Ballastctl, SaysWhetherServersCanGo) {
  const Finished used = Status({"--unused"});
  EXPECT_EQ(used.code, 1);
  const std::string one = rpcs_[0]->address(), two = rpcs_[1]->address();
  EXPECT_THAT(used.out, ::testing::MatchesRegex(one +
                                                ": has [1-9][0-9]* chunks of job 'job': `ballastctl drop --job job "
                                                "--servers ...`\n" +
                                                two + ": has [1-9].*\n"));
  EXPECT_EQ(Drop("job").code, 0);
  const Finished unused = Status({"--unused"});
  EXPECT_EQ(unused.code, 0) << unused.out;
  EXPECT_EQ(unused.out, one + ": has no job\n" + two + ": has no job\n");
  EXPECT_EQ(Status({"--unused", "--json"}).code, 2);
  rpcs_[1]->Stop(absl::ZeroDuration());
  rpcs_[1].reset();
  const Finished silent = Status({"--unused"});
  EXPECT_EQ(silent.code, 1) << "who does not answer may have anything";
  EXPECT_THAT(silent.out, HasSubstr(two + ": does not answer"));
}

TEST_F(Ballastctl, ShowsPins) {
  v1::PinRequest pin;
  pin.set_job("job");
  Answer<v1::PinResponse> pinned;
  one_->Pin(pin, absl::InfiniteFuture(), pinned.reply());
  ASSERT_TRUE(pinned.Wait().ok());
  const auto json = Parse(Status({"--json"}).out).fields();
  const auto& job = json.at("jobs").list_value().values(0).struct_value().fields();
  ASSERT_EQ(job.at("pinned_versions").list_value().values_size(), 1);
  EXPECT_EQ(job.at("pinned_versions").list_value().values(0).number_value(), 0);
  EXPECT_THAT(Status().out, HasSubstr("PINS"));
}

TEST_F(Ballastctl, UnpinsWhatOneServerOnlyHasPinned) {
  TestServer durable("durable", {0, uint64_t{64} << 20, uint64_t{256} << 20});
  auto rpc = RpcServer::Start({}, durable.get());
  ASSERT_TRUE(rpc.ok()) << rpc.status();
  v1::JobSpec spec = MakeSpec("kept", SmallModel());
  spec.set_durability(v1::DURABILITY_STEP);
  TrainerGroup group({durable.get()}, spec, 1, 7);
  ASSERT_EQ(group.Start(), absl::OkStatus());
  ASSERT_EQ(group.Initialise(Ones), absl::OkStatus());
  ASSERT_EQ(PinDurably(durable.get(), "kept", group.epoch(), 0), absl::OkStatus());
  const auto unpin = [&](const std::string& version) {
    return RunProcess({CtlPath(), "unpin", "--job", "kept", "--version", version, "--timeout", "60", "--servers",
                       absl::StrCat(rpcs_[0]->address(), ",", (*rpc)->address())});
  };
  const Finished done = unpin("0");
  EXPECT_EQ(done.code, 0) << done.out << done.err;
  EXPECT_THAT(done.out, HasSubstr(rpcs_[0]->address() + ": no durable pin of version 0"));
  EXPECT_THAT(done.out, HasSubstr((*rpc)->address() + ": unpinned version 0 of job 'kept'"));
  EXPECT_EQ(durable->Status().jobs(0).durable_versions_size(), 0);
  EXPECT_EQ(unpin("0").code, 0);
  EXPECT_EQ(unpin("x").code, 2);
}

TEST_F(Ballastctl, ExitsWithTwoOnUsage) {
  EXPECT_EQ(RunProcess({CtlPath()}).code, 2);
  EXPECT_EQ(RunProcess({CtlPath(), "status"}).code, 2);
  const Finished no_port = RunProcess({CtlPath(), "status", "--servers", "localhost"});
  EXPECT_EQ(no_port.code, 2);
  EXPECT_NE(no_port.err.find("'localhost' has no port; expected host:port"), std::string::npos) << no_port.err;
  const Finished modulo = RunProcess({CtlPath(), "status", "--servers", servers_ + ",localhost:99999"});
  EXPECT_EQ(modulo.code, 2);
  EXPECT_THAT(modulo.err, HasSubstr("'localhost:99999' has no port from 1 to 65535; expected host:port"));
  EXPECT_EQ(RunProcess({CtlPath(), "drop", "--servers", servers_}).code, 2);
  EXPECT_EQ(RunProcess({CtlPath(), "--help"}).code, 0);
}

TEST(Judge, CallsVersionsMoreThanOneApartDegraded) {
  std::vector<ServerView> servers(2);
  for (int i = 0; i < 2; ++i) {
    servers[i].address = "host:" + std::to_string(i);
    servers[i].status.add_jobs()->set_name("job");
    servers[i].status.mutable_jobs(0)->set_committed(4 + i);
  }
  EXPECT_TRUE(Judge(servers).problems.empty());
  servers[1].status.mutable_jobs(0)->set_committed(6);
  const ClusterView apart = Judge(servers);
  ASSERT_EQ(apart.problems.size(), 1u);
  EXPECT_EQ(apart.problems[0], "job 'job' is at versions 4 to 6 on its servers, expected at most one apart");
  servers[1].status.mutable_jobs(0)->set_committed(4);
  servers[0].status.mutable_jobs(0)->set_failure("disk");
  EXPECT_EQ(Judge(servers).problems.size(), 1u);
}

TEST(Judge, CallsVersionsThatStayOneApartDegraded) {
  std::vector<ServerView> servers(2);
  for (int i = 0; i < 2; ++i) {
    servers[i].address = "host:" + std::to_string(i);
    servers[i].status.set_server_id("s" + std::to_string(i));
    servers[i].status.set_uptime_seconds(1000);
    servers[i].status.add_jobs()->set_name("job");
    servers[i].status.mutable_jobs(0)->set_committed(4 + i);
  }
  v1::StepInFlight* const step = servers[0].status.mutable_jobs(0)->mutable_in_flight();
  step->set_seconds_since_first_slice(90);
  step->set_seconds_since_prepared(1);
  EXPECT_TRUE(Judge(servers).problems.empty()) << "the Commit is on its way";
  step->set_seconds_since_prepared(25);
  const ClusterView behind = Judge(servers);
  ASSERT_EQ(behind.problems.size(), 1u);
  EXPECT_EQ(
      behind.problems[0],
      "job 'job' is at version 4 on host:0, which has had no Commit for 25 s, and at 5 on another server: start the "
      "job's trainers, which send it");
  servers[0].status.mutable_jobs(0)->clear_in_flight();
  servers[0].status.set_uptime_seconds(3);
  EXPECT_TRUE(Judge(servers).problems.empty()) << "just started";
}

// To drop the job everywhere would delete what the other servers have.
TEST(Judge, DropsNoJobOfWhichOthersHaveCopies) {
  for (const uint32_t replicas : {0, 1, 2}) {
    std::vector<ServerView> servers(2);
    for (int i = 0; i < 2; ++i) {
      servers[i].address = "host:" + std::to_string(i);
      servers[i].status.set_server_id("s" + std::to_string(i));
    }
    v1::JobStatus* const job = servers[0].status.add_jobs();
    job->set_name("job");
    job->set_replicas(replicas);
    for (const char* id : {"s0", "s1"}) job->add_member_ids(id);
    const ClusterView gone = Judge(servers);
    ASSERT_EQ(gone.problems.size(), 1u);
    EXPECT_EQ(gone.problems[0], std::string("job 'job' is gone from its server 's1' (host:1): ") +
                                    (replicas > 1 ? "its group copies anew what the server had, once it trains"
                                                  : "drop it everywhere with `ballastctl drop` and start again"));
  }
}

TEST(Judge, CallsTwoServersOfOneIdDegraded) {
  std::vector<ServerView> servers(3);
  for (int i = 0; i < 3; ++i) {
    servers[i].address = "host:" + std::to_string(i);
    servers[i].status.set_server_id(i == 1 ? "b" : "a");
  }
  const ClusterView view = Judge(servers);
  ASSERT_EQ(view.problems.size(), 1u);
  EXPECT_EQ(
      view.problems[0],
      "servers host:0 and host:2 both say that they are 'a': you named one server twice, or two servers use one id; "
      "then stop one");
  servers[2].error = absl::UnavailableError("down");
  EXPECT_EQ(Judge(servers).problems.size(), 1u) << "what does not answer has no id";
}

}  // namespace
}  // namespace ballast::services
