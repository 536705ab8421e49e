// A trainer group of a schedule: it claims, fences, chooses base and table with the shipped functions, writes the
// table, opens and trains; and while it trains, it does so again when a server is silent, the wish differs or fillers
// are full, and the servers' answers say that the table would change.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "ballast/proto/model/members.h"
#include "ballast/tests/sim_members/bugs.h"
#include "ballast/tests/sim_members/net.h"
#include "ballast/tests/sim_members/server.h"

namespace ballast::sim_members {

// Counts of events in a schedule, or in many.
struct Tally {
  uint64_t groups = 0, stale = 0, steps = 0;
  uint64_t crashes = 0, disks_lost = 0, damages = 0, lost = 0;
  uint64_t tables = 0;        // written
  uint64_t left_out = 0;      // ... without a member that did not answer
  uint64_t begun = 0;         // ... that let somebody fill
  uint64_t ended = 0;         // ... that let nobody fill any more
  uint64_t continued = 0;     // epochs of a group that was at work
  uint64_t adopted = 0;       // steps decided by a fence
  uint64_t adopted_some = 0;  // ... from the answers of some members
  uint64_t claims_lost = 0, writes_lost = 0, drops = 0;
  uint64_t imports = 0, late_imports = 0, passed_over = 0;

  void Add(const Tally& other);
};

struct Around {
  Random* random;
  Oracle* oracle;
  Net* net;
  Key* key;
  const Wish* wish;
  std::vector<std::unique_ptr<Server>>* servers;
  Tally* tally;
  // The key has another table. `left_out`: a member that did not answer is not in it.
  std::function<void(bool left_out)> table_written;
  Bug bug = Bug::kNone;
  // An error that no fault explains ends the group, not the schedule: a seeded bug has to break a promise.
  bool leave_on_error = false;
};

class Group {
 public:
  Group(Intent intent, const Around& around);

  const Intent& intent() const { return intent_; }
  bool dead() const { return phase_ == Phase::kDead; }
  bool training() const { return phase_ == Phase::kTrain || phase_ == Phase::kLook; }
  // Some member has not answered the Open of the newest epoch.
  bool opening() const {
    return phase_ == Phase::kTrain &&
           std::any_of(std::begin(opens_), std::end(opens_), [](Sent sent) { return sent == Sent::kYes; });
  }
  void Kill() { phase_ = Phase::kDead; }
  void Tick(bool timeout);

 private:
  enum class Phase { kRead, kClaim, kFence, kWrite, kTrain, kLook, kDead };
  using Answers = std::map<int, v1::GetJobResponse>;  // by server
  enum class Sent : uint8_t { kNo, kYes, kDone };
  struct Push {
    uint32_t rank;
    v1::SliceKind kind;
    uint32_t slice;
    Sent sent[kServers] = {};
  };

  // Only a call of the session's router shows that the server is not silent.
  enum class By { kRouter, kKeeper };
  // Another disk under the name, or one that knows no promise: as if the member did not answer.
  static bool IsOtherServer(const absl::Status& status);
  static absl::Status OtherServer();
  // A server refuses what is meant for another one (services/gateway/gate.cc).
  bool Admits(const Server& target, By by, uint64_t disk) const {
    return by == By::kKeeper || target.disk() == disk || around_.bug == Bug::kBelieve;
  }
  uint64_t DiskOf(int server) const;  // in the open epoch
  // Runs `run` at the server; its result, unless it has to wait, comes back to `reply`.
  template <typename T>
  void Call(int server, std::function<services::Outcome<T>(Server&)> run, std::function<void(absl::StatusOr<T>)> reply,
            By by = By::kRouter);
  std::string Name() const { return intent_.Name(); }
  std::string GroupBytes() const { return std::string(4, static_cast<char>('a' + intent_.group)); }

