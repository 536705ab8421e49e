// The part of the router that follows a group from epoch to epoch: rule 30 of services/step/README.md.
#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "ballast/client/transport/router.h"
#include "ballast/proto/model/protocol.h"
#include "ballast/proto/model/table.h"

namespace ballast::client {
namespace {

// How often a server is asked for the group's next epoch: by calls that were refused as of an older one, while a server
// is silent, and while a call waits so long that the server may be, and all ranks may ask.
constexpr absl::Duration kLookInterval = absl::Milliseconds(20), kSilentInterval = absl::Milliseconds(200),
                         kWaitingInterval = absl::Milliseconds(500);
// A look may take failover_after, within these bounds: machines are busy, and who does not answer is named then.
constexpr absl::Duration kLookTimeout = absl::Seconds(1), kLookTimeoutMax = absl::Seconds(2);
// How long a call waits before rank 0 looks whether servers live.
constexpr absl::Duration kSuspectAfter = absl::Milliseconds(250);
// A deadline that ends later than this did not end in time.
constexpr absl::Duration kLate = absl::Milliseconds(500);

// A slice on its way to all servers of its chunk. Tells once all have answered: the first error, or OK.
class ToAll {
 public:
  ToAll(size_t servers, std::function<void(absl::Status)> done) : left_(servers), done_(std::move(done)) {}
  void Finish(const absl::Status& status) {
    absl::Status told;
    {
      absl::MutexLock lock(&mutex_);
      if (told_.ok()) told_ = status;
      if (--left_ > 0) return;
      told = told_;
    }
    std::exchange(done_, nullptr)(std::move(told));
  }

