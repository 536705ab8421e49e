#include "ballast/tests/sim_server/change_run.h"

#include <iterator>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ballast/tests/sim_server/bits.h"
#include "ballast/tests/sim_server/change_checks.h"
#include "ballast/tests/sim_server/change_group.h"
#include "ballast/tests/sim_server/change_machines.h"

namespace ballast::sim {
namespace {

// What happens to a server before an Open.
enum class Before { kNothing, kKilled, kReplaced };

struct Change {
  std::vector<int> wanted;
  Before before = Before::kNothing;
  int server = 0;  // to which it happens; it comes back with the next change
};

using Story = std::vector<Change>;

// Each begins with the job on servers 0 and 1.
Story StoryOf(uint64_t seed) {
  const std::vector<int> all = {0, 1, 2};
  switch (seed % 4) {
    case 0:  // one joins, and one is drained
      return {Change{.wanted = all}, Change{.wanted = {1, 2}}};
    case 1:  // one takes another's place, which then comes back with what it had
      return {Change{.wanted = {0, 2}}, Change{.wanted = all}};
    case 2:  // one is left out while it is down, and comes back
      return {Change{.wanted = all, .before = Before::kKilled, .server = 1}, Change{.wanted = all}};
    default:  // one loses its disk, and another joins
      return {Change{.wanted = {0, 1}, .before = Before::kReplaced, .server = 1}, Change{.wanted = all}};
  }
}

constexpr int kOpensMax = 40;
constexpr int kStepsMax = 40;
constexpr int kTurnsForCopies = 1000;
constexpr uint64_t kOperationsOfRecovery = 30;

class Run {
 public:
  explicit Run(const ChangeRunOptions& options)
      : options_(options),
        random_(Mix(options.seed, static_cast<uint64_t>(options.cut.at), options.cut.n,
                    static_cast<uint64_t>(options.cut.server))),
        intent_{.seed = options.seed},
        checks_(&intent_, &random_),
        machines_(options.seed, options.directory, &random_,
                  [this](const auto& request, const auto& chunk) { checks_.Exported(request, chunk); }),
        group_(&intent_, &machines_, &checks_, &random_) {
    machines_.Watch([this](int server, SimCatalog::Watched write) {
      if (write == SimCatalog::Watched::kPutAll) return group_.Records(server);
      checks_.Forgets(server, &machines_.of(server));
    });
  }

  ChangeRunResult Go() {
    for (int server = 0; server < kServers; ++server) Start(server);
    Settle({0, 1}, 1 + random_.Below(4));
    const Story story = StoryOf(options_.seed);
    for (size_t i = 0; i < story.size() && checks_.kept(); ++i) {
      StartAll();
      Happen(story[i]);
      if (i == 0) BeginWindow();
      Settle(story[i].wanted, random_.Below(3));
    }
    EndWindow();
    StartAll();
    const std::vector<int>& wanted = story.back().wanted;
    Settle(wanted, 1);
    CheckEnd(wanted.size());
    for (int server = 0; server < kServers && checks_.kept(); ++server) {
      machines_.of(server).PowerCut();
      Start(server);
    }
    Settle(wanted, 0);
    CheckEnd(wanted.size());
    result_.violation = checks_.violation();
    result_.steps = static_cast<uint64_t>(group_.step() + 1);
    result_.copies = machines_.copies();
    result_.pulls = checks_.pulls();
    return result_;
  }

 private:
  void Start(int server) {
    const absl::Status started = machines_.Start(server);
    if (machines_.of(server).off()) return;
    if (!started.ok()) return checks_.Broken(absl::StrCat("server ", server, " does not start: ", started.ToString()));
    checks_.CameBack(server, &machines_.of(server));
  }
  void StartIfDown(int server) {
    while (checks_.kept() && !machines_.up(server)) {
      Start(server);
      if (machines_.of(server).off()) machines_.of(server).PowerCut();
    }
  }
  void StartAll() {
    left_out_.reset();
    for (int server = 0; server < kServers; ++server) StartIfDown(server);
  }

  void Happen(const Change& change) {
    if (change.before == Before::kNothing || !checks_.kept()) return;
    machines_.of(change.server).Kill();
    if (change.before == Before::kKilled) return;
    machines_.Replace(change.server);
    Start(change.server);
  }

  void BeginWindow() {
    for (int server = 0; server < kServers; ++server) {
      operations_[server] = machines_.of(server).disk().operations();
      writes_[server] = machines_.of(server).catalog().writes();
    }
    Machine& machine = machines_.of(options_.cut.server);
    if (options_.cut.at == CutAt::kDiskOperation) machine.PowerCutAfter(options_.cut.n);
    if (options_.cut.at == CutAt::kCatalogWrite) {
      machine.PowerCutAtCatalogWrite(options_.cut.n, SimCatalog::Count::kAll);
    }
  }
  void EndWindow() {
    for (int server = 0; server < kServers; ++server) {
      result_.disk_operations[server] = machines_.of(server).disk().operations() - operations_[server];
      result_.catalog_writes[server] = machines_.of(server).catalog().writes() - writes_[server];
      machines_.of(server).PowerCutAfter(0);
      machines_.of(server).PowerCutAtCatalogWrite(0);
    }
  }

  // The server that lost its power comes back, or stays down until the others have gone on.
  void Recover(int server) {
    Machine& machine = machines_.of(server);
    machine.PowerCut();
    result_.cut = true;
    if (random_.Percent(30)) {
      ++result_.left_out;
      left_out_ = server;
      return;
    }
    if (random_.Percent(30)) {
      machine.PowerCutAfter(1 + random_.Below(kOperationsOfRecovery));
      Start(server);
      if (!machine.off()) return;  // perhaps later
      ++result_.cuts_in_recovery;
      machine.PowerCut();
    }
    StartIfDown(server);
  }
  bool Interrupted() {
    const std::optional<int> off = machines_.Off();
    if (off.has_value()) Recover(*off);
    return off.has_value();
  }
  bool GoesOn() { return checks_.kept() && !machines_.Off().has_value(); }

