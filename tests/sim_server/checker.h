// Compares the servers' answers and state with the trainers' intentions, decisions and answers received.
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
  // Borrows the pointers. `opens_fail`: a server may forget the promise of a job that it never opened, so only the
  // epochs count in which the server prepared steps.
  Checker(Oracle* oracle, Random* random, ServerTally* tally, bool opens_fail)
      : oracle_(oracle), random_(random), tally_(tally), opens_fail_(opens_fail) {}

  void AddGroup(const GroupIntent* group) { groups_.push_back(group); }
  // Adds decisions in a trainer's Commit or Open to the reference.
  void Sent(const Request& request);
  // Notes promises in a server's answer, because promises must survive the server.
  void Answered(const Response& response);

  // Checks a server after a restart, or at rest: its committed step must not be too old, and each of its chunks must
  // have the reference's bits at this step. ABORTED if something is wrong; otherwise Pull's errors.
  absl::Status CheckServer(int server, Machine* machine);
  // Pulls part of a chunk at or near its newest version, and compares the bits on arrival.
  void PullSomething(int server, Machine* machine);
  // The first error of such a pull since the last call.
  absl::Status TakeError() { return std::exchange(error_, absl::OkStatus()); }

 private:
  absl::Status CheckRecord(int server, const v1::GetJobResponse& job) const;
  absl::Status Compare(const v1::PullRequest& request, uint64_t chunk, absl::Span<const std::byte> bits) const;
  void Note(const v1::Decision& decision);

  Oracle* const oracle_;
  Random* const random_;
  ServerTally* const tally_;
  const bool opens_fail_;
  std::vector<const GroupIntent*> groups_;
  Reference reference_;
  std::map<int64_t, v1::Decision> decided_;
  v1::Epoch promised_[kServers];  // newest epoch promised in an answer that the server must remember
  absl::Status error_;
};

}  // namespace ballast::sim
