#include "ballast/tests/sim/schedule.h"

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ballast/tests/sim/sim_server.h"

namespace ballast::sim {
namespace {

constexpr int kFaultyEvents = 400;
constexpr int kFaultyEventsEveryK = 900;  // until a restore is followed by pins, and these by a loss
// Ten times what the slowest fault-free ending needs.
constexpr int kHealedEvents = 6000;
constexpr size_t kInFlightMax = 96;
constexpr size_t kGroupsMax = 8;

struct Envelope {
  bool to_server;
  Response message;  // a request has no status and body yet
};

class Schedule {
 public:
  explicit Schedule(const ScheduleOptions& options)
      : options_(options),
        random_(options.seed),
        calm_(uint64_t{1} << random_.Below(4)),
        oracle_(options.bug == ClientBug::kRestartsInEpoch ? 2 : 1) {
    BeginWorld(options.every_k ? 1 + random_.Below(3) : 0);
    for (int i = 0; i < kServers; ++i) {
      servers_.push_back(std::make_unique<SimServer>(i, options.bug, &random_, &oracle_));
    }
  }

  ScheduleResult Run() {
    Launch();
    const int events = options_.every_k ? kFaultyEventsEveryK : kFaultyEvents;
    for (int i = 0; i < events && GoesOn(); ++i) {
      if (!Fault()) Event();
    }
    Heal();
    const uint64_t goal = oracle_.decided() + 2;
    for (int i = 0; oracle_.decided() < goal && GoesOn(); ++i) {
      if (i == kHealedEvents) {
        oracle_.Broken(absl::StrCat("no progress: step ", oracle_.last_decided() + 1, " is not decided ", kHealedEvents,
                                    " events after the last fault"));
      }
      if (!SomeGroupIsWhole()) Launch();
      Event();
    }
    for (const auto& server : servers_) {
      tally_.decisions_lost += server->decisions_lost();
      tally_.states_lost += server->states_lost();
    }
    tally_.steps = oracle_.decided();
    tally_.skipped = oracle_.skipped();
    return {oracle_.violation(), tally_};
  }

 private:
  bool Fine() const { return oracle_.violation().empty(); }
  bool GoesOn() const { return Fine() && tally_.dead == 0; }
  bool SomeGroupIsWhole() const {
    return std::any_of(groups_.begin(), groups_.end(), [](const auto& group) { return group->all_alive(); });
  }

  void Launch() {
    GroupIntent intent;
    intent.seed = options_.seed;
    intent.group = static_cast<uint32_t>(groups_.size());
    intent.family = intent.group;
    intent.world_size = 1 + static_cast<uint32_t>(random_.Below(kWorldSizeMax));
    if (!groups_.empty() && random_.Percent(30)) intent.world_size = groups_.back()->intent().world_size;
    intent.salted = random_.Percent(15);
    if (!healed_ && random_.Percent(10))
      intent.mismatch_from = oracle_.last_decided() + 1 + static_cast<int64_t>(random_.Below(2));
    // The launcher asks the servers that it reaches for the highest counter; two launchers may see the same.
    uint64_t counter = 0;
    for (const auto& server : servers_) {
      if (server->up() && (healed_ || random_.Percent(70))) counter = std::max(counter, server->promised().counter());
    }
    intent.epoch.set_counter(counter + 1);
    intent.epoch.set_nonce(options_.bug == ClientBug::kEpochWithoutNonce ? 0 : random_.Next());
    if (!groups_.empty() && groups_.back()->intent().world_size != intent.world_size) ++tally_.resized;
    ++tally_.groups;
    groups_.push_back(std::make_unique<SimGroup>(
        std::move(intent), SimGroup::Surroundings{&random_, &oracle_, &tally_, options_.bug, options_.leave_on_error}));
    oracle_.AddGroup(&groups_.back()->intent());
  }

