// A machine of a schedule: a disk and a catalog that outlive crashes, and a state server while the machine is up.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ballast/services/server/state_server.h"
#include "ballast/tests/sim/message.h"
#include "ballast/tests/sim/random.h"
#include "ballast/tests/sim_server/sim_foundation.h"

namespace ballast::sim {

class Machine {
 public:
  // `directory` must exist. Nothing is written there but empty directories.
  Machine(int index, uint64_t seed, std::string directory);
  ~Machine();

  storage::SimDisk& disk() { return disk_; }
  SimCatalog& catalog() { return catalog_; }
  bool up() const { return server_ != nullptr; }
  // True if the power failed during an operation. No answer leaves the machine any more; the caller must call PowerCut.
  bool off() const { return disk_.off(); }

  // Starts the server with a random budget large enough for its chunks. REQUIRES: !up().
  absl::Status Start(Random* random);
  // Starts the server with this budget and these options; the machine adds whose they are. REQUIRES: !up().
  absl::Status Start(services::StateServerOptions options);
  // Stop ends the server cleanly, after its pending work. Kill ends the process, and the system stays up. PowerCut ends
  // the machine; the crash decides about unsynced writes.
  void Stop();
  void Kill();
  void PowerCut();
  // Cut the power at the n-th operation of the disk, or the n-th write of the catalog, from now.
  void PowerCutAfter(uint64_t operations) { disk_.CrashAfter(operations); }
  void PowerCutAtCatalogWrite(uint64_t writes, SimCatalog::Count count = SimCatalog::Count::kPuts);

  // REQUIRES: up() for all below.
  services::StateServer& server() { return *server_; }
  // False once this life of the server has ended.
  std::shared_ptr<const bool> alive() const { return alive_; }
  void Handle(const Request& request, bool damage, Random* random);
  std::vector<Response> TakeAnswers();
  bool RunTask(Random* random) { return foundation_->RunTask(random); }
  void ScrubNext() { server_->ScrubNext(); }
  bool PumpOne(Random* random) { return foundation_->PumpOne(random); }
  // The server's answer to GetJob.
  absl::StatusOr<v1::GetJobResponse> Describe();
  // Why the job's state was lost. Meaningful only after a loss.
  absl::Status Cause();
  // Pulls a chunk or part of a chunk; calls `reply` with the bits.
  using PullReply = std::function<void(absl::StatusOr<std::vector<std::byte>>)>;
  void Pull(const v1::PullRequest& request, PullReply reply);
  // Does a chunk of the job lack a working copy? REQUIRES: up(), with all chunks there.
  bool LacksCopies() const;
  // Sets a new random budget large enough for the server's chunks. Calls `moves` with the number of chunks to move; the
  // chunks move later.
  void ChangeBudget(Random* random, std::function<void(uint64_t)> moves);
  // Runs tasks until the pull is answered. DEADLINE_EXCEEDED if no task is left and no answer has come.
  absl::StatusOr<std::vector<std::byte>> PullNow(const v1::PullRequest& request, Random* random);

 private:
  template <typename Response>
  services::Reply<Response> ReplyTo(const Request& request);
  storage::TierBytes Budget(Random* random, bool hbm) const;
  absl::Status ChangeProfile();
  absl::Status SettleDisk();
  void End();

  const int index_;
  uint64_t starts_ = 0;
  const std::string directory_;
  const bool devices_;        // state on two of them, beside the data directory
  const uint64_t log_steps_;  // of all its servers: waits, by which logs get longer, would not repeat
  storage::SimDisk disk_;
  SimCatalog catalog_;
  std::unique_ptr<SimFoundation> foundation_;
  bool has_hbm_ = false;
  std::shared_ptr<bool> alive_;  // false once this life of the server has ended: its answers are lost
  std::unique_ptr<services::StateServer> server_;
  std::vector<Response> answers_;
};

}  // namespace ballast::sim
