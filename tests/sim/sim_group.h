// A trainer group of a schedule. Events drive its ranks; ranks decide with the same pure functions as the real client.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ballast/tests/sim/message.h"
#include "ballast/tests/sim/oracle.h"
#include "ballast/tests/sim/random.h"

namespace ballast::sim {

// Bugs of a client that misreads the rules, and some bugs of the log and the disk.
enum class ClientBug {
  kNone,
  kEpochWithoutNonce,     // two groups may share an epoch
  kResolveIgnoresEpoch,   // "all prepared with equal plan hash"
  kResolveWithoutAll,     // two of three answers to the fence suffice
  kResolveNeverFinishes,  // drops a step prepared on all servers
  kDecidesWithoutAll,     // acknowledges when two of three are prepared
  kRestartsInEpoch,       // a dead rank comes back into the running epoch
  kForgetsCommit,         // does not answer BEHIND with the commit
  kFreesGradientsEarly,   // gradients are gone after the first `prepared`
  kLogCutAtOwnCommit,     // the log forgets a step's records before its decision is durable
  kPinBeforeDurable,      // a server counts a version as pinned before it is durable
  kUnpinBeforeFlush,      // a version leaves the disk although chunks still have to be made from it
  kNumbersUsedAgain,      // every-K: a group going back to a version counts on from its number
  kRestoreForgotten,      // every-K: a group going back to a version does not restore it
};

// Counts of events in a schedule, or in many schedules.
struct Tally {
  uint64_t groups = 0;
  uint64_t resized = 0;         // groups whose size differs from the group before
  uint64_t crashes = 0;         // of servers
  uint64_t decisions_lost = 0;  // by crashes
  uint64_t ranks_lost = 0;
  uint64_t finished_for_others = 0;  // steps decided by the next group
  uint64_t abandoned = 0;            // steps prepared on some servers and dropped by the next group
  uint64_t steps = 0;
  uint64_t skipped = 0;
  uint64_t drops = 0;
  uint64_t mismatches = 0;
  uint64_t stale = 0;  // ranks that learnt of a newer epoch or of lost state
  uint64_t norms = 0;  // answered
  uint64_t pins = 0;   // each on a single server
  uint64_t restores = 0;
  uint64_t gone = 0;  // ranks whose restore named a version missing on some server
  // Every-K.
  uint64_t states_lost = 0;   // restarts of servers that lost their state
  uint64_t went_back = 0;     // groups that found state lost and went back to a version
  uint64_t numbers_left = 0;  // of these, groups with a base beyond the last decided step
  uint64_t dead = 0;          // schedules whose job lost its state with no version pinned on every server

  void Add(const Tally& other);
};

class SimGroup {
 public:
  struct Surroundings {
    Random* random;
    Oracle* oracle;
    Tally* tally;
    ClientBug bug = ClientBug::kNone;
    // If set, a rank exits on an error that no fault explains, and the schedule goes on: a seeded bug has to break a
    // promise.
    bool leave_on_error = false;
  };
  SimGroup(GroupIntent intent, Surroundings around);

  const GroupIntent& intent() const { return intent_; }
  bool all_alive() const;
  bool alive(uint32_t rank) const { return !ranks_[rank].dead; }
  void Kill(uint32_t rank);
  // Only a seeded bug does this. The rank takes `step` for the next step.
  void RestartRank(uint32_t rank, int64_t step);
  // Lets a rank run and adds its messages to `requests`. `timeout`: the rank repeats unanswered messages.
  void Tick(uint32_t rank, bool timeout, std::vector<Request>* requests);
  void Receive(const Response& response);

 private:
  enum class Sent : uint8_t { kNo, kYes, kDone };
  struct Push {
    v1::SliceKind kind;
    uint32_t slice;  // index in the plan
    Sent sent = Sent::kNo;
  };
  struct Rank {
    bool dead = false;
    bool started = false;
    uint32_t life = 0;
    int64_t step = 0;
    uint64_t attempt = 0;
    bool sealing = false;
    std::vector<Push> pushes;
    Sent seals[kServers] = {};
    Sent opens[kServers] = {};
    Sent commits[kServers] = {};
    std::optional<v1::PreparedRecord> prepared[kServers];
    std::optional<v1::Decision> last;  // of step - 1
    std::shared_ptr<const v1::SealRequest> seal;
    std::shared_ptr<const v1::CommitRequest> commit;
  };

  void StartStep(Rank* rank, int64_t step);
  void StartAttempt(uint32_t r, uint64_t attempt);
  void TickFence(std::vector<Request>* requests);
  void TickPushes(uint32_t r, std::vector<Request>* requests);
  void TickPins(std::vector<Request>* requests);
  void OnPin(const Response& response);
  // Sometimes lets the group begin with a restore of a version pinned according to `answers`.
  void MaybeRestore(int64_t base, const std::vector<v1::GetJobResponse>& answers);
  void WillRestore(int64_t base, int64_t version);
  void NotResolved(const absl::Status& status);
  void TickSeals(uint32_t r, std::vector<Request>* requests);
  void AskNorms(uint32_t r, std::vector<Request>* requests);
  void Resolve();
  void Decide(uint32_t r, const v1::Decision& decision);

  void OnFence(int server, const v1::FenceResponse& response);
  void OnSeal(uint32_t r, int server, const v1::SealResponse& response);
  void OnNorm(const Request& request, const v1::NormResponse& response);
  void OnError(uint32_t r, const Response& response);
  Sent* SentOf(Rank* rank, const Request& request);
  Request Make(uint32_t r, int server, RequestBody body) const;
  std::string Name(uint32_t r) const;

  GroupIntent intent_;
  const Surroundings around_;
  const model::EpochPlan& plan_;
  Sent fences_[kServers] = {};
  std::optional<v1::GetJobResponse> answers_[kServers];
  std::shared_ptr<const v1::OpenRequest> open_;  // set once the fence is resolved
  std::vector<Rank> ranks_;
  // Rank 0 pins this version, and seals no further step until done or out of patience; -1: none.
  int64_t pin_ = -1;
  int pin_patience_ = 0;
  bool pinned_on_[kServers] = {};
};

}  // namespace ballast::sim
