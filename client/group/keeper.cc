#include "ballast/client/group/keeper.h"

#include <algorithm>
#include <atomic>
#include <set>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "ballast/client/discovery/job_key.h"
#include "ballast/client/group/change.h"
#include "ballast/client/group/change_lines.h"
#include "ballast/client/group/fencing.h"
#include "ballast/client/group/members.h"
#include "ballast/client/group/opens.h"
#include "ballast/client/transport/call_all.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/base/threads.h"
#include "ballast/proto/model/brief_open.h"
#include "ballast/proto/model/protocol.h"
#include "ballast/proto/model/table.h"
#include "ballast/proto/model/verdict.h"

namespace ballast::client {
namespace {

// How often the keeper looks whether a server is silent, and asks etcd and the servers whether there is something to
// do.
constexpr absl::Duration kTick = absl::Milliseconds(50), kAskInterval = absl::Seconds(1);
// For etcd and servers to say whether there is something to do; meanwhile nobody looks for silent servers.
constexpr absl::Duration kAskTimeout = absl::Milliseconds(500);
// For servers that may join, once all members have answered, if training waits for the change. One that takes longer
// joins by a later change, for which it has Agenda::kPatience.
constexpr absl::Duration kGrace = absl::Milliseconds(200);

bool IsSame(const v1::Member& one, const v1::Member& server) {
  return one.server_id() == server.server_id() && one.disk() == server.disk();
}

bool IsAmong(const std::vector<v1::Member>& servers, const v1::Member& server) {
  return std::any_of(servers.begin(), servers.end(), [&](const v1::Member& one) { return IsSame(one, server); });
}

bool IsAmong(const std::vector<Router::SilentServer>& servers, const v1::Member& server) {
  return std::any_of(servers.begin(), servers.end(), [&](const auto& one) { return IsSame(one.member, server); });
}

bool AreSame(const std::vector<Router::SilentServer>& some, const std::vector<Router::SilentServer>& others) {
  return std::equal(some.begin(), some.end(), others.begin(), others.end(),
                    [](const auto& one, const auto& other) { return IsSame(one.member, other.member); });
}

v1::Member ServerOf(const v1::ServerEntry& entry) {
  v1::Member server;
  server.set_server_id(entry.server_id());
  server.set_disk(entry.disk());
  server.set_address(entry.address());
  return server;
}

// Members where they were last seen, and servers that are registered, but for the silent ones and those that rest.
// `table`: the key's.
std::vector<v1::Member> ServersToAsk(const v1::Table& table, const std::vector<v1::ServerEntry>& entries,
                                     const std::vector<Router::SilentServer>& silent,
                                     const std::vector<v1::Member>& resting) {
  std::vector<v1::Member> servers;
  for (const v1::ServerEntry& entry : entries) servers.push_back(ServerOf(entry));
  for (const v1::Member& member : table.members()) {
    if (!IsAmong(servers, member)) servers.push_back(member);
  }
  std::erase_if(servers, [&](const v1::Member& server) { return IsAmong(silent, server) || IsAmong(resting, server); });
  return servers;
}

// Only who was silent for failover_after, or is removed by the wish, may be left out. Of who joins by a change that is
// unfinished nobody keeps count, and others have all that it was to copy.
absl::Status CheckOthersAnswer(const client::Change& change, const v1::Table& table, const v1::Table& open,
                               const std::vector<Router::SilentServer>& silent,
                               const std::vector<v1::GetJobResponse>& answers, absl::Duration patience) {
  const std::vector<v1::Member> opened(open.members().begin(), open.members().end());
  std::vector<v1::Member> missing;
  for (const v1::Member& member : table.members()) {
    const bool answered = std::any_of(answers.begin(), answers.end(), [&](const v1::GetJobResponse& answer) {
      return answer.server_id() == member.server_id();
    });
    if (!answered && IsAmong(opened, member) && !IsAmong(silent, member) && !change.IsRemoved(member))
      missing.push_back(member);
  }
  if (missing.empty()) return absl::OkStatus();
  return model::Error(absl::StatusCode::kUnavailable, model::kServerDown,
                      absl::StrCat(ShowServers(missing), " did not answer within ", absl::FormatDuration(patience),
                                   ", and ", missing.size() == 1 ? "is" : "are", " waited for", change.ShowErrors()));
}

// Copies are missing, or members.
bool LacksServers(const v1::Table& table) {
  return model::ShortShards(table) > 0 || table.members_size() < static_cast<int>(table.wanted_servers());
}

bool HasFillers(const v1::Table& table) {
  return std::any_of(table.shards().begin(), table.shards().end(),
                     [](const v1::Shard& shard) { return shard.fillers_size() > 0; });
}

}  // namespace

Keeper::Keeper(const SessionOptions& options, Router* router) : options_(options), router_(router) {
  absl::StatusOr<std::thread> thread = model::MakeThread([this] { Run(); });
  made_ = thread.status();
  if (thread.ok()) thread_ = *std::move(thread);
}

Keeper::~Keeper() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

bool Keeper::stopping() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return stopping_;
}

