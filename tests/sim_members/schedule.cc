#include "ballast/tests/sim_members/schedule.h"

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

namespace ballast::sim_members {
namespace {

constexpr int kFaultyEvents = 700;
constexpr int kHealedEvents = 40000;
constexpr size_t kGroupsMax = 8;

class Schedule {
 public:
  explicit Schedule(const ScheduleOptions& options)
      : options_(options), random_(options.seed), calm_(uint64_t{1} << random_.Below(4)), net_(&random_) {
    for (int i = 0; i < kServers; ++i) {
      servers_.push_back(std::make_unique<Server>(i, random_.Next(), options.bug, &random_, &oracle_));
    }
    wish_.replicas = random_.Percent(75) ? 2 : 1;
    strict_ = wish_.replicas == 2;
    rough_ = Mix(options.seed, 45) % 4 == 0;
    hasty_ = Mix(options.seed, 46) % 4 == 0;
    if (hasty_) net_.Linger();
    const int founders = 2 + static_cast<int>(random_.Below(2));
    for (int i = 0; i < founders; ++i) wish_.servers.push_back(i);
    std::vector<v1::Member> members;
    for (const int server : wish_.servers) {
      v1::Member& member = members.emplace_back();
      member.set_server_id(ServerName(server));
      member.set_weight(1);
      member.set_disk(servers_[static_cast<size_t>(server)]->disk());
    }
    // Three shards of a chunk each, or two, of which one has two chunks that are filled one by one.
    const std::vector<uint64_t> elements = model::ShardElements(JobLayout(), random_.Percent(50) ? 3 : 2);
    key_.revision = 1;
    key_.table =
        model::FirstTable({.servers = members, .replicas = wish_.replicas, .shard_elements = elements}, v1::Epoch());
    around_ = {&random_,    &oracle_,
               &net_,       &key_,
               &wish_,      &servers_,
               &tally_,     [this](bool left_out) { Written(left_out); },
               options.bug, options.leave_on_error};
  }

  ScheduleResult Run() {
    Launch();
    for (int i = 0; i < kFaultyEvents && GoesOn(); ++i) {
      if (!Fault()) Event();
    }
    Heal();
    const int64_t goal = oracle_.last() + 2;
    for (int i = 0; GoesOn() && !(oracle_.last() >= goal && Settled()); ++i) {
      if (i == kHealedEvents) {
        oracle_.Broken(absl::StrCat("no progress: step ", oracle_.last(), " of ", goal, " is decided, and ", Why(),
                                    ", ", kHealedEvents, " events after the last fault"));
      }
      if (std::none_of(groups_.begin(), groups_.end(), [](const auto& group) { return !group->dead(); })) Launch();
      Event();
    }
    for (const auto& server : servers_) {
      tally_.imports += server->imports();
      tally_.late_imports += server->late_imports();
      tally_.passed_over += server->passed_over();
    }
    tally_.steps = static_cast<uint64_t>(oracle_.last() + 1);
    return {oracle_.violation(), tally_};
  }

 private:
  bool GoesOn() const { return oracle_.violation().empty() && tally_.lost == 0; }

  void Launch() {
    ++tally_.groups;
    Intent intent{options_.seed, static_cast<uint32_t>(groups_.size()), 1 + static_cast<uint32_t>(random_.Below(2))};
    groups_.push_back(std::make_unique<Group>(intent, around_));
  }

  Server& Some() { return *servers_[random_.Below(kServers)]; }

  // True if it used the turn.
  bool Fault() {
    if (rough_ && RoughFault()) return true;
    if (hasty_ && HastyFault()) return true;
    const uint64_t chance = random_.Below(1000 * calm_);
    if (chance < 8) {
      Server& server = Some();
      if (!server.up()) return false;
      Crash(&server, /*loses_all=*/false);
    } else if (chance < 11) {
      LoseDisk();
    } else if (chance < 16) {
      if (groups_.size() >= kGroupsMax) return false;
      if (random_.Percent(60)) groups_.back()->Kill();
      Launch();
    } else if (chance < 24) {
      ChangeWish();
    } else if (damages_ && chance < 32) {
      return Damage();
    } else if (random_.Percent(hasty_ ? 1 : 8)) {
      for (const auto& server : servers_) {
        if (server->up() || server->gone()) continue;
        Restart(server.get());
        return true;
      }
      return false;
    } else {
      return false;
    }
    return true;
  }

