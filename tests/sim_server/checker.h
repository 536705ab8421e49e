// Compares what servers say and hold with what the trainers meant, did and were told.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "ballast/tests/sim/oracle.h"
#include "ballast/tests/sim_server/machine.h"
#include "ballast/tests/sim_server/reference.h"
#include "ballast/tests/sim_server/server_schedule.h"

namespace ballast::sim {

class Checker {
 public:
  // Borrows all.
  Checker(Oracle* oracle, Random* random, ServerTally* tally) : oracle_(oracle), random_(random), tally_(tally) {}

  void AddGroup(const GroupIntent* group) { groups_.push_back(group); }
  // A trainer sends this: what it holds for decided becomes part of the reference.
  void Sent(const Request& request);
  // A server answered so: what it promised must outlive it.
  void Answered(const Response& response);

  // What a server holds after a restart, or at rest: each of its chunks at the step that it says is committed, which is
  // not older than it may be. ABORTED if something is wrong; else as Pull's errors.
  absl::Status CheckServer(int server, Machine* machine);
  // Pulls some of a chunk at or near its newest version, and compares the bits when they come.
  void PullSomething(int server, Machine* machine);
  // What the first such pull found wrong since the last call.
  absl::Status TakeError() { return std::exchange(error_, absl::OkStatus()); }

 private:
  absl::Status CheckRecord(int server, const v1::GetJobResponse& job) const;
  absl::Status Compare(const v1::PullRequest& request, uint64_t chunk, absl::Span<const std::byte> bits) const;
  void Note(const v1::Decision& decision);

  Oracle* const oracle_;
  Random* const random_;
  ServerTally* const tally_;
  std::vector<const GroupIntent*> groups_;
  Reference reference_;
  std::map<int64_t, v1::Decision> decided_;
  v1::Epoch promised_[kServers];  // answered
  absl::Status error_;
};

}  // namespace ballast::sim