bool Keeper::Rest(absl::Duration time) {
  std::unique_lock<std::mutex> lock(mutex_);
  return !changed_.wait_for(lock, absl::ToChronoMilliseconds(time), [this] { return stopping_; });
}

bool Keeper::LookForSilent(Sight* sight) const {
  router_->LookForSilent();
  std::vector<Router::SilentServer> silent = router_->Silent();
  const bool same = AreSame(silent, sight->silent);
  sight->silent = std::move(silent);
  return !same;
}

bool Keeper::IsOver(const Sight& sight) const {
  router_->LookForSilent();
  return stopping() || !AreSame(router_->Silent(), sight.silent);
}

bool Keeper::LooksSilent() const {
  router_->LookForSilent();
  return !router_->Silent().empty();
}

void Keeper::Run() {
  model::SteadyTime ask;
  Sight sight;
  while (Rest(kTick)) {
    const model::SteadyTime now = model::SteadyTime::Now();
    if (LookForSilent(&sight)) agenda_.TryAtOnce();
    if (now >= ask) {
      ask = now + kAskInterval;
      const std::string asked = sight.asked;
      LookAround(&sight);
      if (sight.asked != asked) absentees_.EndRests();
    }
    const absl::MutexLock lock(&changing_);
    const Agenda::Signs signs{.acute = !sight.silent.empty() || sight.copied || IsUnfinished(),
                              .lacks_servers = LacksServers(router_->routes()->open().table()),
                              .asked = sight.asked};
    if (!agenda_.IsDue(signs, now)) continue;
    agenda_.Begin(now);
    const absl::StatusOr<Agenda::Outcome> changed = Change(sight, agenda_.patience());
    if (!changed.ok()) {
      agenda_.Fail(model::SteadyTime::Now());
      if (!IsOver(sight)) Tell(changed.status(), sight);
      continue;
    }
    failures_.Succeed();
    // They are registered for a while yet, and it is known that they do not answer.
    for (const Router::SilentServer& server : sight.silent) {
      (void)absentees_.Failed(server.member, /*wished=*/false, model::SteadyTime::Now());
    }
    agenda_.End(*changed, sight.asked, absentees_.next(), model::SteadyTime::Now());
    sight.copied = false;
    ask = model::SteadyTime::Now() + kAskInterval;
  }
}

// Beside the router's lines: while a call waits, these would leave no room for the reason.
void Keeper::Tell(const absl::Status& failed, const Sight& sight) {
  const model::SteadyTime now = model::SteadyTime::Now();
  const bool unfinished = IsUnfinished();  // training waits, as it does for a silent server
  if (!options_.progress || !failures_.IsDue(failed, unfinished || !sight.silent.empty(), now)) return;
  std::vector<std::string> silent, times;
  for (const Router::SilentServer& server : sight.silent) {
    silent.push_back(absl::StrCat("'", server.member.server_id(), "'"));
    times.push_back(absl::StrCat(absl::ToInt64Seconds(now - server.since), " s"));
  }
  std::string what =
      unfinished ? "cannot go on until a change of its servers is made" : "cannot change its servers yet";
  if (!silent.empty()) {
    what = absl::StrCat("cannot go on without ", absl::StrJoin(silent, ", "), " yet (no answer for ",
                        absl::StrJoin(times, ", "), ")");
  }
  options_.progress(absl::StrCat("job '", options_.job, "' ", what, ": ", failed.message()));
}

