#include "ballast/tests/sim_server/server_schedule.h"

#include <algorithm>
#include <memory>
#include <set>
#include <utility>
#include <variant>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ballast/proto/base/status.h"
#include "ballast/tests/sim_server/bits.h"
#include "ballast/tests/sim_server/checker.h"
#include "ballast/tests/sim_server/disk_faults.h"
#include "ballast/tests/sim_server/machine.h"

namespace ballast::sim {
namespace {

constexpr int kFaultyEvents = 600;
// Ten times what the slowest fault-free ending needs.
constexpr int kHealedEvents = 20000;
// A look at all servers costs more than an event.
constexpr int kEventsBetweenLooks = 16;
constexpr size_t kInFlightMax = 96;
constexpr size_t kGroupsMax = 8;
// Some schedules go on for so many steps that logs roll and are cut.
constexpr uint64_t kLongPercent = 2;
constexpr uint64_t kLongSteps = 40;
constexpr uint64_t kLargePercent = 12;
constexpr uint64_t kCutAfterPreparedPercent = 4;

// Indices of RequestBody's alternatives.
constexpr size_t kOpen = 1, kPush = 2, kCommit = 5, kUnpin = 7;

struct Envelope {
  bool to_server;
  Response message;  // a request has no status and body yet
};

class Schedule {
 public:
  explicit Schedule(const ServerScheduleOptions& options)
      : options_(options),
        random_(Mix(options.seed,
                    static_cast<uint64_t>(options.faults) + (options.every_k ? 16 : 0) + (options.goes_on ? 32 : 0))),
        calm_(uint64_t{1} << random_.Below(4)),
        oracle_(1) {
    const v1::MomentFormat formats[] = {v1::MOMENT_FORMAT_F32, v1::MOMENT_FORMAT_BF16, v1::MOMENT_FORMAT_I8};
    const v1::MomentFormat format = formats[random_.Below(3)];
    const bool large = random_.Percent(kLargePercent);
    BeginWorld(format, large, options.every_k ? 1 + random_.Below(4) : 0, options.goes_on);
    checker_ = std::make_unique<Checker>(&oracle_, &random_, &tally_,
                                         options.faults == Faults::kIoErrors || options.faults == Faults::kFullDisk);
    for (int i = 0; i < kServers; ++i) {
      machines_.push_back(std::make_unique<Machine>(i, random_.Next(), options.directory));
      disk_faults_.emplace_back(options.faults, machines_.back().get(), &random_, &tally_);
    }
  }

  ServerScheduleResult Run() {
    for (size_t i = 0; i < kServers; ++i) Start(i);
    Launch();
    // Before there is something to go back to, a server that loses its state ends the job.
    for (int i = 0; options_.every_k && oracle_.decided() < 2 && i < kHealedEvents && GoesOn(); ++i) {
      if (!SomeGroupIsWhole()) Launch();
      Event();
    }
    for (int i = 0; i < kFaultyEvents && GoesOn(); ++i) {
      if (!Fault()) Event();
    }
    Heal();
    // Sometimes a further group comes after the faults, and finds the pins of older groups.
    bool another = random_.Percent(50);
    uint64_t goal = oracle_.decided() + (random_.Percent(kLongPercent) ? kLongSteps : 2);
    int since = 0;
    for (uint64_t last = oracle_.decided(); oracle_.decided() < goal && GoesOn(); ++since) {
      if (oracle_.decided() > last) since = 0, last = oracle_.decided();
      if (since == kHealedEvents) {
        oracle_.Broken(absl::StrCat("no progress: step ", oracle_.last_decided() + 1, " is not decided ", kHealedEvents,
                                    " events after the last fault"));
      }
      if (!SomeGroupIsWhole()) Launch();
      if (since % kEventsBetweenLooks == 0) RestartAiling();
      Event();
      if (oracle_.decided() < goal || !std::exchange(another, false)) continue;
      Launch();
      goal += 2;
    }
    if (GoesOn()) CheckAtTheEnd();
    tally_.group.steps = oracle_.decided();
    tally_.group.skipped = oracle_.skipped();
    if (refused_) ++tally_.refused;
    return {oracle_.violation(), tally_, trace_};
  }

 private:
  bool GoesOn() const { return oracle_.violation().empty() && !refused_ && tally_.group.dead == 0; }
  bool SomeGroupIsWhole() const {
    return std::any_of(groups_.begin(), groups_.end(), [](const auto& group) { return group->all_alive(); });
  }
  void Trace(uint64_t what, uint64_t more = 0) { trace_ = Mix(trace_, what, more); }