  // True if it used the turn.
  bool Fault() {
    const uint64_t chance = random_.Below(1000 * calm_);
    if (chance < 12) {
      SimServer& server = *servers_[random_.Below(kServers)];
      if (!server.up()) return false;
      // Mostly not before there is something to go back to.
      if (options_.every_k && oracle_.decided() < 2 && !random_.Percent(5)) return false;
      ++tally_.crashes;
      server.Crash();
    } else if (chance < 20) {
      SimGroup& group = *groups_[random_.Below(groups_.size())];
      const uint32_t rank = static_cast<uint32_t>(random_.Below(group.intent().world_size));
      if (!group.alive(rank)) return false;
      ++tally_.ranks_lost;
      group.Kill(rank);
      if (options_.bug == ClientBug::kRestartsInEpoch) group.RestartRank(rank, oracle_.last_decided() + 1);
    } else if (chance < 28 || (!SomeGroupIsWhole() && random_.Percent(8))) {
      if (groups_.size() >= kGroupsMax) return false;
      Launch();
    } else if (random_.Percent(10)) {
      for (const auto& server : servers_) {
        if (server->up()) continue;
        Restart(server.get());
        return true;
      }
      return false;
    } else {
      return false;
    }
    return true;
  }

  void Restart(SimServer* server) {
    server->Restart();
    CheckApart();
  }

  void Heal() {
    healed_ = true;
    for (const auto& server : servers_) {
      if (!server->up() && Fine()) Restart(server.get());
    }
    for (Envelope& late : late_) flying_.push_back(std::move(late));
    late_.clear();
  }

  void Event() {
    const uint64_t chance = random_.Below(100);
    if (chance < 60 && !flying_.empty()) return Deliver();
    if (chance < 82 || flying_.empty()) TickSomebody();
    SimServer& server = *servers_[random_.Below(kServers)];
    if (!server.up()) return;
    std::vector<Response> answers;
    if (server.syncing()) server.FinishSync(&answers);
    if (server.pinning() && random_.Percent(12)) server.FinishPin(&answers);
    if (server.receiving() && random_.Percent(50)) server.FinishPush(&answers);
    Send(std::move(answers));
  }

  void TickSomebody() {
    // The newest groups have most to say.
    size_t which = groups_.size() - 1;
    while (which > 0 && (!groups_[which]->all_alive() ? random_.Percent(90) : random_.Percent(25))) --which;
    SimGroup& group = *groups_[which];
    const uint32_t rank = static_cast<uint32_t>(random_.Below(group.intent().world_size));
    if (!group.alive(rank)) return;
    std::vector<Request> requests;
    group.Tick(rank, /*timeout=*/random_.Percent(20), &requests);
    for (Request& request : requests) Fly({true, Response{std::move(request), absl::OkStatus(), {}}});
  }

  void Deliver() {
    if (!late_.empty() && random_.Percent(4)) {
      const size_t which = random_.Below(late_.size());
      std::swap(late_[which], late_.back());
      flying_.push_back(std::move(late_.back()));
      late_.pop_back();
    }
    std::swap(flying_[random_.Below(flying_.size())], flying_.back());
    const Envelope envelope = std::move(flying_.back());
    flying_.pop_back();
    if (!envelope.to_server) return groups_[envelope.message.request.group]->Receive(envelope.message);
    SimServer& server = *servers_[envelope.message.request.server];
    if (!server.up()) return;
    std::vector<Response> answers;
    server.Handle(envelope.message.request, &answers);
    Send(std::move(answers));
    CheckApart();
  }

  void Send(std::vector<Response> answers) {
    for (Response& answer : answers) Fly({false, std::move(answer)});
  }

  void Fly(Envelope envelope) {
    if (!healed_) {
      const uint64_t chance = random_.Below(100);
      if (chance < 6) return;
      if (chance < 12 && late_.size() < kInFlightMax) late_.push_back(envelope);
      if (chance < 8) return;
    }
    flying_.push_back(std::move(envelope));
    if (flying_.size() > kInFlightMax) flying_.erase(flying_.begin());
  }

  void CheckApart() {
    std::vector<int64_t> committed;
    for (const auto& server : servers_) {
      if (server->up() && !server->state_lost()) committed.push_back(server->committed());
    }
    oracle_.CheckApart(committed);
  }

  const ScheduleOptions options_;
  Random random_;
  const uint64_t calm_;  // the higher, the rarer are faults
  Oracle oracle_;
  Tally tally_;
  std::vector<std::unique_ptr<SimServer>> servers_;
  std::vector<std::unique_ptr<SimGroup>> groups_;
  std::vector<Envelope> flying_;
  std::vector<Envelope> late_;
  bool healed_ = false;
};

}  // namespace

ScheduleResult RunSchedule(const ScheduleOptions& options) { return Schedule(options).Run(); }

}  // namespace ballast::sim
