#include "ballast/services/daemon/config.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <sstream>

#include "ballast/proto/base/byte_sizes.h"
#include "ballast/proto/base/status.h"
#include "ballast/services/daemon/config_file.h"
#include "ballast/services/daemon/machine_files.h"

namespace ballast::services {
namespace {

constexpr char kGood[] = R"(# a server
listen: 127.0.0.1:0
metrics_listen: 127.0.0.1:9100
data_directory: /var/lib/ballast
budget:
  dram: 512MiB
  nvme: 2 GiB
compute_threads: 1024
read_threads: 3
)";

absl::StatusOr<Config> FromText(const std::string& text, const ConfigValues& environment = {},
                                const ConfigValues& flags = {}) {
  BALLAST_ASSIGN_OR_RETURN(const ConfigValues file, ParseConfigText(text, "s.yaml"));
  return MakeConfig(file, environment, flags);
}

void ExpectBad(const std::string& text, const std::string& message) {
  const absl::Status status = FromText(text).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << text;
  EXPECT_EQ(model::ReasonOf(status), model::kBadConfig);
  EXPECT_NE(status.message().find(message), absl::string_view::npos) << message << " in " << status;
}

TEST(Config, ReadsAFile) {
  const auto config = FromText(kGood);
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->listen, "127.0.0.1:0");
  EXPECT_EQ(config->metrics_listen, "127.0.0.1:9100");
  EXPECT_EQ(config->server.data_directory, "/var/lib/ballast");
  EXPECT_EQ(config->server.budget.dram, uint64_t{512} << 20);
  EXPECT_EQ(config->server.budget.nvme, uint64_t{2} << 30);
  EXPECT_EQ(config->server.budget.hbm, 0u);
  EXPECT_EQ(config->server.hbm_device, 0);
  EXPECT_EQ(config->server.compute_threads, 1024);
  EXPECT_EQ(config->server.answer_threads, std::max(1, UsableProcessors("") / 2));
  EXPECT_EQ(config->server.read_threads, 3);
  EXPECT_EQ(config->log_level, "info");
}

TEST(Config, FlagBeatsEnvironmentBeatsFile) {
  const auto environment =
      ParseEnvironment({"PATH=/bin", "BALLAST_BUDGET_DRAM=200MiB", "BALLAST_LOG_LEVEL=warn",
                        "BALLAST_SERVERS=a:7070,b:7070", "BALLAST_HOST=10.0.0.1", "BALLAST_DEBUG=1"});
  ASSERT_TRUE(environment.ok()) << environment.status();
  const auto config = FromText(kGood, *environment, {{"log_level", {"error", "--log_level"}}});
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->server.budget.dram, uint64_t{200} << 20);
  EXPECT_EQ(config->log_level, "error");
}

TEST(Config, RefusesWhatItDoesNotKnowWithFileAndLine) {
  ExpectBad(std::string(kGood) + "budgets: 3\n",
            "s.yaml:10: unknown key 'budgets'; expected one of listen, metrics_listen");
  ExpectBad("budget:\n  dram: 1MiB\n  drum: 1MiB\n", "s.yaml:3: unknown key 'budget.drum'");
  ExpectBad("listen: a:1\nlisten: b:2\n", "s.yaml:2: key 'listen' comes twice");
  ExpectBad("listen: [a, b]\n", "s.yaml:1: listen: expected host:port, port 0 for a free one, got a list");
  ExpectBad("listen: {\n", "s.yaml:");
  ExpectBad("just words\n", "expected lines of `key: value`");
}

