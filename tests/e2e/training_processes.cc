#include "ballast/tests/e2e/training_processes.h"

#include <cstdlib>
#include <regex>

#include "absl/strings/str_cat.h"
#include "ballast/tests/services/daemon.h"

namespace ballast {

std::vector<std::string> TrainerCommand(int steps) {
  return {std::getenv("TRAINER"),
          "--layers",
          "2",
          "--width",
          "128",
          "--heads",
          "2",
          "--context",
          "32",
          "--batch",
          "1",
          "--text",
          std::getenv("TEXT"),
          "--chunk-elements",
          "65536",
          "--steps",
          absl::StrCat(steps),
          "--digest"};
}

std::vector<std::string> RankCommand(int steps, const std::string& servers, const std::string& rendezvous, int rank,
                                     int world_size) {
  std::vector<std::string> command = TrainerCommand(steps);
  command.insert(command.end(), {"--servers", servers, "--rendezvous", rendezvous, "--timeout", "60", "--rank",
                                 absl::StrCat(rank), "--world-size", absl::StrCat(world_size)});
  return command;
}

std::string DigestIn(const std::string& output) {
  std::smatch match;
  return std::regex_search(output, match, std::regex("CRC32C ([0-9a-f]{8})")) ? match[1].str() : "no digest: " + output;
}

int LastStepIn(const std::string& output) {
  const std::regex regex("step ([0-9]+)/");
  int last = -1;
  for (auto match = std::sregex_iterator(output.begin(), output.end(), regex); match != std::sregex_iterator();
       ++match) {
    last = std::stoi((*match)[1].str());
  }
  return last;
}

std::string ReferenceDigest(int steps, const std::vector<std::string>& more) {
  std::vector<std::string> command = TrainerCommand(steps);
  command.insert(command.end(), more.begin(), more.end());
  command.push_back("--reference");
  return DigestIn(services::RunProcess(command).out);
}

int VersionOn(const std::string& servers, const std::vector<std::string>& access) {
  std::vector<std::string> command = {services::CtlPath(), "status", "--json", "--servers", servers, "--timeout", "60"};
  command.insert(command.end(), access.begin(), access.end());
  const std::string status = services::RunProcess(command).out;
  std::smatch match;
  return std::regex_search(status, match, std::regex("\"committed_min\":(-?[0-9]+)")) ? std::stoi(match[1].str()) : -1;
}

}  // namespace ballast
