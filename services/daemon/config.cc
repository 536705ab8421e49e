#include "ballast/services/daemon/config.h"

#include <algorithm>
#include <filesystem>
#include <functional>
#include <map>
#include <regex>
#include <set>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "ballast/proto/base/address.h"
#include "ballast/proto/base/byte_sizes.h"
#include "ballast/proto/base/memory_socket.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/model/names.h"
#include "ballast/proto/registry/registry_url.h"
#include "ballast/services/daemon/machine_files.h"
#include "ballast/services/journal/log_steps.h"

namespace ballast::services {
namespace {

constexpr int kThreadsMax = 1024;
constexpr int kDeviceMax = 255;
constexpr uint64_t kConnectionsConfiguredMax = 1'000'000;
constexpr size_t kDevicesMax = 64;
constexpr uint64_t kNvmeBytesMax = uint64_t{1} << 56;  // of a device, so that the sum of all is a number
// A buffer for reads, and a buffer for the state of the smallest chunk.
constexpr uint64_t kStagingBytesMin = uint64_t{2} << 20;
constexpr char kEnvironmentPrefix[] = "BALLAST_";
// Trainers and ballastctl read these, and may share an environment with a server.
constexpr absl::string_view kClientVariables[] = {"BALLAST_SERVERS", "BALLAST_CA",         "BALLAST_CERTIFICATE",
                                                  "BALLAST_KEY",     "BALLAST_TOKEN_FILE", "BALLAST_HOST",
                                                  "BALLAST_DEBUG"};
// What Kubernetes gives each container for each service of its namespace: for one called `ballast`, or `ballast-x`,
// these begin as ours do. https://kubernetes.io/docs/concepts/services-networking/service/#environment-variables
constexpr char kServiceLink[] =
    "BALLAST_(\\w+_)?(SERVICE_HOST|SERVICE_PORT(_\\w+)?|PORT|PORT_\\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)";
// A terabyte in nine hours, a hundredth of what a disk reads.
constexpr uint64_t kScrubBytesPerSecond = uint64_t{32} << 20;
// Connections older than a week would show too late that a rotation does not work.
constexpr int kConnectionAgeMaxSeconds = 7 * 24 * 3600;

using Setter = std::function<bool(const std::string& text, Config* config)>;
struct Key {
  ConfigKey doc;
  Setter set;
};

bool SetAddress(const std::string& text, std::string* to) {
  *to = text;
  return model::ParseAddress(text, model::AddressUse::kListen).ok();
}

bool SetThreads(const std::string& text, int* to) {
  return absl::SimpleAtoi(text, to) && *to >= 1 && *to <= kThreadsMax;
}

Setter Path(std::string* (*field)(Config*)) {
  return [field](const std::string& text, Config* config) {
    *field(config) = text;
    return !text.empty();
  };
}

// "512MiB", all of it in the data directory, or "PATH=512MiB,PATH=1TiB".
bool SetNvme(const std::string& text, Config* config) {
  storage::TierBytes& budget = config->server.budget;
  std::vector<storage::NvmeDevice>& devices = config->server.nvme_devices;
  devices.clear();
  budget.nvme = 0;
  if (const auto bytes = model::ParseBytes(text); bytes.ok()) {
    budget.nvme = *bytes;
    return true;
  }
  for (const absl::string_view item : absl::StrSplit(text, ',')) {
    const size_t equals = item.rfind('=');
    if (equals == 0 || equals == absl::string_view::npos) return false;
    const auto bytes = model::ParseBytes(std::string(item.substr(equals + 1)));
    if (!bytes.ok() || *bytes == 0 || *bytes > kNvmeBytesMax) return false;
    devices.push_back({std::string(item.substr(0, equals)), *bytes, 0});
    budget.nvme += *bytes;
  }
  return devices.size() <= kDevicesMax;
}

Setter Bytes(uint64_t* (*field)(Config*)) {
  return [field](const std::string& text, Config* config) {
    const absl::StatusOr<uint64_t> bytes = model::ParseBytes(text);
    if (bytes.ok()) *field(config) = *bytes;
    return bytes.ok();
  };
}

const std::vector<Key>& Keys() {
  static const auto* const kKeys = new std::vector<Key>{
      {{"listen", "host:port, port 0 for a free one", "127.0.0.1:7070", "address for trainers and ballastctl (gRPC)"},
       [](const std::string& text, Config* c) { return SetAddress(text, &c->listen); }},
      {{"metrics_listen", "host:port, port 0 for a free one", "127.0.0.1:9070",
        "address of the HTTP port: status page, /metrics, /status.json, /steps.json, /livez, /readyz"},
       [](const std::string& text, Config* c) { return SetAddress(text, &c->metrics_listen); }},
      {{"metrics_tls", "true or false", "false",
        "HTTPS at metrics_listen, with the files of `tls`. With `tls.client_ca` clients need a certificate, except "
        "for /livez and /readyz"},
       [](const std::string& text, Config* c) {
         c->metrics_tls = text == "true";
         return text == "true" || text == "false";
       }},
      {{"data_directory", "a path", "none, must be given",
        "directory of the catalog and the NVMe tier; only one server may use it"},
       [](const std::string& text, Config* c) {
         c->server.data_directory = text;
         return !text.empty();
       }},
      {{"server_id", model::kServerIdRule, "made at first start, kept in the data directory",
        "the server's name in jobs' routing; do not change it while jobs live"},
       [](const std::string& text, Config* c) {
         c->server.server_id = text;
         return model::IsServerId(text);
       }},
      {{"budget.hbm", "bytes, such as 512MiB", "0", "GPU memory for state and working copies"},
       Bytes([](Config* c) { return &c->server.budget.hbm; })},
      {{"budget.dram", "bytes, such as 512MiB", "none, must be given",
        "CPU memory for state, working copies and slices of the step in flight. Copies and slices that do not fit "
        "are read from disk"},
       Bytes([](Config* c) { return &c->server.budget.dram; })},
      {{"budget.nvme", "bytes in the data directory, such as 512MiB, or path=bytes,path=bytes for several disks", "0",
        "disk for state that finds no room above. Durable jobs also keep a copy of all state there, and the gradient "
        "log (durability `step`) or two pinned copies (`every-K`). In the file, list several disks by `path` and "
        "`bytes`; logs lie in the data directory and use its part"},
       SetNvme},
      {{"hbm_device", "an integer from 0 to 255", "0", "the GPU of budget.hbm, by CUDA's number"},
       [](const std::string& text, Config* c) {
         return absl::SimpleAtoi(text, &c->server.hbm_device) && c->server.hbm_device >= 0 &&
                c->server.hbm_device <= kDeviceMax;
       }},
      {{"compute_threads", "an integer from 1 to 1024", "the processors that this process may use",
        "threads that work on one update, including its job's own thread; all jobs share the others"},
       [](const std::string& text, Config* c) { return SetThreads(text, &c->server.compute_threads); }},
      {{"read_threads", "an integer from 1 to 1024", "1", "threads of each job that read from disk"},
       [](const std::string& text, Config* c) { return SetThreads(text, &c->server.read_threads); }},
      {{"staging", "bytes, such as 512MiB", "a quarter of budget.dram, 52MiB to 100MiB",
        "DRAM buffers per job through which NVMe state moves"},
       Bytes([](Config* c) { return &c->server.staging_bytes; })},
      {{"shared_memory", "bytes from 64MiB, such as 512MiB, or 0", "4GiB",
        "memory that trainers on this host may share with the server, 64MiB each, instead of sending slices over the "
        "network. It belongs to the trainers; 0 turns it off"},
       [](const std::string& text, Config* c) {
         const auto bytes = model::ParseBytes(text);
         c->shared_memory_bytes = bytes.value_or(0);
         return bytes.ok() && (*bytes == 0 || *bytes >= model::kSharedBytes);
       }},
      {{"connections", "an integer from 1 to 1000000, or auto", "auto: by the limit of descriptors, 16384 at most",
        "most connections of the rpc port: one for each trainer, and some for tools"},
       [](const std::string& text, Config* c) {
         c->connections_max = 0;
         return text == "auto" || (absl::SimpleAtoi(text, &c->connections_max) && c->connections_max >= 1 &&
                                   c->connections_max <= kConnectionsConfiguredMax);
       }},
      {{"reflection", "true or false", "false",
        "gRPC's server reflection, with which grpcurl lists the services. Callers need an identity if the server "
        "asks for one"},
       [](const std::string& text, Config* c) {
         c->reflection = text == "true";
         return text == "true" || text == "false";
       }},
      {{"log_steps", "an integer from 3 to 1024, or auto", "auto: 6, and up to 16 while steps wait for flushes",
        "steps of gradients that the log of a durable job holds. Fewer steps take less disk and flush state more "
        "often"},
       [](const std::string& text, Config* c) {
         c->server.log_steps = 0;
         return text == "auto" ||
                (absl::SimpleAtoi(text, &c->server.log_steps) && c->server.log_steps >= kLogStepsMin &&
                 c->server.log_steps <= kLogStepsConfiguredMax);
       }},
      {{"machine_profile", "a path", "ballast-profile.yaml in the data directory, if it is there",
        "the profile that `ballastctl iotune` measured; the server chooses plans and predicts steps from it"},
       [](const std::string& text, Config* c) {
         c->server.machine_profile = text;
         return !text.empty();
       }},
      {{"scrub", "bytes, such as 512MiB, or 0", "32MiB",
        "rate in bytes a second of the background check of states on disk, at most one pass an hour; 0 turns it off"},
       Bytes([](Config* c) { return &c->server.scrub_bytes_per_s; })},
      {{"import_rate", "bytes, such as 512MiB, or 0", "256MiB",
        "rate in bytes a second at which the server copies chunks of jobs with copies from other servers, all jobs "
        "together; 0: as fast as it can. Chunks that lack no copy and only move (add, drain, replace) get 3 MiB a "
        "second of it for each of compute_threads"},
       Bytes([](Config* c) { return &c->server.import_bytes_per_s; })},
      {{"import_token", "a path", "none",
        "a bearer token, which the server shows to servers that it copies chunks from"},
       Path([](Config* c) { return &c->import_token; })},
      {{"discovery", "etcd://host:port/prefix", "none: servers are listed by trainers",
        "registry where the server writes its address and budgets; `--servers` takes the same URL"},
       [](const std::string& text, Config* c) {
         c->discovery = text;
         return registry::ParseRegistryUrl(text).ok();
       }},
      {{"advertise", "host:port, port 0 for that of listen",
        "that of `listen`, or this machine's name if `listen` is all addresses",
        "address at which trainers reach the server, for `discovery`"},
       [](const std::string& text, Config* c) { return SetAddress(text, &c->advertise); }},
      {{"tls.certificate", "a path", "none: no TLS",
        "PEM: the server's certificate, then its issuers in order. With `tls.key` all gRPC connections use TLS. The "
        "server reads every file of `tls` again when it changes, and at SIGHUP"},
       Path([](Config* c) { return &c->guard.tls.certificate; })},
      {{"tls.key", "a path", "none", "PEM: the certificate's private key, without a passphrase"},
       Path([](Config* c) { return &c->guard.tls.key; })},
      {{"tls.client_ca", "a path", "none: clients need no certificate",
        "PEM: CAs; clients with a certificate from these are let in"},
       Path([](Config* c) { return &c->guard.tls.client_ca; })},
      {{"tls.crl_directory", "a path", "none", "directory of PEM files with the revocation list of each of these CAs"},
       Path([](Config* c) { return &c->guard.tls.crl_directory; })},
      {{"tls.server_ca", "a path", "that of `tls.client_ca`",
        "PEM: CAs of the other servers. The server copies chunks from them by TLS, with its own certificate, which has "
        "to be valid for clients, too"},
       Path([](Config* c) { return &c->server_ca; })},
      {{"tls.connection_age", "seconds, 1 to 604800", "3600",
        "age at which a TLS connection ends and its client reconnects; rotations and revocations take effect then"},
       [](const std::string& text, Config* c) {
         int seconds = 0;
         const bool fits = absl::SimpleAtoi(text, &seconds) && seconds >= 1 && seconds <= kConnectionAgeMaxSeconds;
         c->guard.connection_age = absl::Seconds(seconds);
         return fits;
       }},
      {{"tokens", "a path", "none: no tokens are taken", "YAML: SHA-256 and holder of each bearer token"},
       Path([](Config* c) { return &c->guard.tokens; })},
      {{"rights", "a path", "none: whoever is let in may do everything",
        "YAML: what each identity may do, and its quotas"},
       Path([](Config* c) { return &c->guard.rights; })},
      {{"audit_log", "a path, stderr or none", "stderr with `tls.client_ca` or `tokens`, else none",
        "log with a line per fence, Open, drop, new budget and refusal; reopened at SIGHUP"},
       Path([](Config* c) { return &c->guard.audit_log; })},
      {{"log_level", "trace, debug, info, warn, error or off", "info",
        "lowest level of messages that go to standard error"},
       [](const std::string& text, Config* c) {
         static const std::set<std::string> kLevels = {"trace", "debug", "info", "warn", "error", "off"};
         c->log_level = text;
         return kLevels.count(text) > 0;
       }},
  };
  return *kKeys;
}

const Key* Find(const std::string& name) {
  for (const Key& key : Keys()) {
    if (key.doc.name == name) return &key;
  }
  return nullptr;
}

// `origin`: the source of the value; empty: the default.
absl::StatusOr<Config> CheckStaging(const Config& config, const std::string& origin) {
  const uint64_t staging = config.server.staging_bytes, dram = config.server.budget.dram;
  const bool fits = staging >= kStagingBytesMin && staging <= dram;
  if (config.server.budget.nvme == 0 || fits) return config;
  return BadConfig(absl::StrCat(origin, "staging: expected ", kStagingBytesMin, " to ", dram,
                                " bytes (of budget.dram) when budget.nvme is set, got ", staging,
                                origin.empty() ? ", the default" : "", "; set staging, or raise budget.dram"));
}

absl::Status CheckPaths(const Config& config, const std::string& origin) {
  std::set<std::filesystem::path> seen;
  for (const storage::NvmeDevice& device : config.server.nvme_devices) {
    std::filesystem::path path = std::filesystem::path(device.directory).lexically_normal();
    if (!path.has_filename()) path = path.parent_path();
    if (seen.insert(path).second) continue;
    return BadConfig(absl::StrCat(origin, ": budget.nvme: ", device.directory,
                                  " comes twice; expected a directory for each "
                                  "disk. Keep one of them"));
  }
  return absl::OkStatus();
}

}  // namespace

const std::vector<ConfigKey>& ConfigKeys() {
  static const auto* const kDocs = [] {
    auto* docs = new std::vector<ConfigKey>;
    for (const Key& key : Keys()) docs->push_back(key.doc);
    return docs;
  }();
  return *kDocs;
}

std::string KnownKeys() {
  return absl::StrJoin(ConfigKeys(), ", ",
                       [](std::string* out, const ConfigKey& key) { absl::StrAppend(out, key.name); });
}

absl::Status BadConfig(absl::string_view message) {
  return model::Error(absl::StatusCode::kInvalidArgument, model::kBadConfig, message);
}

std::string EnvironmentName(const ConfigKey& key) {
  return kEnvironmentPrefix + absl::AsciiStrToUpper(absl::StrReplaceAll(key.name, {{".", "_"}}));
}

absl::StatusOr<ConfigValues> ParseEnvironment(const std::vector<std::string>& environment) {
  const std::regex service_link(kServiceLink);
  ConfigValues values;
  for (const std::string& variable : environment) {
    if (!absl::StartsWith(variable, kEnvironmentPrefix)) continue;
    const size_t equals = variable.find('=');
    const std::string name = variable.substr(0, equals);
    if (std::find(std::begin(kClientVariables), std::end(kClientVariables), name) != std::end(kClientVariables))
      continue;
    bool known = false;
    for (const Key& key : Keys()) {
      if (EnvironmentName(key.doc) != name) continue;
      values[key.doc.name] = {equals == std::string::npos ? "" : variable.substr(equals + 1), name};
      known = true;
    }
    if (known || std::regex_match(name, service_link)) continue;
    return BadConfig(absl::StrCat(name, ": unknown variable; expected one of ",
                                  absl::StrJoin(Keys(), ", ", [](std::string* out, const Key& key) {
                                    absl::StrAppend(out, EnvironmentName(key.doc));
                                  })));
  }
  return values;
}

absl::StatusOr<Config> MakeConfig(const ConfigValues& file, const ConfigValues& environment,
                                  const ConfigValues& flags) {
  Config config;
  config.server.scrub_bytes_per_s = kScrubBytesPerSecond;
  const int processors = UsableProcessors("");
  config.server.compute_threads = std::min(processors, kThreadsMax);
  config.server.answer_threads = std::clamp(processors / 2, 1, kThreadsMax);
  std::map<std::string, std::string> where;  // by key: the source of its value
  for (const ConfigValues* source : {&file, &environment, &flags}) {
    for (const auto& [name, value] : *source) {
      const Key* key = Find(name);
      if (key == nullptr)
        return BadConfig(absl::StrCat(value.origin, ": unknown key '", name, "'; expected one of ", KnownKeys()));
      if (!key->set(value.text, &config)) {
        return BadConfig(
            absl::StrCat(value.origin, ": ", name, ": expected ", key->doc.expected, ", got '", value.text, "'"));
      }
      where[name] = value.origin;
    }
  }
  for (const char* required : {"data_directory", "budget.dram"}) {
    if (where.count(required) > 0) continue;
    const Key* key = Find(required);
    return BadConfig(absl::StrCat(required, " is missing; expected ", key->doc.expected, " (", key->doc.meaning,
                                  "), in the file, as ", EnvironmentName(key->doc), " or as --", required));
  }
  if (config.metrics_tls && !config.guard.tls.enabled()) {
    return BadConfig(absl::StrCat(where["metrics_tls"],
                                  ": metrics_tls uses the certificate of the rpc port; set "
                                  "tls.certificate and tls.key, or metrics_tls: false"));
  }
  BALLAST_RETURN_IF_ERROR(CheckPaths(config, where["budget.nvme"]));
  if (config.server.budget.dram == 0)
    return BadConfig("budget.dram is 0; slices of the step in flight always need DRAM");
  if (where.count("staging") > 0) return CheckStaging(config, where["staging"] + ": ");
  config.server.staging_bytes = StagingBytes(config.server);
  return CheckStaging(config, "");
}

}  // namespace ballast::services