  // Aims at what is not durable: syncs are late, and who crashes loses all that was not synced.
  bool RoughFault() {
    const uint64_t chance = random_.Below(1000 * calm_);
    if (chance < 12) {
      Server& server = Some();
      if (!server.up() || !server.has_unsynced()) return false;
      Crash(&server, /*loses_all=*/true);
    } else if (chance < 15) {
      for (const auto& server : servers_) {
        if (server->up()) Crash(server.get(), /*loses_all=*/true);
      }
      if (random_.Percent(50)) LoseDisk();
    } else if (chance < 30) {
      return TakeBackWish();
    } else if (chance < 36) {
      if (groups_.size() >= kGroupsMax) return false;
      Launch();
    } else {
      return false;
    }
    return true;
  }

  // Aims at Opens that come when a newer group has fenced, and at a step that all members but one have prepared. A
  // group ends there; the next one gives the step up, and ends while its Opens are on their way; the one after that
  // hears only who has the step.
  bool HastyFault() {
    Group& newest = *groups_.back();
    if (groups_.size() >= kGroupsMax || !newest.training() || !random_.Percent(30)) return false;
    const bool gives_up = groups_.size() == gives_up_;
    Server* const lacks = LacksPrepared();
    if (lacks == nullptr || newest.opening() != gives_up) return false;
    if (gives_up) {
      net_.Delay();
      if (random_.Percent(80)) Crash(lacks, /*loses_all=*/false);
    }
    newest.Kill();
    Launch();
    if (!gives_up) gives_up_ = groups_.size();
    return true;
  }

  // The only member, if there is one, that has not prepared the step that the others have.
  Server* LacksPrepared() {
    Server* lacks = nullptr;
    int prepared = 0;
    for (const v1::Member& member : key_.table.members()) {
      Server* const server = servers_[static_cast<size_t>(ServerOf(member.server_id()))].get();
      if (server->up() && server->machine().DescribeProgress().has_prepared()) {
        ++prepared;
      } else {
        lacks = server;
      }
    }
    return lacks != nullptr && lacks->up() && prepared == key_.table.members_size() - 1 ? lacks : nullptr;
  }

  void Crash(Server* server, bool loses_all) {
    ++tally_.crashes;
    had_[server->index()] = Has(*server);
    server->Crash(loses_all);
  }

  // What a server has that was down shows now.
  void Restart(Server* server) {
    server->Restart();
    CheckKept(*server);
    if (!oracle_.violation().empty() || Covered()) return;
    if (!Excused()) oracle_.Broken("after a restart no copy of some chunk is left");
    tally_.lost = 1;
  }

  // The last copy may be lost. Damage may also come after the answers that a table goes by.
  bool Excused() const { return tally_.disks_lost > 0 || tally_.damages > 0; }

  // A server's copies that count as those of a member.
  struct Had {
    int64_t last = -1;
    v1::Epoch since;
    std::vector<uint64_t> chunks;
  };
  Had Has(const Server& server) const {
    Had had{.last = oracle_.last()};
    for (const v1::Member& member : key_.table.members()) {
      if (member.server_id() != ServerName(server.index()) || member.disk() != server.disk()) continue;
      had.since = member.since();
      for (const model::Chunk& chunk : JobLayout().chunks()) {
        if (server.machine().may_import() && Counts(server, member.since(), chunk.index, had.last)) {
          had.chunks.push_back(chunk.index);
        }
      }
    }
    return had;
  }
  bool Counts(const Server& server, const v1::Epoch& since, uint64_t chunk, int64_t last) const {
    return last >= 0 && server.machine().plan() != nullptr &&
           model::Compare(server.machine().plan()->open().epoch(), since) >= 0 &&
           server.HasCopy(chunk, last, &oracle_.decision(last));
  }
  // A crash takes no copy, nor the Open that made its server a member.
  void CheckKept(const Server& server) {
    const Had had = std::exchange(had_[server.index()], Had());
    for (const uint64_t chunk : had.chunks) {
      if (!oracle_.violation().empty() || Counts(server, had.since, chunk, had.last)) continue;
      oracle_.Broken(absl::StrCat("a crash takes the copy of chunk ", chunk, " that server ",
                                  ServerName(server.index()), " had as a member"));
    }
  }

  void LoseDisk() {
    Server& server = Some();
    if (server.gone() || tally_.disks_lost >= 2) return;
    const bool member = std::any_of(key_.table.members().begin(), key_.table.members().end(),
                                    [&](const v1::Member& m) { return m.server_id() == ServerName(server.index()); });
    const bool first = tally_.disks_lost == 0;
    tally_.disks_lost += member;
    had_[server.index()] = Had();
    server.LoseDisk(/*back=*/random_.Percent(60), random_.Next());
    if (!oracle_.violation().empty() || Covered()) return;
    if (strict_ && first && !suspected_ && tally_.damages == 0) {
      oracle_.Broken("one disk less, and decided steps are lost");
    }
    tally_.lost = 1;
  }