TEST(Config, RefusesBadValuesWithWhatCame) {
  ExpectBad("budget: {dram: 12 parrots}\n", "s.yaml:1: budget.dram: expected bytes, such as 512MiB, got '12 parrots'");
  ExpectBad("\n\nlisten: localhost\n", "s.yaml:3: listen: expected host:port, port 0 for a free one, got 'localhost'");
  for (const std::string key : {"listen", "metrics_listen"}) {
    for (const std::string bad : {"localhost:70000", "a:-1", ":80", "::1:80", "a b:80", "127.0.0.1:1,127.0.0.1:2"}) {
      ExpectBad(key + ": '" + bad + "'\n",
                "s.yaml:1: " + key + ": expected host:port, port 0 for a free one, got '" + bad + "'");
    }
  }
  ExpectBad("compute_threads: 0\n", "compute_threads: expected an integer from 1 to 1024, got '0'");
  ExpectBad("compute_threads: 1025\n", "compute_threads: expected an integer from 1 to 1024, got '1025'");
  ExpectBad("log_level: loud\n", "expected trace, debug, info, warn, error or off, got 'loud'");
  ExpectBad("server_id: a b\n", "got 'a b'");
  ExpectBad("metrics_tls: yes\n", "metrics_tls: expected true or false, got 'yes'");
  const absl::Status variable = FromText(kGood, {{"staging", {"-1", "BALLAST_STAGING"}}}).status();
  EXPECT_EQ(variable.message(), "BALLAST_STAGING: staging: expected bytes, such as 512MiB, got '-1'");
}

TEST(Config, RefusesWhatIsMissing) {
  ExpectBad("budget: {dram: 1MiB}\n", "data_directory is missing; expected a path");
  ExpectBad("data_directory: /tmp\n", "budget.dram is missing; expected bytes");
  ExpectBad("data_directory: /tmp\nbudget: {dram: 0}\n", "budget.dram is 0");
  const absl::Status file = ParseConfigFile("/no/such/file.yaml").status();
  EXPECT_NE(file.message().find("/no/such/file.yaml: cannot be read"), absl::string_view::npos) << file;
}

TEST(Config, SaysThatADirectoryIsNoFile) {
  const absl::Status status = ParseConfigFile("/tmp").status();
  EXPECT_EQ(model::ReasonOf(status), model::kBadConfig);
  EXPECT_NE(status.message().find("/tmp: is a directory; expected"), absl::string_view::npos) << status;
}

TEST(Config, StagingMustFitTheBudgetThatItIsTakenFrom) {
  const std::string tiers = "data_directory: /tmp\nbudget: {dram: 40MiB, nvme: 1GiB}\n";
  ExpectBad(tiers,
            "staging: expected 2097152 to 41943040 bytes (of budget.dram) when budget.nvme is "
            "set, got 54525952, the default; set staging, or raise budget.dram");
  ExpectBad(tiers + "staging: 1MiB\n", "s.yaml:3: staging: expected 2097152 to 41943040 bytes");
  ExpectBad(tiers + "staging: 16777215TiB\n", "got 18446742974197923840;");
  EXPECT_TRUE(FromText(tiers + "staging: 2MiB\n").ok());
  EXPECT_TRUE(FromText(tiers + "staging: 40MiB\n").ok());
  EXPECT_TRUE(FromText("data_directory: /tmp\nbudget: {dram: 1MiB}\n").ok()) << "without nvme nothing is staged";
}

TEST(Config, ReadsDisksFromAListAndFromAFlag) {
  const std::string rest = "data_directory: /data\nbudget:\n  dram: 512MiB\n  nvme:";
  const auto expect = [](const absl::StatusOr<Config>& config) {
    ASSERT_TRUE(config.ok()) << config.status();
    const std::vector<storage::NvmeDevice>& disks = config->server.nvme_devices;
    ASSERT_EQ(disks.size(), 2u);
    EXPECT_EQ(disks[0].directory, "/data");
    EXPECT_EQ(disks[1].directory, "/mnt/a=b");
    EXPECT_EQ(disks[1].budget, uint64_t{2} << 40);
    EXPECT_EQ(config->server.budget.nvme, (uint64_t{2} << 40) + (uint64_t{1} << 30));
  };
  expect(FromText(rest + "\n    - {path: /data, bytes: 1GiB}\n    - {path: /mnt/a=b, bytes: 2TiB}\n"));
  expect(FromText(kGood, {{"budget.nvme", {"/data=1GiB,/mnt/a=b=2TiB", "BALLAST_BUDGET_NVME"}}}));
  // A flag replaces a list.
  const auto scalar = FromText(rest + " [{path: /a, bytes: 1GiB}]\n", {}, {{"budget.nvme", {"3GiB", "--budget.nvme"}}});
  ASSERT_TRUE(scalar.ok()) << scalar.status();
  EXPECT_TRUE(scalar->server.nvme_devices.empty());
  ExpectBad(rest + " []\n", "s.yaml:4: budget.nvme: the list is empty");
  ExpectBad(rest + " [/a, /b]\n", "s.yaml:4: budget.nvme: expected `path` and `bytes` of each disk");
  ExpectBad(rest + "\n    - {path: /a, bytes: 1GiB}\n    - {path: /b, size: 1GiB}\n",
            "s.yaml:6: budget.nvme: unknown key 'size'; expected path and bytes of each disk");
  ExpectBad(rest + " [{path: /a}]\n", "s.yaml:4: budget.nvme: expected a path without a comma and bytes of each disk");
  ExpectBad(rest + " [{path: '/a,b', bytes: 1GiB}]\n", "expected a path without a comma");
  ExpectBad(rest + " [{path: /a, bytes: much}]\n", "s.yaml:4: budget.nvme: expected bytes in the data directory");
  ExpectBad(rest + " [{path: /a, bytes: 1GiB}, {path: /b/../a/, bytes: 1GiB}]\n", "budget.nvme: /b/../a/ comes twice");
  ExpectBad(rest + " '/a=1GiB,'\n", "got '/a=1GiB,'");
  ExpectBad(rest + " '/a=0'\n", "got '/a=0'");
}

