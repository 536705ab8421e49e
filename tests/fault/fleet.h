// Two state servers and a group of two trainers as real processes for a test to kill.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ballast/tests/scratch_directory.h"
#include "ballast/tests/services/daemon.h"

namespace ballast {

struct FleetOptions {
  std::string dram;               // of each server, as the configuration spells it
  std::string staging;            // the part of `dram` for NVMe state
  int log_steps = 0;              // that logs hold; 0: as many as servers think best
  int width = 128, context = 32;  // of the model
  int steps = 0;
  std::vector<std::string> flags = {};  // further flags of the ranks
};

// Three steps fill the log, and whole segments hold no more; some state lives on NVMe, some is flushed.
inline FleetOptions WithShortLog(int steps) {
  return {.dram = "14MiB", .staging = "2MiB", .log_steps = 3, .width = 320, .context = 8, .steps = steps};
}

// Threads: one. Where the test cannot go on, a failure is a GoogleTest assertion.
class Fleet {
 public:
  static constexpr int kServers = 2;
  static constexpr int kRanks = 2;
  static constexpr char kJob[] = "bytes_lm";

  explicit Fleet(FleetOptions options);

  // Starts server i on its data directory, at the address of its first start, and waits until the server serves.
  void StartServer(int i);
  // As StartServer, for a server that may die on the way. True if the server serves.
  bool TryStartServer(int i);
  bool server_ended(int i) const { return servers_[i]->ended(); }
  // For a server whose connections have ended: the process itself ends later. False if it lives on.
  bool AwaitServerEnd(int i) const;
  void KillServer(int i);
  // For the starts from now on.
  void set_log_steps(int steps) { options_.log_steps = steps; }
  // Starts a server and kills the process `after_ms` later, wherever recovery is by then.
  void StartAndKillServer(int i, int after_ms);

  void StartRanks();
  std::string RankOutputSoFar(int rank) const { return ranks_[rank]->OutputSoFar(); }
  bool ranks_started() const { return ranks_[0] != nullptr; }
  // Sends SIGKILL. EndRanks still returns the rank's output.
  void KillRank(int rank);
  // True once any rank has ended; the rest then end too.
  bool ranks_ended() const;
  // Waits for all ranks; returns each rank's exit code and output.
  std::vector<services::Finished> EndRanks();

  struct Status {
    bool answered = false;
    int committed_min = -1;
    int committed_max = -1;
    int log_bytes_max = -1;  // of the servers' gradient logs, the largest
    std::string text;
  };
  Status AskStatus() const;
  // Drops the job with `ballastctl drop`; returns the exit code.
  int Drop() const;
  // The digest of an undisturbed run of the same training.
  std::string ReferenceDigest() const;

  // Read from the output of rank 0: the digest, the last step reported as done, and the step after which the trainer
  // continued. -1 if there is no step.
  static std::string DigestIn(const std::string& output);
  static int LastStepIn(const std::string& output);
  static int ContinuedAfterIn(const std::string& output);

 private:
  std::string ServerDirectory(int i) const;
  std::string ServerConfig(int i) const;
  std::string Addresses() const;
  std::vector<std::string> Model() const;

  FleetOptions options_;
  ScratchDirectory scratch_;
  std::string listen_[kServers];  // addresses of the first start
  std::unique_ptr<services::Daemon> servers_[kServers];
  std::unique_ptr<services::Process> ranks_[kRanks];
};

}  // namespace ballast