  void Launch() {
    GroupIntent intent;
    intent.seed = options_.seed;
    intent.group = static_cast<uint32_t>(groups_.size());
    intent.world_size = 1 + static_cast<uint32_t>(random_.Below(kWorldSizeMax));
    if (!groups_.empty() && random_.Percent(30)) intent.world_size = groups_.back()->intent().world_size;
    intent.salted = random_.Percent(15);
    intent.family = intent.group;
    if (options_.goes_on) GoOn(&intent);
    if (!healed_ && random_.Percent(5))
      intent.mismatch_from = oracle_.last_decided() + 1 + static_cast<int64_t>(random_.Below(2));
    uint64_t counter = 0;
    for (const auto& machine : machines_) {
      if (!machine->up() || (!healed_ && random_.Percent(30))) continue;
      const auto job = machine->Describe();
      if (job.ok()) counter = std::max(counter, job->promised().counter());
    }
    intent.epoch.set_counter(counter + 1);
    intent.epoch.set_nonce(random_.Next());
    if (!groups_.empty() && groups_.back()->intent().world_size != intent.world_size) ++tally_.group.resized;
    ++tally_.group.groups;
    groups_.push_back(std::make_unique<SimGroup>(
        std::move(intent), SimGroup::Surroundings{.random = &random_, .oracle = &oracle_, .tally = &tally_.group}));
    oracle_.AddGroup(&groups_.back()->intent());
    checker_->AddGroup(&groups_.back()->intent());
  }

  // Mostly the group at work goes on, as far as it can.
  void GoOn(GroupIntent* next) {
    next->one_attempt = random_.Percent(80);
    if (groups_.empty() || !random_.Percent(70)) return;
    const GroupIntent& now = groups_.back()->intent();
    if (!now.one_attempt) return;
    next->one_attempt = true;
    next->family = now.family;
    next->world_size = now.world_size;
    next->salted = now.salted;
    ++tally_.went_on;
  }

  // True if it used the turn.
  bool Fault() {
    const uint64_t chance = random_.Below(1000 * calm_);
    const auto which = static_cast<size_t>(random_.Below(kServers));
    Machine& machine = *machines_[which];
    // Mostly not before there is something to go back to.
    if (options_.every_k && chance < 26 && oracle_.decided() < 2 && !random_.Percent(5)) return false;
    if (chance < 8) {
      if (!machine.up()) return false;
      PowerCut(which);
    } else if (chance < 16) {
      // If the machine is down, the cut hits its recovery.
      machine.PowerCutAfter(1 + random_.Below(machine.up() ? 80 : 30));
    } else if (chance < 18) {
      machine.PowerCutAtCatalogWrite(1 + random_.Below(6));
    } else if (chance < 24) {
      if (!machine.up()) return false;
      ++tally_.kills;
      machine.Kill();
    } else if (chance < 26) {
      if (!machine.up()) return false;
      ++tally_.stops;
      Send(machine.TakeAnswers());
      machine.Stop();
      After(which);
    } else if (chance < 33) {
      SimGroup& group = *groups_[random_.Below(groups_.size())];
      const uint32_t rank = static_cast<uint32_t>(random_.Below(group.intent().world_size));
      if (!group.alive(rank)) return false;
      ++tally_.group.ranks_lost;
      group.Kill(rank);
    } else if (chance < (options_.goes_on ? 60 : 39) || (!SomeGroupIsWhole() && random_.Percent(8))) {
      if (groups_.size() >= kGroupsMax) return false;
      Launch();
    } else if (chance < 120) {
      return disk_faults_[which].Happen();
    } else if (random_.Percent(4)) {
      if (!machine.up()) {
        Start(which);
      } else {
        RestartAiling();
      }
    } else {
      return false;
    }
    Trace(1, chance);
    return true;
  }

  void PowerCut(size_t which) {
    ++tally_.power_cuts;
    machines_[which]->PowerCut();
  }

  // After anything that a server did: its answers, and whether the power failed on the way.
  void After(size_t which) {
    Machine& machine = *machines_[which];
    const bool said_prepared = Send(machine.TakeAnswers());
    if (machine.off()) {
      ++tally_.cuts_in_operations;
      return PowerCut(which);
    }
    // The worst moment for what was said too early.
    const bool too_early = options_.every_k && oracle_.decided() < 2;
    if (said_prepared && !healed_ && !too_early && random_.Percent(kCutAfterPreparedPercent)) PowerCut(which);
  }

