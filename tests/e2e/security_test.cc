// Real processes by TLS: certificates and their CA change under training, and no step fails; identities show themselves
// by certificates and tokens; the price of TLS.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "ballast/client/collective/loopback_collective.h"
#include "ballast/client/session.h"
#include "ballast/proto/base/status.h"
#include "ballast/tests/e2e/training_processes.h"
#include "ballast/tests/scratch_directory.h"
#include "ballast/tests/services/daemon.h"
#include "ballast/tests/services/gateway/security/authority.h"
#include "ballast/tests/services/gateway/security/outside_address.h"
#include "ballast/tests/services/monitoring/http_fixture.h"

namespace ballast {
namespace {

using services::Authority;
using services::Finished;
using services::IssuedPair;
using services::OutsideAddress;
using services::WriteText;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr int kSteps = 400;  // held back, as below, these take longer than the changes of certificates

std::string Slurp(const std::string& path) {
  std::ifstream file(path);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

class SecurityTest : public ::testing::Test {
 protected:
  // Keys of ballastd for TLS with certificates of clients, beside those of the server.
  std::string TlsKeys() const {
    return absl::StrCat("tls:\n  certificate: ", dir_ / "server.crt", "\n  key: ", dir_ / "server.key",
                        "\n  client_ca: ", dir_ / "clients.crt",
                        "\n  connection_age: 2\naudit_log: ", dir_ / "audit.log", "\n");
  }
  void StartServer(int i, const std::string& keys, const std::string& listen = "127.0.0.1:0") {
    const std::string directory = dir_ / absl::StrCat("server", i);
    std::filesystem::create_directories(directory);
    servers_[i].reset();
    servers_[i] = std::make_unique<services::Daemon>(
        directory,
        absl::StrCat("listen: ", listen, "\nmetrics_listen: 127.0.0.1:0\ndata_directory: ", directory,
                     "/data\nserver_id: s", i, "\nstaging: 16MiB\nbudget:\n  dram: 160MiB\n  nvme: 256MiB\n", keys));
    ASSERT_TRUE(servers_[i]->ready());
  }
  std::string Servers() const {
    return servers_[1] == nullptr ? servers_[0]->listen()
                                  : absl::StrCat(servers_[0]->listen(), ",", servers_[1]->listen());
  }
  void InstallServer(const IssuedPair& pair) {
    WriteText(dir_ / "server.crt", pair.certificate);
    WriteText(dir_ / "server.key", pair.key);
  }
  void InstallClient(const IssuedPair& pair) {
    WriteText(dir_ / "client.crt", pair.certificate);
    WriteText(dir_ / "client.key", pair.key);
  }
  std::vector<std::string> ByCertificate() const {
    return {"--ca", dir_ / "servers.crt", "--certificate", dir_ / "client.crt", "--key", dir_ / "client.key"};
  }
  model::Access AccessByCertificate() const {
    return {dir_ / "servers.crt", dir_ / "client.crt", dir_ / "client.key", ""};
  }
  void InstallAll() {
    InstallServer(authority_.IssueServer("server"));
    InstallClient(authority_.IssueClient("spiffe://t/trainer"));
    WriteText(dir_ / "clients.crt", authority_.certificate());
    WriteText(dir_ / "servers.crt", authority_.certificate());
  }
  std::unique_ptr<services::Process> Rank(int rank, int world_size, int steps,
                                          const std::vector<std::string>& access) const {
    std::vector<std::string> command = RankCommand(steps, Servers(), dir_ / "ranks", rank, world_size);
    command.insert(command.end(), access.begin(), access.end());
    return std::make_unique<services::Process>(command);
  }
  Finished Ctl(std::vector<std::string> words, const std::vector<std::string>& access) const {
    words.insert(words.begin(), services::CtlPath());
    words.insert(words.end(), {"--servers", Servers()});
    words.insert(words.end(), access.begin(), access.end());
    return services::RunProcess(words);
  }
  int Version() const { return VersionOn(Servers(), ByCertificate()); }

  ScratchDirectory dir_;
  Authority authority_{"ca"};
  std::unique_ptr<services::Daemon> servers_[2];
};

TEST_F(SecurityTest, LeavesAndCaChangeUnderTrainingAndNoStepFails) {
  InstallAll();
  for (int i = 0; i < 2; ++i) StartServer(i, TlsKeys());
  const auto rank0 = Rank(0, 2, kSteps, ByCertificate()), rank1 = Rank(1, 2, kSteps, ByCertificate());
  for (int i = 0; i < 3000 && Version() < 2; ++i) absl::SleepFor(absl::Milliseconds(20));
  // Longer than a connection lives, and than servers and trainers take to look. A trainer is held back meanwhile, so
  // that the run outlasts the changes on a fast machine too.
  const auto settle = [&] {
    for (const auto& server : servers_) server->Signal(SIGHUP);
    for (int i = 0; i < 10; ++i) {
      rank0->Signal(SIGSTOP);
      absl::SleepFor(absl::Milliseconds(250));
      rank0->Signal(SIGCONT);
      absl::SleepFor(absl::Milliseconds(100));
    }
  };
  Authority next("ca-2");
  InstallServer(authority_.IssueServer("server-2"));
  InstallClient(authority_.IssueClient("spiffe://t/trainer"));
  settle();
  WriteText(dir_ / "clients.crt", authority_.certificate() + next.certificate());
  WriteText(dir_ / "servers.crt", authority_.certificate() + next.certificate());
  settle();
  InstallServer(next.IssueServer("server-3"));
  InstallClient(next.IssueClient("spiffe://t/trainer"));
  settle();
  WriteText(dir_ / "clients.crt", next.certificate());
  WriteText(dir_ / "servers.crt", next.certificate());
  settle();
  EXPECT_FALSE(rank0->ended()) << "too short a run to be disturbed four times";
  const int version = Version();
  EXPECT_GT(version, 2);
  const Finished first = rank0->Wait(), second = rank1->Wait();
  EXPECT_EQ(first.code, 0) << first.err;
  EXPECT_EQ(second.code, 0) << second.err;
  EXPECT_EQ(DigestIn(first.out), ReferenceDigest(kSteps)) << "after version " << version;
  // A client of the CA that went is not let in.
  InstallClient(authority_.IssueClient("spiffe://t/trainer"));
  EXPECT_EQ(Ctl({"status"}, ByCertificate()).code, 1);
}

TEST_F(SecurityTest, BadFilesEndTheStartWithTheReason) {
  InstallAll();
  WriteText(dir_ / "server.key", authority_.IssueServer("other").key);
  WriteText(dir_ / "bad.yaml", absl::StrCat(services::DaemonConfig(dir_ / "data", "s"), TlsKeys()));
  const Finished ended = services::RunProcess({services::DaemonPath(), "--config", dir_ / "bad.yaml"});
  EXPECT_EQ(ended.code, 2);
  EXPECT_THAT(ended.err, AllOf(HasSubstr("server.key: the key does not belong to"), Not(HasSubstr("ready"))));
}

TEST_F(SecurityTest, IdentitiesOfTrainersAndOperators) {
  InstallAll();
  WriteText(
      dir_ / "tokens.yaml",
      "tokens:\n- {identity: operator, sha256: ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad}\n");
  WriteText(dir_ / "rights.yaml",
            "rights:\n- {identity: 'spiffe://t/trainer', jobs: 'team-*', can: [train]}\n"
            "- {identity: operator, kind: token, jobs: 'team-*', can: [status, drop]}\n");
  WriteText(dir_ / "token", "abc\n");
  StartServer(0, absl::StrCat(TlsKeys(), "tokens: ", dir_ / "tokens.yaml", "\nrights: ", dir_ / "rights.yaml", "\n"));
  const auto with = [this](std::vector<std::string> access, const std::string& job) {
    access.insert(access.end(), {"--job", job});
    return Rank(0, 1, 2, access)->Wait();
  };
  const Finished denied = with(ByCertificate(), "other");
  EXPECT_EQ(denied.code, 1);
  EXPECT_THAT(denied.err, HasSubstr("'spiffe://t/trainer' may not GetJob job 'other'"));
  const Finished trained = with(ByCertificate(), "team-1");
  EXPECT_EQ(trained.code, 0) << trained.err;

  const std::vector<std::string> token = {"--ca", dir_ / "servers.crt", "--token-file", dir_ / "token"};
  const Finished status = Ctl({"status"}, token);
  EXPECT_EQ(status.code, 0) << status.out << status.err;
  EXPECT_THAT(status.out, HasSubstr("team-1"));
  EXPECT_THAT(Ctl({"status"}, ByCertificate()).out, HasSubstr("may not GetServerStatus"));
  const Finished budget = Ctl({"budget", "--dram", "60MiB"}, token);
  EXPECT_EQ(budget.code, 1);
  EXPECT_THAT(budget.out,
              HasSubstr("'operator' may not SetBudget: the server's rights file would have to grant budget"));
  EXPECT_THAT(Ctl({"status"}, {"--ca", dir_ / "servers.crt"}).out, HasSubstr("the server requires an identity"));
  EXPECT_THAT(Ctl({"status"}, {}).out, HasSubstr("does not answer"));
  EXPECT_EQ(Ctl({"drop", "--job", "team-1"}, token).code, 0);
  const std::string metrics = services::Get(servers_[0]->metrics(), "/metrics").body;
  EXPECT_THAT(metrics, HasSubstr("ballast_tls_not_after_timestamp_seconds{what=\"certificate\"} 1"));
  EXPECT_THAT(metrics, HasSubstr("ballast_tls_reloads_total{what=\"certificates\",result=\"refused\"} 0\n"));
  EXPECT_THAT(metrics, HasSubstr("ballast_auth_denied_total{why=\"no_identity\"} 1\n"));
  // Lines come behind the answers, in their order.
  std::string audit;
  for (int i = 0; i < 6000 && audit.find('\n', audit.find("call=DropJob")) == std::string::npos; ++i) {
    absl::SleepFor(absl::Milliseconds(10));
    audit = Slurp(dir_ / "audit.log");
  }
  for (const char* line : {"call=Fence identity=\"spiffe://t/trainer\"", "call=Open identity=\"spiffe://t/trainer\"",
                           "call=DropJob identity=\"operator\"", "call=SetBudget identity=\"operator\""}) {
    EXPECT_THAT(audit, HasSubstr(line));
  }
  EXPECT_EQ(::system(absl::StrCat("grep -q 'call=DropJob.*job=\"team-1\" verdict=ok' ", dir_ / "audit.log").c_str()),
            0);
}

TEST_F(SecurityTest, ATokenDoesNotTravelInTheClear) {
  const std::string outside = OutsideAddress();
  if (outside.empty()) GTEST_SKIP() << "this machine has no address but loopback";
  WriteText(
      dir_ / "tokens.yaml",
      "tokens:\n- {identity: operator, sha256: ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad}\n");
  WriteText(dir_ / "token", "abc\n");
  const std::string keys = absl::StrCat("tokens: ", dir_ / "tokens.yaml", "\naudit_log: ", dir_ / "audit.log", "\n");
  const std::vector<std::string> token = {"--token-file", dir_ / "token"};
  StartServer(0, keys);
  EXPECT_EQ(Ctl({"status"}, token).code, 0) << "on loopback";
  StartServer(0, keys, outside + ":0");
  const Finished refused = Ctl({"status"}, token);
  EXPECT_EQ(refused.code, 1);
  EXPECT_THAT(refused.out, HasSubstr("in the clear, where others could read it; set `ca` for TLS"));
  EXPECT_THAT(Rank(0, 1, 2, token)->Wait().err, HasSubstr("in the clear, where others could read it"));
  EXPECT_EQ(Slurp(dir_ / "audit.log").find("token_in_clear"), std::string::npos) << "neither sent it";
}

// gRPC would send a token, and the state itself, by the proxy that an environment names for downloads, even to
// loopback.
TEST_F(SecurityTest, NoProxyOfTheEnvironmentStandsBetween) {
  WriteText(
      dir_ / "tokens.yaml",
      "tokens:\n- {identity: operator, sha256: ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad}\n");
  WriteText(dir_ / "token", "abc\n");
  StartServer(0, absl::StrCat("tokens: ", dir_ / "tokens.yaml", "\naudit_log: none\n"));
  for (const char* name : {"grpc_proxy", "https_proxy", "http_proxy"}) {
    ::setenv(name, "http://127.0.0.1:1", 1);
  }
  const std::vector<std::string> token = {"--token-file", dir_ / "token"};
  const Finished status = Ctl({"status"}, token);
  EXPECT_EQ(status.code, 0) << status.out;
  const Finished trained = Rank(0, 1, 2, token)->Wait();
  EXPECT_EQ(trained.code, 0) << trained.err;
  for (const char* name : {"grpc_proxy", "https_proxy", "http_proxy"}) ::unsetenv(name);
}

// Without client_ca and tokens TLS keeps a secret, and asks nobody who calls.
TEST_F(SecurityTest, TlsThatAsksNobodyIsWarnedOf) {
  const std::string outside = OutsideAddress();
  if (outside.empty()) GTEST_SKIP() << "this machine has no address but loopback";
  InstallAll();
  const auto log = [&](const std::vector<std::string>& more) {
    std::vector<std::string> command = {
        services::DaemonPath(), "--listen",  outside + ":0",     "--metrics_listen", "127.0.0.1:0",
        "--budget.dram",        "64MiB",     "--data_directory", dir_ / "data",      "--tls.certificate",
        dir_ / "server.crt",    "--tls.key", dir_ / "server.key"};
    command.insert(command.end(), more.begin(), more.end());
    services::Process server(command);
    for (int i = 0; i < 6000 && !server.ended() && server.OutputSoFar().find("ready") == std::string::npos; ++i) {
      absl::SleepFor(absl::Milliseconds(20));
    }
    server.Signal(SIGTERM);
    return server.Wait().err;
  };
  EXPECT_THAT(log({}), HasSubstr("without authentication: any client that reaches this address can read and change"));
  EXPECT_THAT(log({"--tls.client_ca", dir_ / "clients.crt"}), Not(HasSubstr("other machines can reach")));
}

// Bytes of pulls and pushes a second, on one connection after the other; a figure, not a bound.
TEST_F(SecurityTest, ThroughputWithTlsBesidePlain) {
  InstallAll();
  constexpr uint64_t kElements = uint64_t{1} << 22;
  constexpr int kRounds = 24;
  std::map<bool, double> seconds;
  for (const bool tls : {false, true, false, true}) {
    StartServer(0, tls ? TlsKeys() : "");
    client::SessionOptions options;
    options.job = "throughput";
    options.resume = client::Resume::kAuto;
    options.durability = v1::DURABILITY_NONE;
    if (tls) options.access = AccessByCertificate();
    const auto group = client::MakeLoopbackGroup(1);
    std::vector<client::TensorSpec> tensors(1);
    tensors[0].name = tensors[0].unit = "weights";
    tensors[0].shape = {kElements};
    auto session = client::Session::Connect(options, tensors, {servers_[0]->listen()}, group[0].get());
    ASSERT_TRUE(session.ok()) << session.status();
    const auto fill = [](absl::string_view, uint64_t, absl::Span<float> values) {
      std::fill(values.begin(), values.end(), 1.0f);
    };
    ASSERT_EQ((*session)->Initialise(fill), absl::OkStatus());
    std::vector<client::bf16> values(kElements);
    const absl::Time began = absl::Now();
    for (int round = 0; round < kRounds; ++round) {
      auto pull = (*session)->StartPull(
          0, {{{0, kElements}, {reinterpret_cast<std::byte*>(values.data()), kElements * sizeof(client::bf16)}}});
      ASSERT_TRUE(pull.ok()) << pull.status();
      ASSERT_EQ(pull->Await(), absl::OkStatus());
      ASSERT_EQ((*session)->Push(0, absl::MakeConstSpan(values)), absl::OkStatus());
      ASSERT_EQ((*session)->Drop(), absl::OkStatus());
    }
    seconds[tls] += absl::ToDoubleSeconds(absl::Now() - began);
    session->reset();
    servers_[0].reset();
    std::filesystem::remove_all(dir_ / "server0");
  }
  const double bytes = 2.0 * 2 * 2 * kRounds * kElements;
  std::printf("throughput: plain %.0f MB/s, TLS %.0f MB/s, ratio %.2f\n", bytes / seconds[false] / 1e6,
              bytes / seconds[true] / 1e6, seconds[false] / seconds[true]);
}

}  // namespace
}  // namespace ballast