  void Turns(uint64_t count) {
    for (uint64_t i = 0; i < count && GoesOn(); ++i) machines_.Turn();
    Machine& machine = machines_.of(static_cast<int>(random_.Below(kServers)));
    if (GoesOn() && machine.up() && random_.Percent(20)) checks_.PullSomething(&machine);
  }
  bool RandomStep() {
    const uint64_t chance = random_.Below(100);
    return group_.Step(chance < 6    ? ChangeGroup::Ends::kUncommitted
                       : chance < 12 ? ChangeGroup::Ends::kAbandoned
                                     : ChangeGroup::Ends::kWhole);
  }

  // Some steps go on, and more where a copy waits for the next, until nobody lacks chunks any more. False: another
  // epoch has to begin.
  bool Fill() {
    for (uint64_t steps = random_.Below(3); steps > 0 && !group_.filled(); --steps) {
      Turns(random_.Below(60));
      if (!GoesOn() || !RandomStep()) return false;
    }
    for (int steps = 0; steps < kStepsMax; ++steps) {
      int turns = 0;
      // A look costs more than a turn.
      const auto look = [&] { return ++turns == kTurnsForCopies || (turns % 16 == 0 && group_.filled()); };
      if (!machines_.Await(look)) return false;
      if (turns < kTurnsForCopies || group_.filled()) return true;
      if (!RandomStep()) return false;
    }
    checks_.Broken("chunks are not copied:" + machines_.ShowCopies());
    return false;
  }

  // Groups open the job until the servers that are up and wanted have all of it, and nobody has anything else.
  void Settle(const std::vector<int>& wanted, uint64_t steps) {
    for (int opens = 0; checks_.kept(); ++opens) {
      if (opens == kOpensMax) return checks_.Broken(absl::StrCat(kOpensMax, " epochs brought the job to no rest"));
      if (Interrupted()) continue;
      const ChangeGroup::Opened opened = group_.Open(wanted);
      const bool others_went_on = opened == ChangeGroup::Opened::kYes && Fill();
      if (left_out_.has_value() && (others_went_on || opened == ChangeGroup::Opened::kWaits)) {
        StartIfDown(*std::exchange(left_out_, std::nullopt));
        continue;
      }
      if (opened == ChangeGroup::Opened::kWaits) return checks_.Broken("a group waits for a server that is there");
      if (!others_went_on || group_.fills()) continue;
      bool whole = true;
      for (; steps > 0 && whole; --steps) whole = group_.Step(ChangeGroup::Ends::kWhole);
      if (whole && machines_.Drain()) return CountChunks();
    }
  }

  void CountChunks() {
    for (const int server : group_.members()) {
      const v1::GetServerStatusResponse status = machines_.of(server).server().Status();
      const uint64_t had = std::exchange(chunks_[server], status.jobs(0).chunks());
      if (had > chunks_[server]) ++result_.given_up;
    }
  }

  void CheckEnd(size_t wanted) {
    if (!checks_.kept()) return;
    for (const v1::Shard& shard : group_.table().shards()) {
      if (shard.holders_size() == 2 && shard.fillers().empty() && group_.members().size() == wanted) continue;
      return checks_.Broken(absl::StrCat("a shard of the last table: ", shard.ShortDebugString()));
    }
    for (const int server : group_.members()) {
      checks_.Holds(server, &machines_.of(server), group_.plan(), group_.step(), TakenBy(server));
    }
  }
  ChangeChecks::Taken TakenBy(int server) {
    std::vector<uint64_t> chunks;
    for (const model::Chunk& chunk : group_.plan().layout().chunks()) {
      if (group_.plan().Has(*group_.plan().FindMember(ServerName(server)), chunk.index)) chunks.push_back(chunk.index);
    }
    const auto [taken, first] = options_.taken->try_emplace({server, chunks});
    if (!first) return taken->second;
    Machine fresh(server, options_.seed, options_.directory);
    if (const absl::Status started = fresh.Start(machines_.OptionsOf(server)); !started.ok()) {
      checks_.Broken(absl::StrCat("a fresh server does not start: ", started.ToString()));
      return {};
    }
    group_.OpenOn(&fresh);
    taken->second = ChangeChecks::TakenBy(fresh.server());
    // Where DRAM is short, more or less of the state lies there, as places were free.
    if (machines_.little_dram()) taken->second.erase("dram");
    return taken->second;
  }

  const ChangeRunOptions options_;
  Random random_;
  GroupIntent intent_;
  ChangeChecks checks_;
  ChangeMachines machines_;
  ChangeGroup group_;
  std::optional<int> left_out_;
  uint64_t operations_[kServers] = {};
  uint64_t writes_[kServers] = {};
  uint64_t chunks_[kServers] = {};
  ChangeRunResult result_;
};

}  // namespace

ChangeRunResult RunChanges(const ChangeRunOptions& options) {
  const v1::MomentFormat formats[] = {v1::MOMENT_FORMAT_F32, v1::MOMENT_FORMAT_BF16, v1::MOMENT_FORMAT_I8};
  BeginWorld(formats[Mix(options.seed, 3) % std::size(formats)], /*large=*/false, /*pin_interval=*/0,
             /*table=*/false);
  return Run(options).Go();
}

}  // namespace ballast::sim
