#include "ballast/client/transport/router.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/base/threads.h"

namespace ballast::client {
namespace {

// How long a wait may last before a line says what is waited for, and how often.
constexpr absl::Duration kReportAfter = absl::Seconds(2);

}  // namespace

Router::Router(std::vector<std::unique_ptr<Transport>> servers, RouterOptions options)
    : servers_(std::move(servers)), options_(std::move(options)) {
  absl::StatusOr<std::thread> thread = model::MakeThread([this] { Run(); });
  made_ = thread.status();
  if (thread.ok()) thread_ = *std::move(thread);
}

Router::~Router() {
  Stop("the session was closed");
  if (thread_.joinable()) thread_.join();
  {
    absl::MutexLock lock(&mutex_);
    mutex_.Await(absl::Condition(
        +[](int* starts) { return *starts == 0; }, &handed_over_));
  }
  // Their ends wait for calls under way, whose answers are final now.
  std::vector<std::unique_ptr<Transport>> servers, left;
  {
    absl::MutexLock lock(&mutex_);
    servers.swap(servers_);
    left.swap(left_);
  }
}

void Router::Stop(absl::string_view why) {
  std::vector<OperationPtr> waiting;
  std::vector<Refused> refused;
  std::multimap<absl::Time, std::function<void()>> timers;
  absl::Status stopped;
  {
    absl::MutexLock lock(&mutex_);
    if (stopped_.ok()) stopped_ = absl::CancelledError(why);
    stopped = stopped_;
    push_admissions_->Admit(lanes_[kPushes].waiting.size());
    for (Lane& lane : lanes_) {
      for (const OperationPtr& op : lane.waiting) Activate(waiting.emplace_back(op));
      lane.waiting.clear();
    }
    timers.swap(timers_);
    refused.swap(refused_);
  }
  for (const OperationPtr& op : waiting) Finish(op, stopped);
  for (const Refused& one : refused) Finish(one.op, stopped);
  for (auto& [time, task] : timers) task();  // with stopped_ set, each finishes its operation
}

void Router::Reorder(absl::Span<const uint32_t> order) {
  std::vector<Transport*> left;
  {
    absl::MutexLock lock(&mutex_);
    std::vector<std::unique_ptr<Transport>> reordered;
    for (const uint32_t from : order) reordered.push_back(std::move(servers_[from]));
    for (std::unique_ptr<Transport>& server : servers_) {
      if (server == nullptr) continue;
      left.push_back(server.get());
      left_.push_back(std::move(server));
    }
    servers_ = std::move(reordered);
  }
  for (Transport* const server : left) server->Cancel();
}

bool Router::Left(const Transport* server) const {
  return std::any_of(left_.begin(), left_.end(), [server](const auto& one) { return one.get() == server; });
}

void Router::SetOpen(std::shared_ptr<const v1::OpenRequest> open) {
  absl::MutexLock lock(&mutex_);
  open_ = std::move(open);
}

void Router::SetCommit(std::shared_ptr<const v1::CommitRequest> commit) {
  absl::MutexLock lock(&mutex_);
  commit_ = std::move(commit);
}

void Router::Push(Transport* server, std::optional<Source> source, v1::PushRequest header,
                  absl::Span<const std::byte> payload, absl::Time deadline, std::function<void(absl::Status)> done,
                  std::shared_ptr<model::LentGradients> lent) {
  auto op = std::make_shared<Operation>();
  op->server = server;
  op->source = source;
  op->what = absl::StrCat("Push of step ", header.step());
  op->deadline = deadline;
  op->direction = kPushes;
  op->bytes = std::max<uint64_t>(1, payload.size());
  op->send = [header = std::move(header), payload, lent = std::move(lent)](const Try& at, Answer answer) mutable {
    if (at.epoch != nullptr) *header.mutable_epoch() = *at.epoch;
    auto done = [answer = std::move(answer)](const absl::StatusOr<v1::PushResponse>& r) { answer(r.status()); };
    if (lent == nullptr) return at.server->Push(header, payload, at.deadline, std::move(done));
    at.server->PushLent(header, payload, lent, at.deadline, std::move(done));
  };
  op->done = std::move(done);
  Start(std::move(op));
}

void Router::Pull(Transport* server, std::optional<Source> source, v1::PullRequest request, absl::Span<std::byte> to,
                  absl::Time deadline, std::function<void(absl::Status)> done) {
  auto op = std::make_shared<Operation>();
  op->server = server;
  op->source = source;
  op->what = absl::StrCat("Pull of version ", request.version());
  op->awaits_commit = true;
  op->deadline = deadline;
  op->direction = kPulls;
  op->bytes = std::max<uint64_t>(1, to.size());
  op->send = [request = std::move(request), to](const Try& at, Answer answer) {
    at.server->Pull(request, to, at.deadline, std::move(answer));
  };
  op->done = std::move(done);
  Start(std::move(op));
}

void Router::Pull(Source source, v1::PullRequest request, absl::Span<std::byte> to, absl::Time deadline,
                  std::function<void(absl::Status)> done) {
  Pull(ServerFor(source), source, std::move(request), to, deadline, std::move(done));
}

void Router::Lease(Source source, v1::PullRequest request, absl::Time deadline, Callback<model::LeasedBytes> done) {
  std::string what = absl::StrCat("Lease of version ", request.version());
  Call<v1::PullRequest, model::LeasedBytes>(&Transport::Lease, ServerFor(source), std::move(what),
                                            std::make_shared<const v1::PullRequest>(std::move(request)), deadline,
                                            std::move(done));
}

void Router::HandOver(std::function<void()> start) {
  Transport* server = nullptr;
  {
    absl::MutexLock lock(&mutex_);
    if (stopped_.ok()) {
      ++handed_over_;
      server = servers_.front().get();
    }
  }
  if (server == nullptr) return start();  // its calls fail at once; the servers may be gone
  server->Schedule(Transport::Moves::kPull, [this, start = std::move(start)] {
    start();
    absl::MutexLock lock(&mutex_);
    --handed_over_;
  });
}

void Router::Activate(const OperationPtr& op) {
  op->started = model::SteadyTime::Now();
  active_.push_back(op);
  op->active = std::prev(active_.end());
}

void Router::Start(OperationPtr op) {
  absl::Status stopped;
  const Direction direction = op->direction;
  {
    absl::MutexLock lock(&mutex_);
    stopped = stopped_;
    if (stopped.ok() && direction == kNone) Activate(op);
    if (stopped.ok() && direction == kPushes) push_admissions_->Queue();
    if (stopped.ok() && direction != kNone) lanes_[direction].waiting.push_back(op);
  }
  if (!stopped.ok()) return op->done(stopped);
  if (direction == kNone) return Send(op);
  Pump(direction);
}

bool Router::CanAdmit(const Lane& lane) const {
  if (lane.waiting.empty()) return false;
  return lane.inflight_bytes == 0 || lane.inflight_bytes + lane.waiting.front()->bytes <= options_.inflight_bytes_max;
}

// One thread at a time takes operations off a lane's queue: a transport that answers at once would otherwise recurse.
bool Router::Pump(Direction direction, int operations_max) {
  mutex_.Lock();
  Lane& lane = lanes_[direction];
  const bool pumps = !lane.pumping;
  if (pumps) lane.pumping = true;
  while (pumps && CanAdmit(lane) && operations_max-- > 0) {
    OperationPtr op = std::move(lane.waiting.front());
    lane.waiting.pop_front();
    if (direction == kPushes) push_admissions_->Admit();
    lane.inflight_bytes += op->bytes;
    Activate(op);
    mutex_.Unlock();
    Send(op);
    mutex_.Lock();
  }
  if (pumps) lane.pumping = false;
  const bool more = pumps && CanAdmit(lane);
  mutex_.Unlock();
  return more;
}

void Router::Send(const OperationPtr& op) {
  ++op->tries;
  auto send = [this, op] {
    absl::Status stopped;  // since it was scheduled
    bool outdated = false;
    {
      absl::MutexLock lock(&mutex_);
      stopped = stopped_;
      if (op->source.has_value() && op->routes != routes_) {
        op->routes = routes_;
        outdated = !Serves(*op);
      }
      if (op->direction != kNone) op->routes = routes_;
      outdated = outdated || (op->routes != nullptr && (op->routes != routes_ || Left(op->server)));
    }
    if (!stopped.ok()) return Finish(op, stopped);
    if (outdated) return Reroute(op);
    op->tried = model::SteadyTime::Now();
    const v1::Epoch* const epoch = op->routes == nullptr ? nullptr : &op->routes->epoch();
    op->send({op->server, epoch, TryDeadline(*op)},
             [this, op](absl::Status status) { OnAnswer(op, std::move(status)); });
  };
  if (op->direction == kNone) return send();
  const auto ends_in = op->direction == kPulls ? Transport::Moves::kPull : Transport::Moves::kPush;
  op->server->Schedule(ends_in, std::move(send));
}

void Router::Finish(const OperationPtr& op, absl::Status status) {
  {
    absl::MutexLock lock(&mutex_);
    active_.erase(op->active);
    if (op->direction != kNone) {
      Lane& lane = lanes_[op->direction];
      if (lane.inflight_bytes >= op->bytes) lane.inflight_bytes -= op->bytes;
      if (CanAdmit(lane)) pump_wanted_ = true;
    }
  }
  if (!status.ok()) status = Explain(*op, status);
  op->done(std::move(status));
}

void Router::Report(const std::string& line) {
  if (!options_.progress) return;
  {
    absl::MutexLock lock(&mutex_);
    const model::SteadyTime now = model::SteadyTime::Now();
    if (now - last_report_ < kReportAfter) return;
    last_report_ = now;
  }
  options_.progress(line);
}

std::string Router::LongestWait(model::SteadyTime now) {
  if (!options_.progress || now - last_report_ < kReportAfter) return "";
  std::string line;
  model::SteadyTime since = now - kReportAfter;
  if (!active_.empty() && active_.front()->started <= since) {
    const Operation& op = *active_.front();
    since = op.started;
    line = absl::StrCat("waiting for server ", op.server->name(), ": ", op.what);
    if (!op.last.ok()) absl::StrAppend(&line, " (", op.last.message(), ")");
  }
  if (!watches_.empty() && watches_.front().first <= since) {
    since = watches_.front().first;
    line = absl::StrCat("waiting for ", watches_.front().second);
  }
  if (line.empty()) return line;
  last_report_ = now;
  return absl::StrCat(line, ", ", absl::ToInt64Seconds(now - since), " s");
}

absl::Time Router::NextWake(bool watching) const {
  absl::Time wake = watching ? absl::Now() + absl::Milliseconds(500) : absl::InfiniteFuture();
  if (!timers_.empty()) wake = std::min(wake, timers_.begin()->first);
  return LooksForRoutes() ? std::min(wake, std::max(look_after_, expected_until_)) : wake;
}

// Fires retries, admits what waits for bytes in flight, shows long waits.
void Router::Run() {
  mutex_.Lock();
  while (stopped_.ok()) {
    const bool watching = !active_.empty() || !watches_.empty();
    const absl::Time wake = NextWake(watching);
    const auto changed = [this, wake, watching]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      return !stopped_.ok() || pump_wanted_ || NextWake(watching) < wake ||
             (!watching && (!active_.empty() || !watches_.empty()));
    };
    mutex_.AwaitWithDeadline(absl::Condition(&changed), wake);
    if (!stopped_.ok()) break;
    const absl::Time now = absl::Now();
    std::vector<std::function<void()>> due;
    while (!timers_.empty() && timers_.begin()->first <= now) {
      due.push_back(std::move(timers_.begin()->second));
      timers_.erase(timers_.begin());
    }
    const bool pump = std::exchange(pump_wanted_, false);
    const std::string line = LongestWait(model::SteadyTime::Now());
    mutex_.Unlock();
    for (const auto& task : due) task();
    LookForRoutes();
    // Sending a push may take the time of its checksum: pulls go between.
    for (bool more = pump; more; more = Pump(kPushes, 1)) Pump(kPulls);
    if (!line.empty()) options_.progress(line);
    if (watching && options_.interrupted && options_.interrupted()) {
      Stop("an interrupt (Ctrl-C) ended the session as it waited for servers");
      CancelActive();
    }
    mutex_.Lock();
  }
  mutex_.Unlock();
}

// Again and again: a call may be on its way to its transport.
void Router::CancelActive() {
  std::vector<Transport*> servers;
  {
    absl::MutexLock lock(&mutex_);
    for (const auto* all : {&servers_, &left_}) {
      for (const std::unique_ptr<Transport>& server : *all) servers.push_back(server.get());
    }
  }
  for (bool left = true; left;) {
    for (Transport* const server : servers) server->Cancel();
    absl::MutexLock lock(&mutex_);
    left = !mutex_.AwaitWithTimeout(absl::Condition(
                                        +[](std::list<OperationPtr>* active) { return active->empty(); }, &active_),
                                    absl::Milliseconds(100));
  }
}

Router::Watch::Watch(Router* router, std::string what) : router_(router) {
  absl::MutexLock lock(&router_->mutex_);
  router_->watches_.emplace_back(model::SteadyTime::Now(), std::move(what));
  entry_ = std::prev(router_->watches_.end());
}

Router::Watch::~Watch() {
  absl::MutexLock lock(&router_->mutex_);
  router_->watches_.erase(entry_);
}

}  // namespace ballast::client
