#include "ballast/tests/fault/fleet.h"

#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <regex>
#include <thread>

#include "absl/strings/str_cat.h"

namespace ballast {
namespace {

// The last number that `pattern` captures, -1 if it never does.
std::vector<int> Numbers(const std::string& text, const char* pattern) {
  const std::regex regex(pattern);
  std::vector<int> numbers;
  for (auto match = std::sregex_iterator(text.begin(), text.end(), regex); match != std::sregex_iterator(); ++match) {
    numbers.push_back(std::stoi((*match)[1].str()));
  }
  return numbers;
}

int LastNumber(const std::string& text, const char* pattern) {
  const std::vector<int> numbers = Numbers(text, pattern);
  return numbers.empty() ? -1 : numbers.back();
}

}  // namespace

Fleet::Fleet(FleetOptions options) : options_(std::move(options)) {
  for (int i = 0; i < kServers; ++i) {
    listen_[i] = services::OwnLoopback() + ":0";
    std::filesystem::create_directories(ServerDirectory(i));
    StartServer(i);
    if (servers_[i]->ready()) listen_[i] = servers_[i]->listen();
  }
}

std::string Fleet::ServerDirectory(int i) const { return absl::StrCat(scratch_.path(), "/server", i); }

std::string Fleet::ServerConfig(int i) const {
  return absl::StrCat(
      "listen: ", listen_[i], "\nmetrics_listen: 127.0.0.1:0\ndata_directory: ", ServerDirectory(i),
      "/data\nserver_id: s", i, "\nstaging: ", options_.staging, "\nbudget:\n  dram: ", options_.dram,
      "\n  nvme: 256MiB\nlog_steps: ", options_.log_steps == 0 ? "auto" : absl::StrCat(options_.log_steps), "\n");
}

void Fleet::StartServer(int i) { ASSERT_TRUE(TryStartServer(i)) << "server " << i << " does not start"; }

bool Fleet::TryStartServer(int i) {
  servers_[i] = std::make_unique<services::Daemon>(ServerDirectory(i), ServerConfig(i));
  return servers_[i]->ready();
}

bool Fleet::AwaitServerEnd(int i) const {
  constexpr int kTries = 1000;
  for (int tries = 0; tries < kTries && !server_ended(i); ++tries) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return server_ended(i);
}

void Fleet::KillServer(int i) { servers_[i]->End(SIGKILL); }

void Fleet::StartAndKillServer(int i, int after_ms) {
  const std::string path = ServerDirectory(i) + "/ballastd.yaml";
  std::ofstream(path) << ServerConfig(i);
  services::Process server({services::DaemonPath(), "--config", path});
  std::this_thread::sleep_for(std::chrono::milliseconds(after_ms));
  server.Signal(SIGKILL);
  const services::Finished finished = server.Wait();
  ASSERT_EQ(finished.code, -1) << "server " << i << " ended by itself: " << finished.err;
}

std::string Fleet::Addresses() const { return absl::StrCat(listen_[0], ",", listen_[1]); }

std::vector<std::string> Fleet::Model() const {
  const std::vector<std::pair<std::string, std::string>> flags = {{"--layers", "2"},
                                                                  {"--width", absl::StrCat(options_.width)},
                                                                  {"--heads", "2"},
                                                                  {"--context", absl::StrCat(options_.context)},
                                                                  {"--batch", "1"},
                                                                  {"--chunk-elements", "65536"},
                                                                  {"--text", std::getenv("TEXT")},
                                                                  {"--steps", absl::StrCat(options_.steps)}};
  std::vector<std::string> command = {std::getenv("TRAINER"), "--digest"};
  for (const auto& [name, value] : flags) command.insert(command.end(), {name, value});
  return command;
}

void Fleet::StartRanks() {
  for (int rank = 0; rank < kRanks; ++rank) {
    std::vector<std::string> command = Model();
    for (const std::string& word :
         {std::string("--servers"), Addresses(), std::string("--rendezvous"), scratch_.path() + "/ranks",
          std::string("--timeout"), std::string("60"), std::string("--resume"), std::string("auto"),
          std::string("--log-every"), std::string("1"), std::string("--rank"), absl::StrCat(rank),
          std::string("--world-size"), absl::StrCat(kRanks)}) {
      command.push_back(word);
    }
    command.insert(command.end(), options_.flags.begin(), options_.flags.end());
    ranks_[rank] = std::make_unique<services::Process>(command);
  }
}

void Fleet::KillRank(int rank) { ranks_[rank]->Signal(SIGKILL); }

bool Fleet::ranks_ended() const {
  return std::any_of(std::begin(ranks_), std::end(ranks_), [](const auto& rank) { return rank->ended(); });
}

std::vector<services::Finished> Fleet::EndRanks() {
  std::vector<services::Finished> finished;
  for (auto& rank : ranks_) {
    finished.push_back(rank->Wait());
    rank.reset();
  }
  return finished;
}

Fleet::Status Fleet::AskStatus() const {
  const services::Finished finished =
      services::RunProcess({services::CtlPath(), "status", "--json", "--servers", Addresses(), "--timeout", "60"});
  Status status{.text = finished.out + finished.err};
  status.answered = finished.code == 0;
  status.committed_min = LastNumber(finished.out, "\"committed_min\":(-?[0-9]+)");
  status.committed_max = LastNumber(finished.out, "\"committed_max\":(-?[0-9]+)");
  for (const int bytes : Numbers(finished.out, "\"part\":\"log\",\"bytes\":\"([0-9]+)")) {
    status.log_bytes_max = std::max(status.log_bytes_max, bytes);
  }
  return status;
}

int Fleet::Drop() const {
  return services::RunProcess({services::CtlPath(), "drop", "--job", kJob, "--servers", Addresses(), "--timeout", "60"})
      .code;
}

std::string Fleet::ReferenceDigest() const {
  std::vector<std::string> command = Model();
  command.push_back("--reference");
  return DigestIn(services::RunProcess(command).out);
}

std::string Fleet::DigestIn(const std::string& output) {
  std::smatch match;
  return std::regex_search(output, match, std::regex("CRC32C ([0-9a-f]{8})")) ? match[1].str() : "no digest: " + output;
}

int Fleet::LastStepIn(const std::string& output) { return LastNumber(output, "step ([0-9]+)/"); }
int Fleet::ContinuedAfterIn(const std::string& output) { return LastNumber(output, "continues after step ([0-9]+)"); }

}  // namespace ballast
