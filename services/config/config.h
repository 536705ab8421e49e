// What `ballastd` can be told, from flags, environment, one YAML file and defaults, in this order of precedence.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "ballast/services/state_server.h"

namespace ballast::services {

struct Config {
  std::string listen = "127.0.0.1:7070";
  std::string metrics_listen = "127.0.0.1:9070";
  std::string log_level = "info";
  StateServerOptions server;
};

// One key, as the file spells it; `environment` and `flag` are derived from it: BALLAST_BUDGET_DRAM, --budget.dram.
struct ConfigKey {
  std::string name;
  std::string expected;  // for messages: "bytes, such as 512MiB"
  std::string fallback;  // the default, as one would write it
  std::string meaning;
};
const std::vector<ConfigKey>& ConfigKeys();
std::string EnvironmentName(const ConfigKey& key);

// Values by key name, with what to blame if one is wrong.
struct ConfigValue {
  std::string text;
  std::string origin;  // "ballastd.yaml:3", "BALLAST_LISTEN", "--listen"
};
using ConfigValues = std::map<std::string, ConfigValue>;

// INVALID_ARGUMENT (BAD_CONFIG) with file:line for bad YAML, unknown or doubled keys; says which keys there are.
absl::StatusOr<ConfigValues> ParseConfigFile(const std::string& path);
absl::StatusOr<ConfigValues> ParseConfigText(const std::string& text, const std::string& path);
// BALLAST_* of `environment` ("NAME=value"). INVALID_ARGUMENT for a name that is no key's.
absl::StatusOr<ConfigValues> ParseEnvironment(const std::vector<std::string>& environment);

// INVALID_ARGUMENT (BAD_CONFIG): origin, what was expected, what came; also for what is missing or does not fit
// together.
absl::StatusOr<Config> MakeConfig(const ConfigValues& file, const ConfigValues& environment, const ConfigValues& flags);

// "512MiB" -> 536870912. Suffixes: none, B, KiB, MiB, GiB, TiB.
absl::StatusOr<uint64_t> ParseBytes(const std::string& text);

}  // namespace ballast::services
