#include <gtest/gtest.h>
#include <signal.h>

#include <filesystem>
#include <fstream>
#include <iostream>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "ballast/proto/model/epoch_plan.h"
#include "ballast/proto/model/tiling.h"
#include "ballast/services/tools/cluster.h"
#include "ballast/tests/scratch_directory.h"
#include "ballast/tests/services/daemon.h"
#include "ballast/tests/services/gateway/rpc_fixture.h"
#include "ballast/tests/services/monitoring/http_fixture.h"
#include "ballast/tests/small_disk.h"

namespace ballast::services {
namespace {

Finished RunDaemon(const std::string& directory, const std::string& config) {
  std::ofstream(directory + "/bad.yaml") << config;
  return RunProcess({DaemonPath(), "--config", directory + "/bad.yaml"});
}

TEST(Ballastd, SaysWhenItIsReadyAndEndsOnSignals) {
  for (const int signal : {SIGTERM, SIGINT}) {
    ScratchDirectory directory;
    Daemon daemon(directory.path(), DaemonConfig(directory.path() + "/data", "one"));
    ASSERT_TRUE(daemon.ready()) << daemon.ready_line();
    EXPECT_EQ(daemon.ready_line(),
              "ballastd ready listen=" + daemon.listen() + " metrics=" + daemon.metrics() + " server_id=one\n");
    EXPECT_EQ(daemon.listen().rfind("127.0.0.1:", 0), 0u);
    EXPECT_NE(daemon.listen(), "127.0.0.1:0");
    EXPECT_NE(daemon.metrics(), "127.0.0.1:0");
    EXPECT_TRUE(LookAt({daemon.listen()}, {absl::Seconds(30), {}})[0].error.ok());
    EXPECT_EQ(daemon.End(signal), 0);
  }
}

// A signal ended the server without a line.
TEST(Ballastd, AFileAtTheLimitOfItsSizeIsAnErrorWithALine) {
  ScratchDirectory directory;
  std::ofstream(directory.path() + "/d.yaml")
      << "listen: 127.0.0.1:0\nmetrics_listen: 127.0.0.1:0\ndata_directory: " << directory.path()
      << "/data\nbudget: {dram: 1MiB}\n";
  // Through a pipe: what this test reads is a file too.
  const Finished limited = RunProcess({"/bin/bash", "-c",
                                       "(ulimit -f 0; exec " + DaemonPath() + " --config " + directory.path() +
                                           "/d.yaml) 2>&1 | cat >&2; exit ${PIPESTATUS[0]}"});
  EXPECT_EQ(limited.code, 5) << limited.err;
  EXPECT_NE(limited.err.find("File too large"), std::string::npos) << limited.err;
}

TEST(Ballastd, AFullDiskEndsWithACodeThatTheUnitTriesAgain) {
  SmallDisk disk(uint64_t{8} << 20);
  if (!disk.mounted()) GTEST_SKIP() << "no tmpfs can be mounted: " << disk.why_not();
  const std::string config = "listen: 127.0.0.1:0\nmetrics_listen: 127.0.0.1:0\ndata_directory: " + disk.path() +
                             "/data\nbudget: {dram: 1MiB}\n";
  ScratchDirectory directory;
  disk.Fill();
  const Finished full = RunDaemon(directory.path(), config);
  EXPECT_EQ(full.code, 9) << full.err;
  EXPECT_NE(full.err.find("No space left on device"), std::string::npos) << full.err;
}

TEST(Ballastd, ABudgetBeyondTheDiskIsWarnedOf) {
  ScratchDirectory directory;
  std::ofstream(directory.path() + "/d.yaml")
      << "listen: 127.0.0.1:0\nmetrics_listen: 127.0.0.1:0\ndata_directory: " << directory.path()
      << "/data\nbudget: {dram: 64MiB, nvme: 512TiB}\n";
  Process daemon({DaemonPath(), "--config", directory.path() + "/d.yaml"});
  while (!daemon.ended() && daemon.OutputSoFar().find('\n') == std::string::npos) absl::SleepFor(absl::Milliseconds(5));
  daemon.Signal(SIGTERM);
  const Finished done = daemon.Wait();
  EXPECT_EQ(done.code, 0) << done.err;
  EXPECT_NE(done.err.find("[warning] free disk space "), std::string::npos) << done.err;
  EXPECT_NE(done.err.find(", wanted 524288.00 GiB (budget.nvme) and 256.0 MiB: free "), std::string::npos) << done.err;
  EXPECT_NE(done.err.find("or budget.nvme: at most "), std::string::npos) << done.err;
}

TEST(Ballastd, ALimitOfItsAddressSpaceIsNamed) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "a sanitizer reserves more address space than the limit";
#endif
  ScratchDirectory directory;
  std::ofstream(directory.path() + "/d.yaml")
      << "listen: 127.0.0.1:0\nmetrics_listen: 127.0.0.1:0\ndata_directory: " << directory.path()
      << "/data\nbudget: {dram: 1MiB}\n";
  for (const char* const kib : {"100000", "300000"}) {
    const Finished limited = RunProcess(
        {"/bin/bash", "-c",
         std::string("ulimit -v ") + kib + "; exec " + DaemonPath() + " --config " + directory.path() + "/d.yaml"});
    EXPECT_NE(limited.code, 0) << limited.err;
    EXPECT_NE(limited.err.find("ulimit -v"), std::string::npos) << limited.err;
  }
}

TEST(Ballastd, SighupEndsNoServer) {
  ScratchDirectory directory;
  Daemon daemon(directory.path(), DaemonConfig(directory.path() + "/data", "one"));
  ASSERT_TRUE(daemon.ready()) << daemon.ready_line();
  daemon.Signal(SIGHUP);
  EXPECT_TRUE(LookAt({daemon.listen()}, {absl::Seconds(30), {}})[0].error.ok());
  EXPECT_EQ(daemon.End(SIGTERM), 0);
}

// What the reader of standard error does not take is lost, and nothing else is.
TEST(Ballastd, AStuckReaderOfStandardErrorHoldsNothingUp) {
  ScratchDirectory directory;
  const std::string config = DaemonConfig(directory.path() + "/data", "one") + "\nlog_level: trace\n";
  std::ofstream(directory.path() + "/stuck.yaml") << config;
  // A pipe of one page that is full from the start, and that somebody holds open without reading.
  const std::string script = absl::StrCat(
      "import fcntl, os, subprocess, sys, time, signal\n"
      "r, w = os.pipe(); fcntl.fcntl(w, 1031, 4096); os.write(w, b'x' * 4096)\n"
      "p = subprocess.Popen(['",
      DaemonPath(), "', '--config', '", directory.path(),
      "/stuck.yaml'], stderr=w, stdout=subprocess.PIPE, text=True)\n"
      "assert p.stdout.readline().startswith('ballastd ready')\n"
      "p.send_signal(signal.SIGHUP); time.sleep(0.2); p.send_signal(signal.SIGTERM)\n"
      "sys.exit(p.wait(60))\n");
  const Finished finished = RunProcess({"/usr/bin/env", "python3", "-c", script});
  EXPECT_EQ(finished.code, 0) << finished.err;
}

// A dry run of `chunks` chunks on as many members, under way at a server.
class LongPlan {
 public:
  LongPlan(const Daemon& daemon, uint64_t chunks, int members)
      : stub_(v1::StateService::NewStub(grpc::CreateChannel(daemon.listen(), grpc::InsecureChannelCredentials()))) {
    grpc::ClientContext asking;
    v1::IdentifyResponse server;
    EXPECT_TRUE(stub_->Identify(&asking, v1::IdentifyRequest(), &server).ok());
    v1::OpenRequest open;
    *open.mutable_spec() = MakeSpec("large", {{"t", "u", chunks * model::kChunkElementsMin, 0}});
    open.set_spec_digest(model::SpecDigest(open.spec()));
    open.set_protocol_version(model::kProtocolVersion);
    open.mutable_epoch()->set_counter(1);
    open.set_base(-1);
    open.set_dry_run(true);
    *open.mutable_tiling() = model::EvenTiling(1);
    for (int i = 0; i < members; ++i) {
      v1::Member* const member = open.add_members();
      member->set_server_id(i == 0 ? server.server_id() : absl::StrCat("m", i));
      member->set_weight(1);
    }
    context_.AddMetadata(model::kVersionMetadata, absl::StrCat(model::kProtocolVersion));
    context_.AddMetadata(model::kServerMetadata, model::TargetOf(server.server_id(), server.disk()));
    asking_ = std::thread([this, open] {
      v1::OpenResponse answer;
      status_ = FromGrpc(stub_->Open(&context_, open, &answer));
      done_.Notify();
    });
  }
  ~LongPlan() { asking_.join(); }
  bool AwaitEnd(absl::Duration patience) { return done_.WaitForNotificationWithTimeout(patience); }
  // Once it has ended.
  const absl::Status& status() const { return status_; }