TEST(Config, RefusesUnknownVariables) {
  const absl::Status status = ParseEnvironment({"BALLAST_LISTN=x"}).status();
  EXPECT_NE(status.message().find("BALLAST_LISTN: unknown variable; expected one of BALLAST_LISTEN"),
            absl::string_view::npos)
      << status;
}

TEST(Config, PassesOverWhatKubernetesSaysOfServices) {
  const auto values =
      ParseEnvironment({"BALLAST_SERVICE_HOST=10.0.0.1", "BALLAST_SERVICE_PORT=7070", "BALLAST_SERVICE_PORT_GRPC=7070",
                        "BALLAST_PORT=tcp://10.0.0.1:7070", "BALLAST_PORT_7070_TCP=tcp://10.0.0.1:7070",
                        "BALLAST_PORT_7070_TCP_PROTO=tcp", "BALLAST_PORT_7070_TCP_PORT=7070",
                        "BALLAST_PORT_7070_TCP_ADDR=10.0.0.1", "BALLAST_HEADLESS_SERVICE_HOST=None",
                        "BALLAST_HEADLESS_PORT_9070_TCP=tcp://10.0.0.1:9070", "BALLAST_LISTEN=0.0.0.0:7070"});
  ASSERT_TRUE(values.ok()) << values.status();
  EXPECT_EQ(values->size(), 1u);
  for (const char* close : {"BALLAST_SERVICE=x", "BALLAST_PORTS=x", "BALLAST_PORT_TCP=x", "BALLAST_SERVICE_HOSTS=x"}) {
    EXPECT_FALSE(ParseEnvironment({close}).ok()) << close;
  }
}

TEST(Config, ReadsBytes) {
  EXPECT_EQ(model::ParseBytes("7").value(), 7u);
  EXPECT_EQ(model::ParseBytes("7B").value(), 7u);
  EXPECT_EQ(model::ParseBytes("3KiB").value(), 3072u);
  EXPECT_EQ(model::ParseBytes(" 1 TiB ").value(), uint64_t{1} << 40);
  for (const char* bad : {"", "KiB", "-1", "+1", "1.5GiB", "1kb", "0x10", "99999999TiB", "18446744073709551616"}) {
    EXPECT_FALSE(model::ParseBytes(bad).ok()) << bad;
  }
}

TEST(Config, TheReferenceNamesEveryKey) {
  std::ifstream file(std::getenv("CONFIG_README"));
  std::ostringstream text;
  text << file.rdbuf();
  for (const ConfigKey& key : ConfigKeys()) {
    const std::string row = "| `" + key.name + "` | `" + EnvironmentName(key) + "` | " + key.expected + " | " +
                            key.fallback + " | " + key.meaning + " |";
    EXPECT_NE(text.str().find(row), std::string::npos) << row;
  }
}

}  // namespace
}  // namespace ballast::services