 private:
  absl::Mutex mutex_;
  size_t left_ ABSL_GUARDED_BY(mutex_);
  absl::Status told_ ABSL_GUARDED_BY(mutex_);
  std::function<void(absl::Status)> done_;  // of the last to finish
};

bool IsOf(const Transport& transport, const v1::Member& member) {
  return transport.registered_as() == model::TargetOf(member.server_id(), member.disk());
}

// A job that was dropped and made again under the name is another one. It may have no table, and any epoch.
bool IsOfJob(const v1::OpenRequest& open, const v1::OpenRequest& known) {
  return open.has_table() && open.table().life() == known.table().life();
}

}  // namespace

void Router::SetRoutes(std::shared_ptr<const model::EpochPlan> plan, absl::Duration failover_after, Follows follows) {
  absl::MutexLock lock(&mutex_);
  silence_max_ = failover_after;
  follows_ = follows;
  Install(std::move(plan));
}

void Router::Install(std::shared_ptr<const model::EpochPlan> plan) {
  auto routes = std::make_shared<Routes>();
  for (const auto& server : servers_) routes->servers.push_back(server.get());
  silence_.Watch(routes->servers, model::Replaceable(plan->open().table()));
  routes->plan = std::move(plan);
  routes_ = std::move(routes);
}

std::shared_ptr<const Routes> Router::routes() const {
  absl::MutexLock lock(&mutex_);
  return routes_;
}

Transport* Router::ServerFor(Source source) const {
  absl::MutexLock lock(&mutex_);
  return HolderFor(source);
}

Transport* Router::HolderFor(Source source) const {
  Transport* const wanted = routes_->servers[routes_->plan->SourceFor(source.chunk, source.reader)];
  if (!FailedLast(wanted)) return wanted;
  for (const uint32_t holder : routes_->plan->holders_of(source.chunk)) {
    if (!FailedLast(routes_->servers[holder])) return routes_->servers[holder];
  }
  return wanted;
}

bool Router::FailedLast(const Transport* server) const { return silence_.Since(server) < model::SteadyTime::Never(); }

void Router::PushSlice(uint64_t chunk, const v1::PushRequest& header, absl::Span<const std::byte> payload,
                       absl::Time deadline, std::function<void(absl::Status)> done,
                       const std::shared_ptr<model::LentGradients>& lent) {
  const std::shared_ptr<const Routes> now = routes();
  std::vector<Transport*> servers;
  for (const auto places : {now->plan->holders_of(chunk), now->plan->fillers_of(chunk)}) {
    for (const uint32_t place : places) servers.push_back(now->servers[place]);
  }
  const auto all = std::make_shared<ToAll>(servers.size(), std::move(done));
  for (Transport* const server : servers) {
    Push(
        server, Source{chunk, header.rank()}, header, payload, deadline,
        [all](const absl::Status& status) { all->Finish(status); }, lent);
  }
}

bool Router::IsSilent(const Transport* server) const {
  return model::SteadyTime::Now() - silence_.Since(server) >= silence_max_ && !server->recovers();
}

std::vector<Router::SilentServer> Router::Silent() const {
  absl::MutexLock lock(&mutex_);
  std::vector<SilentServer> silent;
  for (uint32_t i = 0; routes_ != nullptr && i < routes_->servers.size(); ++i) {
    const Transport* const server = routes_->servers[i];
    if (IsSilent(server)) silent.push_back({routes_->plan->members()[static_cast<int>(i)], silence_.Since(server), i});
  }
  return silent;
}

absl::Duration Router::LongestOperation(model::SteadyTime now) const {
  return now - std::min(active_.empty() ? now : active_.front()->started, waits_since_);
}

void Router::LookForSilent() {
  const model::SteadyTime now = model::SteadyTime::Now();
  std::vector<Transport*> asked;
  v1::GetJobRequest request;
  request.set_without_open(true);
  absl::Duration timeout = kLookTimeout;
  {
    absl::MutexLock lock(&mutex_);
    if (routes_ == nullptr || !stopped_.ok()) return;
    if (silence_.first() == model::SteadyTime::Never() && LongestOperation(now) < kSuspectAfter) return;
    asked = silence_.ToAsk(now);
    request.set_job(routes_->open().spec().name());
    timeout = std::clamp(silence_max_, kLookTimeout, kLookTimeoutMax);
  }
  for (Transport* const server : asked) {
    server->GetJob(request, absl::Now() + timeout, [=, this](const absl::StatusOr<v1::GetJobResponse>& answer) {
      absl::MutexLock lock(&mutex_);
      // If this process stood still meanwhile, the answer may be there, and come second.
      const absl::Duration took = model::SteadyTime::Now() - now;
      const bool late = absl::IsDeadlineExceeded(answer.status()) && took > timeout + kLate;
      if (!late) NoteLook(server, answer, now);
      silence_.Asked(server, model::SteadyTime::Now() + kSilentInterval);
    });
  }
}

bool Router::MayBeOutdated(const Operation& op, const absl::Status& status) const {
  if (op.routes == nullptr || !op.routes->may_change()) return false;
  if (model::ReasonOf(status) == model::kStaleEpoch) {
    const model::Details details = model::DetailsOf(status);
    const auto group = details.find(model::kGroup);
    return group == details.end() || group->second.empty() ||
           group->second == absl::BytesToHexString(op.routes->open().group());
  }
  // A server that is no member any more, or has given the chunk up, knows neither.
  return absl::IsNotFound(status) || op.source.has_value();
}

void Router::AwaitRoutes(const OperationPtr& op) {
  if (model::Compare(op->routes->epoch(), routes_->epoch()) < 0) {  // they have come meanwhile
    timers_.emplace(absl::Now(), [this, op] { Reroute(op); });
    return;
  }
  const bool stale = model::ReasonOf(op->last) == model::kStaleEpoch;
  refused_.push_back({op, stale ? std::numeric_limits<size_t>::max() : routes_->servers.size()});
  if (refused_.size() > 1) return;
  looks_ = 0;
  look_after_ = absl::Now();
}

bool Router::Serves(const Operation& op) const {
  const auto at = std::find(routes_->servers.begin(), routes_->servers.end(), op.server);
  if (at == routes_->servers.end()) return false;
  const auto place = static_cast<uint32_t>(at - routes_->servers.begin());
  if (op.direction == kPushes) return routes_->plan->Has(place, op.source->chunk);
  const auto holders = routes_->plan->holders_of(op.source->chunk);
  return std::find(holders.begin(), holders.end(), place) != holders.end();
}

void Router::Reroute(const OperationPtr& op) {
  bool needless = false;
  {
    absl::MutexLock lock(&mutex_);
    if (op->direction == kPushes) {
      needless = !Serves(*op);
    } else if (op->direction == kPulls) {
      op->server = HolderFor(*op->source);
    } else {
      op->last = model::Error(absl::StatusCode::kAborted, kRoutesChanged, "the job's servers have changed");
    }
  }
  if (needless) return Finish(op, absl::OkStatus());
  if (op->direction == kNone) return Finish(op, op->last);
  Send(op);
}

bool Router::LooksForRoutes() const {
  if (looking_ || routes_ == nullptr || !routes_->may_change() || !stopped_.ok()) return false;
  const model::SteadyTime now = model::SteadyTime::Now();
  return !refused_.empty() || now - silence_.first() >= silence_max_ || LongestOperation(now) >= silence_max_;
}

void Router::LookForRoutes() {
  Transport* asked = nullptr;
  v1::GetJobRequest request;
  request.set_without_open(true);
  std::vector<OperationPtr> late;
  {
    absl::MutexLock lock(&mutex_);
    const absl::Time now = absl::Now();
    if (!LooksForRoutes() || now < look_after_) return;
    std::erase_if(refused_, [&](const Refused& one) {
      if (one.op->deadline > now) return false;
      late.push_back(one.op);
      return true;
    });
    const size_t servers = now < expected_until_ ? 0 : routes_->servers.size();
    // Of a reader's servers nobody else finds out that one is back.
    const bool asks_silent = follows_ == Follows::kAnyGroup;
    for (size_t i = 0; i < servers && (asked == nullptr || (IsSilent(asked) && !asks_silent)); ++i) {
      asked = routes_->servers[looked_at_++ % servers];
    }
    looking_ = asked != nullptr;
    request.set_job(routes_->open().spec().name());
  }
  for (const OperationPtr& op : late) Finish(op, op->last);
  if (asked == nullptr) return;
  asked->GetJob(request, absl::Now() + kLookTimeout,
                [this, asked, sent = model::SteadyTime::Now()](const absl::StatusOr<v1::GetJobResponse>& answer) {
                  OnLook(asked, sent, answer);
                });
}

void Router::NoteLook(const Transport* server, const absl::StatusOr<v1::GetJobResponse>& answer,
                      model::SteadyTime sent) {
  absl::Status status = answer.status();
  if (status.ok() && !answer->exists()) {
    status = model::Error(absl::StatusCode::kNotFound, model::kUnknownJob, "it has nothing of the job");
  }
  silence_.Note(server, Silence::Call::kLook, status, sent);
}

// On a transport's thread: what follows is done on the router's.
void Router::OnLook(Transport* asked, model::SteadyTime sent, const absl::StatusOr<v1::GetJobResponse>& answer) {
  absl::MutexLock lock(&mutex_);
  looking_ = false;
  const bool only_waits = refused_.empty() && silence_.first() == model::SteadyTime::Never();
  look_after_ =
      absl::Now() + (only_waits ? kWaitingInterval : std::min(kSilentInterval, kLookInterval * (1 + looks_++)));
  NoteLook(asked, answer, sent);
  if (!stopped_.ok() || !answer.ok()) return;
  const Routes& now = *routes_;
  if (model::Compare(answer->opened(), now.epoch()) > 0) {
    looking_ = true;
    timers_.emplace(absl::Now(), [this, asked] { FetchOpen(asked); });
    return;
  }
  const bool later = model::Compare(answer->promised(), now.epoch()) > 0;
  if (later && follows_ == Follows::kOwnGroup) {
    if (!now.IsOwn(answer->promised_group())) Supersede();
    return;
  }
  std::erase_if(refused_, [&](Refused& one) {
    mutex_.AssertHeld();
    // The Open that is to come may name another holder, but none that copies a version of the past.
    if (later && model::ReasonOf(one.op->last) != model::kVersionGone) return false;
    if (--one.looks_left > 0) return false;
    // A server that has nothing of the job any more is left out like one that is down.
    const bool down = silence_.IsReplaceable(one.op->server) && model::IsWithoutJob(one.op->last);
    timers_.emplace(absl::Now(), [this, down, op = one.op] {
      if (down) return Repair(op, Next::kRetry);
      Finish(op, op->last);
    });
    return true;
  });
}

// Servers that answer refuse calls themselves, for which nobody brings other routes now.
void Router::Supersede() {
  superseded_ = model::Error(absl::StatusCode::kFailedPrecondition, model::kStaleEpoch,
                             follows_ == Follows::kAnyGroup
                                 ? "the job was dropped and made again since; read again"
                                 : "another group has opened the job since; end this one, and open the job again with "
                                   "resume=auto");
  for (Refused& one : std::exchange(refused_, {})) {
    timers_.emplace(absl::Now(), [this, op = std::move(one.op)] { Finish(op, op->last); });
  }
}

void Router::FetchOpen(Transport* asked) {
  v1::GetJobRequest request;
  request.set_job(routes()->open().spec().name());
  asked->GetJob(request, absl::Now() + kLookTimeout, [this](absl::StatusOr<v1::GetJobResponse> answer) {
    absl::MutexLock lock(&mutex_);
    looking_ = false;
    if (!stopped_.ok() || !answer.ok()) return;
    const bool later = model::Compare(answer->open().epoch(), routes_->epoch()) > 0;
    if (!later) return;
    const bool is_own = follows_ == Follows::kAnyGroup || answer->open().group() == routes_->open().group();
    if (!is_own || !IsOfJob(answer->open(), routes_->open())) return Supersede();
    timers_.emplace(absl::Now(), [this, open = std::move(*answer->mutable_open())] { Follow(open); });
  });
}

void Router::Follow(const v1::OpenRequest& open) {
  const absl::Status followed = Continue(open);
  if (!followed.ok() && !absl::IsCancelled(followed))
    Report(absl::StrCat("cannot follow the job's servers: ", followed.message()));
}

absl::StatusOr<std::vector<std::unique_ptr<Transport>>> Router::ConnectToNew(const v1::Table& table) {
  const std::vector<Transport*> servers = servers_now();
  std::vector<std::unique_ptr<Transport>> made;
  for (const v1::Member& member : table.members()) {
    const bool known =
        std::any_of(servers.begin(), servers.end(), [&](const Transport* one) { return IsOf(*one, member); });
    if (known) continue;
    BALLAST_ASSIGN_OR_RETURN(made.emplace_back(), servers.front()->Another(member));
    made.back()->MeanFor(model::TargetOf(member.server_id(), member.disk()));
  }
  return made;
}

std::vector<std::unique_ptr<Transport>> Router::TakeMembers(const v1::Table& table,
                                                            std::vector<std::unique_ptr<Transport>> made) {
  for (auto& server : servers_) made.push_back(std::move(server));
  servers_.clear();
  std::vector<std::unique_ptr<Transport>> members;
  for (const v1::Member& member : table.members()) {
    const auto found =
        std::find_if(made.begin(), made.end(), [&](const auto& one) { return one != nullptr && IsOf(*one, member); });
    members.push_back(std::move(*found));
  }
  for (auto& server : made) {
    if (server != nullptr) left_.push_back(std::move(server));
  }
  return members;
}

absl::Status Router::Continue(const v1::OpenRequest& open) {
  const absl::MutexLock one_at_a_time(&continuing_);
  if (model::Compare(open.epoch(), routes()->epoch()) <= 0) return absl::OkStatus();
  BALLAST_ASSIGN_OR_RETURN(auto plan, model::EpochPlan::Make(open, routes()->plan.get()));
  BALLAST_ASSIGN_OR_RETURN(auto made, ConnectToNew(open.table()));
  std::vector<Transport*> left;
  {
    absl::MutexLock lock(&mutex_);
    if (!stopped_.ok()) return stopped_;
    const size_t left_before = left_.size();
    servers_ = TakeMembers(open.table(), std::move(made));
    for (size_t i = left_before; i < left_.size(); ++i) left.push_back(left_[i].get());
    if (follows_ == Follows::kOwnGroup) open_ = plan.shared_open();  // a reader opens nothing
    Install(std::make_shared<const model::EpochPlan>(std::move(plan)));
    // What rests before its next try may be at a server that left.
    std::multimap<absl::Time, std::function<void()>> rested;
    for (auto& [time, task] : timers_) rested.emplace(absl::Now(), std::move(task));
    timers_ = std::move(rested);
    for (Refused& one : std::exchange(refused_, {})) {
      timers_.emplace(absl::Now(), [this, op = std::move(one.op)] { Reroute(op); });
    }
  }
  for (Transport* const server : left) server->Cancel();
  return absl::OkStatus();
}

}  // namespace ballast::client
