// A trainer group of one rank that opens the job of a run (change_run.h) with the shipped functions, on a table that a
// key would have, and steps. Its bits are those of any other group: a step's content does not depend on who makes it.
//
// With every fifth seed calls reach servers apart: some come while their server records a copy or another new version,
// some long after the others have answered, and some commits never.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "ballast/proto/model/members.h"
#include "ballast/tests/sim_server/change_checks.h"
#include "ballast/tests/sim_server/change_machines.h"

namespace ballast::sim {

class ChangeGroup {
 public:
  // Borrows the pointers.
  ChangeGroup(const GroupIntent* intent, ChangeMachines* machines, ChangeChecks* checks, Random* random)
      : intent_(intent), machines_(machines), checks_(checks), random_(random), apart_(intent->seed % 5 == 0) {}

  enum class Opened {
    kYes,
    kInterrupted,  // a machine lost its power
    kWaits,        // a server that is down has what nobody else has
  };
  // A new epoch: fences all servers that are up, and opens the job with two copies on those of `wanted` that are up.
  // The first call makes the job.
  Opened Open(absl::Span<const int> wanted);
  // Opens the job's chunks of the open epoch on a server that has nothing yet, as if the job began there.
  void OpenOn(Machine* fresh);
  // Makes the next step. False if it did not come to its end.
  enum class Ends { kWhole, kUncommitted, kAbandoned };
  bool Step(Ends ends);

  const v1::Table& table() const { return table_; }
  const model::EpochPlan& plan() const { return *plan_; }
  // Servers of the open epoch, in the table's order.
  const std::vector<int>& members() const { return members_; }
  bool fills() const;                     // somebody is to copy chunks by the table
  bool filled();                          // nobody lacks chunks any more
  int64_t step() const { return step_; }  // the last decided
  uint64_t epochs() const { return epoch_.counter(); }
  // The server is about to record new versions.
  void Records(int server);

 private:
  template <typename Response>
  struct Call {
    int server = 0;
    bool answered = false;
    absl::StatusOr<Response> response = absl::UnknownError("no answer");
  };
  template <typename Response>
  using Calls = std::vector<std::shared_ptr<Call<Response>>>;
  template <typename Response>
  services::Reply<Response> ReplyTo(const std::shared_ptr<Call<Response>>& call);
  // Makes the call, perhaps later.
  void Send(int server, std::function<void(Machine*)> call);
  void SendHeld(std::optional<int> server);
  // Turns until all have answered. False: interrupted, or an error, which is then a broken promise.
  template <typename Response>
  bool AwaitAll(const Calls<Response>& calls, const char* what);

  bool Fence(std::vector<v1::GetJobResponse>* answers);
  // Whichever server is lost now: if the others have all of the job, they know the last step too.
  void CheckLosses(absl::Span<const v1::GetJobResponse> answers);
  bool Choose(absl::Span<const v1::GetJobResponse> answers, absl::Span<const int> wanted, model::Found* found);
  bool SendOpens(const model::Found& found);
  void Push(v1::SliceKind kind, const std::string& presence);
  void PushTo(int server, v1::SliceKind kind, const model::Slice& slice);
  bool Seal(std::vector<v1::PreparedRecord>* records);
  bool Commit(const v1::Decision& decision);

  struct Withheld {
    int server;
    v1::SliceKind kind;
    const model::Slice* slice;
  };

  const GroupIntent* const intent_;
  ChangeMachines* const machines_;
  ChangeChecks* const checks_;
  Random* const random_;
  const bool apart_;
  v1::Table table_;  // as the key has it
  v1::Epoch epoch_;
  std::unique_ptr<model::EpochPlan> plan_;
  std::vector<int> members_;
  std::vector<Withheld> withheld_;
  std::vector<std::pair<int, std::function<void(Machine*)>>> held_;  // calls that come later, by server
  const std::shared_ptr<absl::Status> push_error_ = std::make_shared<absl::Status>();
  int64_t step_ = -1;
  int64_t next_ = 0;
};

}  // namespace ballast::sim