void Keeper::LookAround(Sight* sight) const {
  const std::shared_ptr<const Routes> routes = router_->routes();
  sight->copied = HasFillers(routes->open().table()) && HaveCopied(*routes);
  registry::Registry* const registry = routes->servers.front()->registry();
  const absl::Time deadline = absl::Now() + kAskTimeout;
  const auto wish = registry->FindWish(options_.job, deadline);
  const auto entries = registry->List(deadline, registry::Registry::OnUnreadable::kPassOver);
  // Without etcd the job goes on as it is.
  if (absl::IsUnavailable(wish.status()) || !entries.ok()) return;
  sight->asked = wish.ok() && wish->has_value() ? (*wish)->value.SerializeAsString() : "";
  for (const v1::ServerEntry& entry : *entries) {
    absl::StrAppend(&sight->asked, "/", entry.server_id(), "/", entry.disk(), "/", static_cast<int>(entry.state()));
  }
}

bool Keeper::HaveCopied(const Routes& routes) const {
  v1::GetJobRequest ask;
  ask.set_job(options_.job);
  ask.set_without_open(true);
  const auto answers = CallAll<v1::GetJobRequest, v1::GetJobResponse>(router_, &Transport::GetJob, "GetJob", ask,
                                                                      absl::Now() + kAskTimeout);
  if (!answers.ok() || answers->size() != routes.servers.size()) return false;
  for (const v1::GetJobResponse& answer : *answers) {
    if (model::Compare(answer.opened(), routes.epoch()) != 0) return false;
  }
  const v1::Table& table = routes.open().table();
  for (int s = 0; s < table.shards_size(); ++s) {
    for (const uint32_t filler : table.shards(s).fillers()) {
      if (!model::HasBit((*answers)[filler].filled_shards(), static_cast<uint32_t>(s))) return false;
    }
  }
  return true;
}

bool Keeper::IsUnfinished() const { return model::Compare(claimed_, router_->routes()->epoch()) > 0; }

void Keeper::LockFinished() {
  const absl::Time deadline = absl::Now() + options_.step_timeout;
  changing_.Lock();
  while (IsUnfinished() && absl::Now() < deadline) {
    changing_.Unlock();
    absl::SleepFor(kTick);
    changing_.Lock();
  }
}

Keeper::Candidates Keeper::CandidatesOf(const v1::Table& table, const std::vector<v1::ServerEntry>& entries,
                                        const Sight& sight) const {
  const model::SteadyTime now = model::SteadyTime::Now();
  const auto& opened = router_->routes()->open().table().members();
  const std::vector<v1::Member> members(opened.begin(), opened.end());
  Candidates candidates;
  for (const v1::Member& server : ServersToAsk(table, entries, sight.silent, /*resting=*/{})) {
    if (IsAmong(members, server)) continue;
    (absentees_.Rests(server, now) ? candidates.resting : candidates.asked).push_back(server);
  }
  return candidates;
}

// The Open of a large job takes a busy server a while. Who has said who it is lives, and gets as long as its last rest.
absl::Duration Keeper::PatienceFor(const Candidates& candidates, const Members& members) const {
  absl::Duration patience = Agenda::kPatience;
  for (const v1::Member& server : candidates.asked) {
    if (!members.away().contains(server.server_id())) patience = std::max(patience, absentees_.RestOf(server));
  }
  return std::min(patience, Agenda::kPatienceMax);
}

void Keeper::NoteAbsent(const Candidates& candidates, const client::Change& change, const Members& members) {
  const model::SteadyTime now = model::SteadyTime::Now();
  for (const v1::Member& server : candidates.asked) {
    const std::string& id = server.server_id();
    if (!members.away().contains(id) && !IsAmong(change.absent(), server)) {
      absentees_.Answered(server);
      continue;
    }
    const auto& wished = change.wish().servers();
    const bool is_wished = std::find(wished.begin(), wished.end(), id) != wished.end();
    if (!absentees_.Failed(server, is_wished, now) || !options_.progress) continue;
    options_.progress(absl::StrCat(
        "job '", options_.job, "': server '", id, "' is registered at ", server.address(),
        " and does not answer, or is not ready; ",
        is_wished ? "the wish for it waits until it does" : "the job does without it, and asks it again later"));
  }
  std::vector<v1::Member> known = candidates.asked;
  known.insert(known.end(), candidates.resting.begin(), candidates.resting.end());
  absentees_.KeepOnly(known);
}

