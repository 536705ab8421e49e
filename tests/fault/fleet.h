// Two state servers and a group of two trainers as real processes, to be killed.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ballast/tests/scratch_directory.h"
#include "ballast/tests/services/daemon.h"

namespace ballast {

struct FleetOptions {
  std::string dram;     // of each server, as the configuration spells it
  std::string staging;  // its part for NVMe state
  int steps = 0;
  std::vector<std::string> flags = {};  // further ones of the trainers on the servers
};

// Threads: one. Failures of what cannot be gone on without are GoogleTest's.
class Fleet {
 public:
  static constexpr int kServers = 2;
  static constexpr int kRanks = 2;
  static constexpr char kJob[] = "bytes_lm";

  explicit Fleet(FleetOptions options);

  // On its data directory, at its address if it had one; waits until it serves.
  void StartServer(int i);
  // As StartServer, of one that may die on the way: does it serve?
  bool TryStartServer(int i);
  bool server_ended(int i) const { return servers_[i]->ended(); }
  void KillServer(int i);
  // Starts a server and kills it `after_ms` later, wherever its recovery is then.
  void StartAndKillServer(int i, int after_ms);

  void StartRanks();
  std::string RankOutputSoFar(int rank) const { return ranks_[rank]->OutputSoFar(); }
  bool ranks_started() const { return ranks_[0] != nullptr; }
  // SIGKILL; its output is lost for nobody: EndRanks reads it.
  void KillRank(int rank);
  // Any of them, which ends the others.
  bool ranks_ended() const;
  // Waits for all of them; what each left behind.
  std::vector<services::Finished> EndRanks();

  struct Status {
    bool answered = false;
    int committed_min = -1;
    int committed_max = -1;
    std::string text;
  };
  Status AskStatus() const;
  // `ballastctl drop` of the job; its exit code.
  int Drop() const;
  // What a run that nobody disturbs prints.
  std::string ReferenceDigest() const;

  // In the output of rank 0: the digest; the last step that the trainer was told is done, the one it continued after
  // (-1: none).
  static std::string DigestIn(const std::string& output);
  static int LastStepIn(const std::string& output);
  static int ContinuedAfterIn(const std::string& output);

 private:
  std::string ServerDirectory(int i) const;
  std::string ServerConfig(int i) const;
  std::string Addresses() const;
  std::vector<std::string> Model() const;

  const FleetOptions options_;
  ScratchDirectory scratch_;
  std::string listen_[kServers];  // of the first start
  std::unique_ptr<services::Daemon> servers_[kServers];
  std::unique_ptr<services::Process> ranks_[kRanks];
};

}  // namespace ballast