  // group_members.cc: from the claim to the Open.
  void Again();
  void ReadKey();
  const v1::OpenRequest* NewestOpen() const;  // null: no server has one
  void GoBlind();
  void OnRead(const Key& key);
  void Claim(const Key& key);
  v1::FenceRequest FenceOf(const v1::Epoch& epoch) const;
  void Fence(bool timeout);
  void TryResolve();
  std::vector<v1::GetJobResponse> AnswersOfFence() const;
  v1::Table Plan(const v1::Table& now, const model::Found& found, const Answers& answers) const;
  void Change(const model::Found& found);
  void Write(uint64_t revision);
  void Begin();
  bool Wanted(int server) const;

  // group_keeper.cc: whether the servers have to change.
  bool ShouldLook();
  void BeginLook();
  void Look(bool timeout);
  void TryLook();
  std::string Asked() const;
  int patience_max() const { return around_.net->healed() ? 12 : 6; }

  // group_steps.cc
  void Train(bool timeout);
  bool Waits(int server) const;
  void StartStep(int64_t step);
  void StartAttempt(uint32_t rank);
  void SendOpen(int server);
  void SendCommit(int server);
  void SendPush(Push* push, int server);
  void SendSeal(uint32_t rank, int server);
  void OnSeal(uint32_t rank, int server, const v1::SealResponse& response);
  void Decide(const v1::Decision& decision);
  void OnError(int server, const absl::Status& status, Sent* sent);
  std::vector<int> MemberServers() const;

  const Intent intent_;
  const Around around_;
  Phase phase_ = Phase::kRead;
  bool in_session_ = false;
  uint64_t call_ = 0;  // answers to older calls of the key count no more
  int patience_ = 0;
  int stalled_ = 0;  // timeouts in this step
  bool waits_ = false;
  bool blind_ = false;  // Bug::kBlind: this epoch is not in the key

  v1::Epoch epoch_;  // claimed, perhaps not open yet
  uint64_t revision_ = 0;
  v1::Table table_;  // of the claim
  std::optional<v1::Table> early_;
  Answers answers_;
  std::optional<model::Found> found_;
  v1::Table next_;

  // Of a look.
  std::set<int> silent_;  // members that did not answer for failover_after; nobody waits for them
  Answers seen_;
  std::string asked_, considered_;  // Asked() then, and when there was nothing to change

  // Of the open epoch.
  std::shared_ptr<const v1::OpenRequest> open_;
  std::shared_ptr<const model::EpochPlan> plan_;
  int64_t step_ = -1;
  std::vector<uint64_t> attempts_;
  std::vector<Push> pushes_;
  std::vector<bool> sealing_;
  Sent opens_[kServers] = {};
  Sent commits_[kServers] = {};
  Sent seals_[2][kServers] = {};
  int silence_[kServers] = {};  // timeouts in a row
  std::optional<v1::PreparedRecord> prepared_[kServers];
  std::map<int, uint64_t> unfilled_;
  std::optional<v1::Decision> last_;
  std::shared_ptr<const v1::CommitRequest> commit_;
};

template <typename T>
void Group::Call(int server, std::function<services::Outcome<T>(Server&)> run,
                 std::function<void(absl::StatusOr<T>)> reply, By by) {
  around_.net->Post([this, server, by, disk = DiskOf(server), run = std::move(run), reply = std::move(reply)] {
    Server& target = *(*around_.servers)[static_cast<size_t>(server)];
    if (!target.up()) return;
    services::Outcome<T> outcome = Admits(target, by, disk) ? run(target) : OtherServer();
    if (outcome.ok() && !outcome->has_value()) return;
    absl::StatusOr<T> result = outcome.ok() ? absl::StatusOr<T>(**std::move(outcome)) : outcome.status();
    around_.net->Post([this, server, by, reply, result = std::move(result)] {
      if (dead()) return;
      if (by == By::kRouter && !IsOtherServer(result.status())) silence_[server] = 0;
      reply(result);
    });
  });
}

}  // namespace ballast::sim_members
