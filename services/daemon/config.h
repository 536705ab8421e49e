// Options of `ballastd`, from flags, environment, a YAML file and defaults, in this order of precedence.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "ballast/services/gateway/security/guard.h"
#include "ballast/services/server/state_server.h"

namespace ballast::services {

struct Config {
  std::string listen = "127.0.0.1:7070";
  std::string metrics_listen = "127.0.0.1:9070";
  bool metrics_tls = false;
  std::string log_level = "info";
  std::string discovery;  // URL of a registry; empty: none
  std::string advertise;  // address in the registry; empty: by `listen`
  uint64_t shared_memory_bytes = uint64_t{4} << 30;
  uint64_t connections_max = 0;  // 0: as many as descriptors allow
  bool reflection = false;
  std::string server_ca;     // CAs of the servers that chunks are copied from; empty: those of clients
  std::string import_token;  // path of the token that these servers are shown; empty: none
  GuardOptions guard;
  StateServerOptions server;
};

// A key as the file spells it. The names of its variable and flag follow from it: BALLAST_BUDGET_DRAM, --budget.dram.
struct ConfigKey {
  std::string name;
  std::string expected;  // for messages: "bytes, such as 512MiB"
  std::string fallback;  // the default, as a user would write it
  std::string meaning;
};
const std::vector<ConfigKey>& ConfigKeys();
std::string EnvironmentName(const ConfigKey& key);
// The names of all keys, for messages.
std::string KnownKeys();
// INVALID_ARGUMENT (BAD_CONFIG).
absl::Status BadConfig(absl::string_view message);

// A value, and where it came from, for error messages.
struct ConfigValue {
  std::string text;
  std::string origin;  // "ballastd.yaml:3", "BALLAST_LISTEN", "--listen"
};
using ConfigValues = std::map<std::string, ConfigValue>;

// Reads BALLAST_* from `environment` ("NAME=value"). INVALID_ARGUMENT for a name without a key.
absl::StatusOr<ConfigValues> ParseEnvironment(const std::vector<std::string>& environment);

// INVALID_ARGUMENT (BAD_CONFIG), naming the origin, the expected and the given value; also for missing values and
// values that do not fit together.
absl::StatusOr<Config> MakeConfig(const ConfigValues& file, const ConfigValues& environment, const ConfigValues& flags);

}  // namespace ballast::services