  void Start(size_t which) {
    Machine& machine = *machines_[which];
    if (disk_faults_[which].NeedsPowerCut()) PowerCut(which);
    const absl::Status status = machine.Start(&random_);
    Trace(2, static_cast<uint64_t>(status.code()));
    if (machine.off()) {
      ++tally_.cuts_in_recovery;
      return PowerCut(which);
    }
    if (disk_faults_[which].Explains(status, &refused_)) return;
    if (!status.ok()) return oracle_.Broken(absl::StrCat("server ", which, " does not start: ", status.ToString()));
    const auto job = machine.Describe();
    if (job.ok() && job->state_lost()) ++tally_.states_lost;
    if (job.ok() && job->state_lost() && !options_.every_k) {
      // A request for the job returns the reason.
      const absl::Status cause = machine.Cause();
      if (disk_faults_[which].Explains(cause, &refused_)) return machine.Kill();
      return oracle_.Broken(absl::StrCat("server ", which, " lost its state: ", cause.ToString()));
    }
    ++tally_.recoveries;
    Check(which);
  }

  void Check(size_t which) {
    const absl::Status checked = checker_->CheckServer(static_cast<int>(which), machines_[which].get());
    if (machines_[which]->off()) return After(which);
    if (disk_faults_[which].Explains(checked, &refused_)) return;
    if (!checked.ok()) oracle_.Broken(absl::StrCat("server ", which, ": ", checked.ToString()));
  }

  // Restarts servers whose job has failed, as the job's error asks.
  void RestartAiling() {
    for (size_t which = 0; which < machines_.size() && GoesOn(); ++which) {
      Machine& machine = *machines_[which];
      if (machine.up()) {
        const auto job = machine.Describe();
        if (job.ok()) continue;
        ++tally_.jobs_failed;
        machine.Kill();
      } else if (!healed_) {
        continue;
      }
      Start(which);
    }
  }

  void Heal() {
    healed_ = true;
    for (size_t which = 0; which < machines_.size() && GoesOn(); ++which) {
      machines_[which]->PowerCutAfter(0);
      machines_[which]->catalog().CrashAfter(0, [] {});
      disk_faults_[which].End();
    }
    RestartAiling();
    for (Envelope& late : late_) flying_.push_back(std::move(late));
    late_.clear();
  }

  void Event() {
    const uint64_t chance = random_.Below(100);
    if (chance < 35 && !flying_.empty()) return Deliver();
    if (chance < 55 || (chance < 60 && flying_.empty())) return TickSomebody();
    const auto which = static_cast<size_t>(random_.Below(kServers));
    Machine& machine = *machines_[which];
    if (!machine.up()) return;
    if (scrubs_) {
      machine.ScrubNext();
      ++tally_.scrubs;
    }
    if (chance < 78) {
      if (!machine.RunTask(&random_)) machine.PumpOne(&random_);
    } else if (chance < 97) {
      machine.PumpOne(&random_);
    } else if (chance < 99) {
      checker_->PullSomething(static_cast<int>(which), &machine);
    } else {
      ++tally_.budget_changes;
      machine.ChangeBudget(&random_, [this](uint64_t moves) { tally_.moves_begun += moves; });
    }
    After(which);
    if (const absl::Status wrong = checker_->TakeError();
        !wrong.ok() && !disk_faults_[which].Explains(wrong, &refused_))
      oracle_.Broken(std::string(wrong.message()));
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
    for (Request& request : requests) {
      checker_->Sent(request);
      Fly({true, Response{std::move(request), absl::OkStatus(), {}}});
    }
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
    const Request& request = envelope.message.request;
    Trace(3, request.body.index() + 8 * static_cast<uint64_t>(request.server) + 64 * envelope.to_server +
                 128 * static_cast<uint64_t>(envelope.message.status.code()));
    if (!envelope.to_server) return groups_[request.group]->Receive(envelope.message);
    const auto which = static_cast<size_t>(request.server);
    if (!machines_[which]->up()) return;
    const bool unpins = options_.every_k && request.body.index() == kUnpin;
    const std::set<int64_t> own = unpins ? OwnPins(which) : std::set<int64_t>();
    machines_[which]->Handle(request, /*damage=*/!healed_ && random_.Percent(1), &random_);
    if (unpins && !machines_[which]->off()) {
      const std::set<int64_t> left = OwnPins(which);
      for (const int64_t version : own) {
        if (!left.contains(version)) oracle_.GivenUp(version);
      }
    }
    After(which);
    if (request.body.index() == kOpen || request.body.index() == kCommit) CheckApart();
  }