  // Of a state of which another server has a copy.
  bool Damage() {
    Server& server = Some();
    const uint64_t chunk = random_.Below(JobLayout().chunks().size());
    if (oracle_.last() < 0 || !server.MayDamage(chunk)) return false;
    const google::protobuf::RepeatedField<uint32_t>& holders = model::ShardOf(key_.table, chunk).holders();
    const bool copied = std::any_of(holders.begin(), holders.end(), [&](uint32_t holder) {
      const Server* const other = Member(holder);
      return other != nullptr && other != &server && other->up() && Counts(holder, chunk);
    });
    if (!copied) return false;
    ++tally_.damages;
    server.Damage(chunk);
    return true;
  }

  void ChangeWish() {
    std::vector<int> servers;
    for (int i = 0; i < kServers; ++i) {
      if (!servers_[static_cast<size_t>(i)]->gone() && random_.Percent(65)) servers.push_back(i);
    }
    if (servers.size() < 2) return;
    wished_before_ = std::exchange(wish_.servers, servers);
    if (!strict_) wish_.replicas = 1 + static_cast<uint32_t>(random_.Below(2));
  }

  // Who was drained a moment ago is asked back.
  bool TakeBackWish() {
    const bool there = std::none_of(wished_before_.begin(), wished_before_.end(),
                                    [&](int server) { return servers_[static_cast<size_t>(server)]->gone(); });
    if (wished_before_.size() < 2 || !there) return false;
    std::swap(wish_.servers, wished_before_);
    return true;
  }

  void Heal() {
    net_.Heal();
    std::vector<int> there;
    for (const auto& server : servers_) {
      if (server->gone()) continue;
      if (!server->up() && GoesOn()) Restart(server.get());
      there.push_back(server->index());
    }
    // A wish may go on naming servers that are gone, if it names others too.
    if (WishedThere() == 0) wish_.servers = there;
  }

  size_t WishedThere() const {
    return static_cast<size_t>(std::count_if(wish_.servers.begin(), wish_.servers.end(), [&](int server) {
      return !servers_[static_cast<size_t>(server)]->gone();
    }));
  }

  void Event() {
    const uint64_t chance = random_.Below(100);
    if (chance < 55 && net_.Deliver()) return;
    if (chance < 75) {
      size_t which = groups_.size() - 1;
      while (which > 0 && (groups_[which]->dead() || random_.Percent(15))) --which;
      if (!groups_[which]->dead()) groups_[which]->Tick(/*timeout=*/random_.Percent(20));
      return;
    }
    Server& server = Some();
    if (!server.up()) return;
    if (!rough_ || net_.healed() || random_.Percent(30)) server.FinishSync();
    if (random_.Percent(70)) server.ApplyNext();
    if (random_.Percent(30)) server.Flush();
    if (random_.Percent(50)) server.WriteImport();
    if (random_.Percent(3)) server.MaybeSnapshot();
    if (random_.Percent(40)) Import(&server);
  }

  // Fetch and install, apart.
  void Import(Server* importer) {
    const std::optional<uint64_t> chunk = importer->Wants();
    if (!chunk.has_value()) return;
    const model::EpochPlan& plan = *importer->machine().plan();
    std::vector<int> sources;
    for (const uint32_t member : plan.holders_of(*chunk)) {
      sources.push_back(ServerOf(plan.members()[static_cast<int>(member)].server_id()));
    }
    if (options_.bug == Bug::kFillerSource) {
      for (const uint32_t member : plan.fillers_of(*chunk)) {
        sources.push_back(ServerOf(plan.members()[static_cast<int>(member)].server_id()));
      }
    }
    Server* const source = servers_[static_cast<size_t>(sources[random_.Below(sources.size())])].get();
    if (source == importer) return;
    net_.Post([this, importer, source, chunk = *chunk, life = importer->life()] {
      if (!source->up()) return;
      const std::optional<ChunkState> state = source->Export(chunk);
      if (!state.has_value()) return;
      net_.Post([importer, chunk, life, state = *state] {
        if (importer->up() && importer->life() == life) importer->Install(chunk, state);
      });
    });
  }

  void Written(bool left_out) {
    suspected_ = suspected_ || left_out;
    // A wish for servers of which only one is there has one copy.
    for (const v1::Shard& shard : key_.table.shards()) {
      suspected_ = suspected_ || shard.holders_size() + shard.fillers_size() < 2;
    }
    if (Covered()) return;
    if (!Excused()) {
      oracle_.Broken("a table leaves no copy of some chunk that makes up all decided steps");
    }
    tally_.lost = 1;
  }

