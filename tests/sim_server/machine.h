// One machine of a schedule: a disk and a catalog that stay, and the state server that runs on them while it is up.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ballast/services/state_server.h"
#include "ballast/tests/sim/message.h"
#include "ballast/tests/sim/random.h"
#include "ballast/tests/sim_server/sim_foundation.h"

namespace ballast::sim {

class Machine {
 public:
  // `directory` must exist; nothing is written there.
  Machine(int index, uint64_t seed, std::string directory);
  ~Machine();

  storage::SimDisk& disk() { return disk_; }
  SimCatalog& catalog() { return catalog_; }
  bool up() const { return server_ != nullptr; }
  // The power failed amid something: nothing leaves the machine any more, and PowerCut has to follow.
  bool off() const { return disk_.off(); }

  // A process starts, with one of the budgets that hold its chunks. REQUIRES: !up().
  absl::Status Start(Random* random);
  // It ends: by itself, doing what it had begun / killed, the system stays up / with the machine, whose unsynced writes
  // a crash decides on.
  void Stop();
  void Kill();
  void PowerCut();
  // At the n-th operation of the disk / write of the catalog from now.
  void PowerCutAfter(uint64_t operations) { disk_.CrashAfter(operations); }
  void PowerCutAtCatalogWrite(uint64_t writes);

  // REQUIRES: up() for all below.
  void Handle(const Request& request, bool damage, Random* random);
  std::vector<Response> TakeAnswers();
  bool RunTask(Random* random) { return foundation_->RunTask(random); }
  bool PumpOne(Random* random) { return foundation_->PumpOne(random); }
  // The job, as GetJob tells it.
  absl::StatusOr<v1::GetJobResponse> Describe();
  // Why it was lost, if it was.
  absl::Status Cause();
  // A whole chunk, or part of it. `bits` arrives when `reply` is called.
  using PullReply = std::function<void(absl::StatusOr<std::vector<std::byte>>)>;
  void Pull(const v1::PullRequest& request, PullReply reply);
  // Another of the DRAM budgets that hold its chunks; they move later. `moves`: how many, once that is known.
  void ChangeBudget(Random* random, std::function<void(uint64_t)> moves);
  // Runs tasks until it is there: DEADLINE_EXCEEDED if that never happens.
  absl::StatusOr<std::vector<std::byte>> PullNow(const v1::PullRequest& request, Random* random);

 private:
  template <typename Response>
  services::Reply<Response> ReplyTo(const Request& request);
  storage::TierBytes Budget(Random* random, bool hbm) const;
  void End();

  const int index_;
  const std::string directory_;
  storage::SimDisk disk_;
  SimCatalog catalog_;
  std::unique_ptr<SimFoundation> foundation_;
  bool has_hbm_ = false;
  std::shared_ptr<bool> alive_;  // of this life: answers of an earlier one are lost
  std::unique_ptr<services::StateServer> server_;
  std::vector<Response> answers_;
};

}  // namespace ballast::sim