absl::StatusOr<Agenda::Outcome> Keeper::Change(const Sight& sight, absl::Duration patience) {
  const std::shared_ptr<const Routes> routes = router_->routes();
  Transport* const any = routes->servers.front();
  absl::Time deadline = absl::Now() + 2 * patience;
  JobKey key(any->registry(), options_.job);
  BALLAST_RETURN_IF_ERROR(key.Read(deadline));
  if (!key.has_places()) {
    return model::Error(absl::StatusCode::kFailedPrecondition, model::kKeyLost,
                        absl::StrCat("etcd has no key of this job any more. ", model::kHowToRestoreKey));
  }
  if (tried_ != 0 && key.value().claimed().nonce() == tried_) claimed_ = key.value().claimed();
  BALLAST_ASSIGN_OR_RETURN(const auto entries,
                           any->registry()->List(deadline, registry::Registry::OnUnreadable::kPassOver));
  const Candidates candidates = CandidatesOf(key.value().table(), entries, sight);
  std::vector<std::unique_ptr<Transport>> transports;
  for (const v1::Member& server : ServersToAsk(key.value().table(), entries, sight.silent, candidates.resting)) {
    BALLAST_ASSIGN_OR_RETURN(transports.emplace_back(), any->Another(server));
  }
  // Once the change is made, who left is told to drop the job: unless training waits for the next change by then.
  enum class Stage { kChanges, kMade, kTells };
  std::atomic<Stage> stage = Stage::kChanges;
  const auto interrupted = [&] {
    if (stage == Stage::kChanges) return IsOver(sight);
    return stopping() || (stage == Stage::kTells && LooksSilent());
  };
  Router router(std::move(transports), {.interrupted = interrupted});
  BALLAST_RETURN_IF_ERROR(router.made());
  Members members(&router, Members::Uses::kCalls);
  const bool unfinished = IsUnfinished();
  const bool urgent = unfinished || !sight.silent.empty();  // training waits
  BALLAST_RETURN_IF_ERROR(members.Identify(
      key, Spares::kConnect, {.members = patience, .spares = urgent ? kGrace : Agenda::kPatience}, deadline));
  for (const v1::Member& server : candidates.resting) members.AddAway(server.server_id());
  Agenda::Outcome outcome;
  const std::vector<std::string> spares = members.spares(key);
  const absl::Duration space = urgent ? kGrace : PatienceFor(candidates, members);
  const absl::Duration grace = std::min(space, std::max(Agenda::kPatience, options_.failover_after));
  client::Change change(&router, &members, &key, options_, {spares.begin(), spares.end()}, grace, routes->plan);
  BALLAST_ASSIGN_OR_RETURN(const client::Sight found, change.Look(routes->open().spec(), deadline));
  const absl::Cleanup note = [&] { NoteAbsent(candidates, change, members); };
  BALLAST_RETURN_IF_ERROR(
      CheckOthersAnswer(change, key.value().table(), routes->open().table(), sight.silent, found.answers, patience));
  BALLAST_RETURN_IF_ERROR(key.CheckClaimed(found.answers, deadline));
  if (!unfinished && !change.IsNeeded()) return outcome;
  change.AskAhead(model::MakeBrief(routes->open()), space, std::max(deadline, absl::Now() + space + patience));
  outcome.refused = !change.heeds_wish();
  if (!unfinished && !change.IsNeeded()) return outcome;  // who was to join does not answer, or has no room
  const v1::Epoch own = unfinished ? claimed_ : routes->epoch();
  const v1::Epoch least = Fencing(&router, options_.job, Fencing::Promised(found.answers), members.peers()).epoch();
  tried_ = least.nonce();
  SessionOptions options = options_;
  options.open_timeout = std::max(2 * patience, options_.failover_after);
  deadline = absl::Now() + options.open_timeout;
  router_->ExpectRoutes(deadline);
  const absl::Cleanup end = [this] { router_->ExpectRoutes(absl::InfinitePast()); };
  BALLAST_ASSIGN_OR_RETURN(claimed_,
                           key.Claim(unfinished ? key.value().table() : routes->open().table(), least, deadline, &own));
  BALLAST_RETURN_IF_ERROR(change.Claimed(claimed_, deadline));
  BALLAST_RETURN_IF_ERROR(change.Fence(routes->open().group(), /*expect_empty=*/false, deadline));
  v1::OpenRequest open = model::MakeBrief(routes->open());
  *open.mutable_epoch() = claimed_;
  open.set_continues(true);
  BALLAST_RETURN_IF_ERROR(OpenNext(&router, &members, &key, &change, options, deadline, &open));
  stage = Stage::kMade;
  BALLAST_RETURN_IF_ERROR(router_->Continue(open));
  stage = Stage::kTells;
  change.DropLeft(open.table());
  outcome.refused = !change.heeds_wish();
  outcome.changed = !model::SameTable(open.table(), routes->open().table());
  return outcome;
}

}  // namespace ballast::client