  // Somebody of the table in the key has each shard, or may have it when it comes back. A shard counts as a whole: what
  // fillers have of it makes no holder together. Only holders copy from each other what they lost to damage.
  bool Covered() const {
    for (int shard = 0; shard < key_.table.shards_size(); ++shard) {
      if (!Covered(shard)) return false;
    }
    return true;
  }
  bool Covered(int shard) const {
    std::vector<uint64_t> chunks;
    for (const model::Chunk& chunk : JobLayout().chunks()) {
      if (static_cast<int>(chunk.index) % key_.table.shards_size() == shard) chunks.push_back(chunk.index);
    }
    const v1::Shard& places = key_.table.shards(shard);
    const auto& holders = places.holders();
    const auto has_all = [&](uint32_t m) {
      return std::all_of(chunks.begin(), chunks.end(), [&](uint64_t chunk) { return Counts(m, chunk); });
    };
    const bool whole = std::any_of(holders.begin(), holders.end(), has_all) ||
                       // Before the first step there is nothing to import yet, and nobody knows that.
                       (oracle_.last() >= 0 && std::any_of(places.fillers().begin(), places.fillers().end(), has_all));
    return whole || std::all_of(chunks.begin(), chunks.end(), [&](uint64_t chunk) {
             return std::any_of(holders.begin(), holders.end(), [&](uint32_t m) { return Counts(m, chunk); });
           });
  }
  // Null: the disk that the table means is lost.
  const Server* Member(uint32_t m) const {
    const v1::Member& member = key_.table.members(static_cast<int>(m));
    const Server* const server = servers_[static_cast<size_t>(ServerOf(member.server_id()))].get();
    return server->gone() || server->disk() != member.disk() ? nullptr : server;
  }
  bool Counts(uint32_t m, uint64_t chunk) const {
    const Server* const server = Member(m);
    if (server == nullptr) return false;
    const v1::Epoch& since = key_.table.members(static_cast<int>(m)).since();
    return !server->up() || oracle_.last() < 0 || Counts(*server, since, chunk, oracle_.last());
  }

  // All copies are filled, as many as wanted, and nothing more is kept.
  bool Settled() const { return Why().empty(); }
  std::string Why() const {
    if (oracle_.last() < 0) return "the job never began";
    for (const model::Chunk& chunk : JobLayout().chunks()) {
      const v1::Shard& shard = model::ShardOf(key_.table, chunk.index);
      if (!shard.fillers().empty()) return "a change never ends";
      // Whom nobody wishes stays where too few that are wished are there.
      const size_t least = std::min<size_t>(wish_.replicas, WishedThere());
      const auto holders = static_cast<size_t>(shard.holders_size());
      if (holders < least || holders > wish_.replicas) return "copies are missing, or surplus ones stay";
      for (const uint32_t m : shard.holders()) {
        const Server& server =
            *servers_[static_cast<size_t>(ServerOf(key_.table.members(static_cast<int>(m)).server_id()))];
        if (!server.up() || !server.HasCopy(chunk.index, oracle_.last(), &oracle_.decision(oracle_.last()))) {
          return absl::StrCat("a holder, server ", ServerName(server.index()), ", lacks chunk ", chunk.index);
        }
      }
      for (const v1::Member& m : key_.table.members()) {
        const Server& server = *servers_[static_cast<size_t>(ServerOf(m.server_id()))];
        const bool holds = std::any_of(shard.holders().begin(), shard.holders().end(), [&](uint32_t h) {
          return key_.table.members(static_cast<int>(h)).server_id() == m.server_id();
        });
        if (!holds && server.up() && server.Keeps(chunk.index)) return "a chunk that was given up is never freed";
      }
    }
    return "";
  }

  const ScheduleOptions options_;
  Random random_;
  const uint64_t calm_;  // the higher, the rarer are faults
  Oracle oracle_;
  Net net_;
  Key key_;
  Wish wish_;
  Tally tally_;
  Around around_;
  const bool damages_ = options_.seed % 4 == 0;  // states of chunks rot
  bool rough_ = false, hasty_ = false;
  size_t gives_up_ = 0;  // how many groups there are when HastyFault has let one begin amid a step
  std::vector<int> wished_before_;
  Had had_[kServers];
  bool strict_ = false;     // two copies are wanted all the time
  bool suspected_ = false;  // a member was left out that may be alive
  std::vector<std::unique_ptr<Server>> servers_;
  std::vector<std::unique_ptr<Group>> groups_;
};

}  // namespace

ScheduleResult RunSchedule(const ScheduleOptions& options) { return Schedule(options).Run(); }

}  // namespace ballast::sim_members