  // Versions that the server keeps by itself.
  std::set<int64_t> OwnPins(size_t which) {
    const auto job = machines_[which]->Describe();
    if (!job.ok()) return {};
    return {job->automatic_versions().begin(), job->automatic_versions().end()};
  }

  // Sends the answers. True if any answer says that a step is prepared.
  bool Send(std::vector<Response> answers) {
    bool prepared = false;
    for (Response& answer : answers) {
      if (IsLost(answer)) continue;
      checker_->Answered(answer);
      const auto* sealed = std::get_if<std::shared_ptr<const v1::SealResponse>>(&answer.body);
      prepared = prepared || (sealed != nullptr && *sealed != nullptr && (*sealed)->has_prepared());
      Fly({false, std::move(answer)});
    }
    return prepared;
  }

  // Errors that a real client answers with patience, or a person with a restart.
  bool IsLost(const Response& answer) {
    const std::string reason = model::ReasonOf(answer.status);
    if (reason == model::kServerDown) return true;
    if (answer.request.body.index() == kPush && absl::IsResourceExhausted(answer.status) && reason == model::kBudget) {
      ++tally_.short_of_memory;
      return true;
    }
    return !answer.status.ok() &&
           disk_faults_[static_cast<size_t>(answer.request.server)].Explains(answer.status, &refused_);
  }

  void Fly(Envelope envelope) {
    if (!healed_) {
      const uint64_t chance = random_.Below(100);
      if (chance < 4) return;
      if (chance < 9 && late_.size() < kInFlightMax) late_.push_back(envelope);
      if (chance < 6) return;
    }
    flying_.push_back(std::move(envelope));
    if (flying_.size() > kInFlightMax) flying_.erase(flying_.begin());
  }

  void CheckApart() {
    std::vector<int64_t> committed;
    for (const auto& machine : machines_) {
      if (!machine->up()) continue;
      if (const auto job = machine->Describe(); job.ok() && !job->state_lost()) committed.push_back(job->committed());
    }
    oracle_.CheckApart(committed);
  }

  void CheckAtTheEnd() {
    for (size_t which = 0; which < machines_.size() && GoesOn(); ++which) {
      Machine& machine = *machines_[which];
      if (!machine.up()) continue;
      for (bool busy = true; busy;) {
        busy = machine.RunTask(&random_);
        busy = machine.PumpOne(&random_) || busy;
      }
      (void)machine.TakeAnswers();
      Check(which);
      // And once more as a restart finds it.
      if (!GoesOn() || !machine.up()) continue;
      if (random_.Percent(50)) {
        machine.PowerCut();
      } else {
        machine.Kill();
      }
      Start(which);
    }
    CheckApart();
  }

  const ServerScheduleOptions options_;
  Random random_;
  const uint64_t calm_;                         // the higher, the rarer are faults
  const bool scrubs_ = options_.seed % 8 == 5;  // servers scrub beside everything else
  Oracle oracle_;
  ServerTally tally_;
  std::unique_ptr<Checker> checker_;
  std::vector<std::unique_ptr<Machine>> machines_;
  std::vector<DiskFaults> disk_faults_;
  std::vector<std::unique_ptr<SimGroup>> groups_;
  std::vector<Envelope> flying_;
  std::vector<Envelope> late_;
  bool healed_ = false;
  bool refused_ = false;
  uint64_t trace_ = 0;
};

}  // namespace

void ServerTally::Add(const ServerTally& other) {
  group.Add(other.group);
  moments_written += other.moments_written;
  power_cuts += other.power_cuts;
  cuts_in_operations += other.cuts_in_operations;
  cuts_in_recovery += other.cuts_in_recovery;
  kills += other.kills;
  stops += other.stops;
  recoveries += other.recoveries;
  chunks_checked += other.chunks_checked;
  without_copies += other.without_copies;
  chunks_ahead += other.chunks_ahead;
  pulls_checked += other.pulls_checked;
  budget_changes += other.budget_changes;
  moves_begun += other.moves_begun;
  jobs_failed += other.jobs_failed;
  short_of_memory += other.short_of_memory;
  rotten_bits += other.rotten_bits;
  scrubs += other.scrubs;
  refused += other.refused;
  states_lost += other.states_lost;
  went_on += other.went_on;
}

ServerScheduleResult RunServerSchedule(const ServerScheduleOptions& options) { return Schedule(options).Run(); }

}  // namespace ballast::sim