 private:
  const std::unique_ptr<v1::StateService::Stub> stub_;
  grpc::ClientContext context_;
  absl::Status status_;
  absl::Notification done_;
  std::thread asking_;
};

TEST(Ballastd, AnEndlessDryRunIsRefusedAndSigtermEndsTheLongestThatIsNot) {
  ScratchDirectory directory;
  Daemon daemon(directory.path(), DaemonConfig(directory.path() + "/data", "one"));
  ASSERT_TRUE(daemon.ready()) << daemon.ready_line();
  {
    LongPlan plan(daemon, (uint64_t{1} << 20) - 64, 4096);
    ASSERT_TRUE(plan.AwaitEnd(absl::Minutes(1)));
    EXPECT_EQ(model::ReasonOf(plan.status()), model::kBadSpec) << plan.status();
    EXPECT_NE(plan.status().message().find("chunks x 4096 members"), absl::string_view::npos) << plan.status();
  }
  {
    LongPlan plan(daemon, model::kRoutesWeighedMax / 4096 - 64, 4096);
    const absl::Time patience = absl::Now() + absl::Minutes(1);
    while (!absl::StrContains(Get(daemon.metrics(), "/metrics").body, "\nballast_waiting_requests 1\n") &&
           absl::Now() < patience) {
      absl::SleepFor(absl::Milliseconds(10));  // until the plan is under way
    }
    ASSERT_FALSE(plan.AwaitEnd(absl::Milliseconds(100))) << plan.status();
    const absl::Time told = absl::Now();
    daemon.Signal(SIGTERM);
    ASSERT_TRUE(plan.AwaitEnd(absl::Minutes(1)));
    std::cout << "SIGTERM ended the dry run after " << absl::Now() - told << "\n";
    EXPECT_EQ(model::ReasonOf(plan.status()), model::kServerDown) << plan.status();
  }
  EXPECT_EQ(daemon.End(SIGTERM), 0);
}

TEST(Ballastd, SurvivesRandomBytesOnBothPorts) {
  ScratchDirectory directory;
  Daemon daemon(directory.path(), DaemonConfig(directory.path() + "/data", "one"));
  ASSERT_TRUE(daemon.ready());
  constexpr uint64_t kSeed = 20'240'603;
  SendRandomBytes(daemon.listen(), kSeed);
  SendRandomBytes(daemon.metrics(), kSeed);
  EXPECT_TRUE(LookAt({daemon.listen()}, {absl::Seconds(30), {}})[0].error.ok()) << "seed " << kSeed;
  EXPECT_EQ(daemon.End(SIGTERM), 0);
}

TEST(Ballastd, HasAnExitCodeForEachThingInItsWay) {
  ScratchDirectory directory;
  const std::string data = directory.path() + "/data";
  Daemon first(directory.path(), DaemonConfig(data, "one"));
  ASSERT_TRUE(first.ready());
  const std::string rest = "\nbudget: {dram: 1MiB}\n";
  const std::string other = "data_directory: " + directory.path() + "/other";

  const Finished port =
      RunDaemon(directory.path(), "listen: " + first.listen() + "\nmetrics_listen: 127.0.0.1:0\n" + other + rest);
  EXPECT_EQ(port.code, 3) << port.err;
  EXPECT_NE(port.err.find("cannot listen on '" + first.listen() + "': the port is in use"), std::string::npos)
      << port.err;

  const Finished metrics =
      RunDaemon(directory.path(), "listen: 127.0.0.1:0\nmetrics_listen: " + first.metrics() + "\n" + other + rest);
  EXPECT_EQ(metrics.code, 4) << metrics.err;
  EXPECT_NE(metrics.err.find("cannot serve metrics on '" + first.metrics() + "'"), std::string::npos) << metrics.err;

  const std::string free = "listen: 127.0.0.1:0\nmetrics_listen: 127.0.0.1:0\ndata_directory: ";
  const std::string file = directory.path() + "/ballastd.yaml";
  const Finished unwritable = RunDaemon(directory.path(), free + file + "/data" + rest);
  EXPECT_EQ(unwritable.code, 5) << unwritable.err;
  EXPECT_NE(unwritable.err.find("is not writable"), std::string::npos) << unwritable.err;

  const Finished used = RunDaemon(directory.path(), free + data + rest);
  EXPECT_EQ(used.code, 6) << used.err;
  EXPECT_NE(used.err.find("data directory " + data + " is in use by process "), std::string::npos) << used.err;

  const Finished unknown = RunDaemon(directory.path(), free + data + rest + "colour: red\n");
  EXPECT_EQ(unknown.code, 2) << unknown.err;
  EXPECT_NE(unknown.err.find("bad.yaml:5: unknown key 'colour'"), std::string::npos) << unknown.err;

  std::filesystem::create_directories(directory.path() + "/damaged/catalog");
  std::ofstream(directory.path() + "/damaged/catalog/CURRENT") << "nonsense";
  const Finished damaged = RunDaemon(directory.path(), free + directory.path() + "/damaged" + rest);
  EXPECT_EQ(damaged.code, 7) << damaged.err;
  EXPECT_NE(damaged.err.find("it is damaged: check its disk, then run `ballastctl verify --rebuild`"),
            std::string::npos)
      << damaged.err;

  std::filesystem::create_directories(directory.path() + "/later");
  std::ofstream(directory.path() + "/later/ballast-format") << "version: 3\nleast_reader: 3\n";
  const Finished later = RunDaemon(directory.path(), free + directory.path() + "/later" + rest);
  EXPECT_EQ(later.code, 8) << later.err;
  EXPECT_NE(later.err.find("has format 3 and asks for a program of format 3"), std::string::npos) << later.err;

  const Finished no_file = RunProcess({DaemonPath(), "--config", directory.path()});
  EXPECT_EQ(no_file.code, 2) << no_file.err;
  EXPECT_NE(no_file.err.find(directory.path() + ": is a directory; expected"), std::string::npos) << no_file.err;

  EXPECT_EQ(RunProcess({DaemonPath(), "--no-such-flag"}).code, 2);
  EXPECT_EQ(RunProcess({DaemonPath(), "--help"}).code, 0);
  EXPECT_EQ(first.End(SIGTERM), 0);
}

}  // namespace
}  // namespace ballast::services
