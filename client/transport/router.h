// Calls to a job's servers, and the one place that retries.
//
// While the server is UNAVAILABLE or a single try runs out of time, a call is sent again with jittered backoff, until
// the call's deadline. On NOT_OPEN the router sends the epoch's Open and asks again. On BEHIND it sends the last Commit
// and asks again. The last Commit also goes before each further try of a pull, unless the server said BUSY: the server
// may have been restarted and have lost what was not synced. Callers notice none of these repairs. Every other answer
// is final.
//
// Of a job whose servers may change while it trains (Routes::may_change) the router also follows the group from epoch
// to epoch. A call that a server refuses as of an older epoch of the group waits until the router has the group's next
// Open, from the keeper (Continue) or from another server, and goes on with it. Then a push to a server that left is
// needless and ends with OK, a pull goes to another holder, and other calls end with kRoutesChanged.
//
// Bounds: pushes in flight hold at most `inflight_bytes_max` bytes, and pulls as many (a single larger call may go
// alone); the rest wait in order of arrival. No pull waits for a push, and no push for a pull.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <limits>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/random/random.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "ballast/client/transport.h"
#include "ballast/client/transport/admissions.h"
#include "ballast/client/transport/routes.h"
#include "ballast/client/transport/silence.h"
#include "ballast/proto/base/steady_time.h"
#include "ballast/proto/model/verdict.h"

namespace ballast::client {

struct RouterOptions {
  uint64_t inflight_bytes_max = uint64_t{64} << 20;  // of pushes, and of pulls
  // Called with a line to show when a wait exceeds two seconds, at most once in two seconds. Called on the router's
  // thread or the caller's; may be empty.
  std::function<void(const std::string&)> progress;
  // Asked twice a second on the router's thread while a call waits. Returning true ends the session: waiting calls get
  // CANCELLED. May be empty.
  std::function<bool()> interrupted;
  // Limit for a single try: a server that accepts calls but never answers is asked again after this time.
  absl::Duration try_timeout = absl::Seconds(20);
};

// Threads: any; Reorder must come first. Callbacks run on transports' threads or the router's, and must not block.
class Router {
 public:
  Router(std::vector<std::unique_ptr<Transport>> servers, RouterOptions options);
  // RESOURCE_EXHAUSTED (LIMIT) if the system made no thread: then nothing is tried again.
  const absl::Status& made() const { return made_; }
  // Cancels waiting operations (callbacks get CANCELLED) and waits for the operations that a server has.
  ~Router();

  uint32_t server_count() const {
    absl::MutexLock lock(&mutex_);
    return static_cast<uint32_t>(servers_.size());
  }
  std::string name(uint32_t server) const { return transport(server)->name(); }
  std::vector<Transport*> servers_now() const {
    absl::MutexLock lock(&mutex_);
    std::vector<Transport*> servers;
    for (const auto& server : servers_) servers.push_back(server.get());
    return servers;
  }
  // For calls that must not be retried: calls to a server in this process.
  Transport* transport(uint32_t server) const {
    absl::MutexLock lock(&mutex_);
    return servers_[server].get();
  }
  // Makes server order[i] the new server i. Servers that `order` leaves out leave: operations at them end with
  // CANCELLED. REQUIRES: no operation under way at a server that stays.
  void Reorder(absl::Span<const uint32_t> order);

  // The job is open by `plan`, in whose order the servers are. A server is replaceable if others have all its chunks.
  // It is silent if nobody can connect to it, or if it does not answer a Commit or a look; other calls may wait at a
  // server that lives. Once a server has been silent for `failover_after`, Silent names it. If the job's servers cannot
  // change while it trains, operations at a replaceable one end with ABORTED (SERVER_DOWN), since the group can go on
  // without it if it starts again. Other servers are waited for.
  // A reader belongs to no group, and follows whichever has the job. Its pulls of a job with copies end with ABORTED
  // (SERVER_DOWN) if all holders of their chunk are silent: nobody is left who kept what it reads.
  enum class Follows { kOwnGroup, kAnyGroup };
  void SetRoutes(std::shared_ptr<const model::EpochPlan> plan, absl::Duration failover_after,
                 Follows follows = Follows::kOwnGroup);
  // Null before SetRoutes.
  std::shared_ptr<const Routes> routes() const;
  // The group has this epoch by now. Connects to servers that are new. Does nothing if the routes are as new. Errors:
  // those of EpochPlan::Make, and of Transport::Another.
  absl::Status Continue(const v1::OpenRequest& open);
  // Until then, or until it is told another time, somebody is about to call Continue: nobody asks servers for routes.
  void ExpectRoutes(absl::Time until) {
    absl::MutexLock lock(&mutex_);
    expected_until_ = until;
  }
  struct SilentServer {
    v1::Member member;
    model::SteadyTime since;
    uint32_t place = 0;  // in the routes
  };
  std::vector<SilentServer> Silent() const;
  // While a server does not answer, or a call has waited for a while: asks all servers whether they live, so that
  // Silent also names those to which no call goes. Returns at once; to be called again and again, by one rank.
  void LookForSilent();
  // The caller asks servers again and again for one answer, since then; Never: no longer. Each call is short,
  // so calls alone do not show that it may be for want of the group's next routes.
  void WaitsSince(model::SteadyTime since) {
    absl::MutexLock lock(&mutex_);
    waits_since_ = since;
  }
  // While true, nobody changes the job's servers: then operations at silent ones end as where they never change.
  void PinRoutes(bool pinned) {
    absl::MutexLock lock(&mutex_);
    pinned_ = pinned;
  }
  // Set the requests that answer NOT_OPEN and BEHIND from now on.
  void SetOpen(std::shared_ptr<const v1::OpenRequest> open);
  void SetCommit(std::shared_ptr<const v1::CommitRequest> commit);

  template <typename Request, typename Response>
  using Method = void (Transport::*)(const Request&, absl::Time, Callback<Response>);

  // `what` is for messages: "Seal of step 3".
  // `routes`: by which `server` was chosen; null: those that there are. With other routes by then it is not sent.
  template <typename Request, typename Response>
  void Call(Method<Request, Response> method, Transport* server, std::string what,
            std::shared_ptr<const Request> request, absl::Time deadline, Callback<Response> done,
            std::shared_ptr<const Routes> routes = nullptr);
  template <typename Request, typename Response>
  void Call(Method<Request, Response> method, uint32_t server, std::string what, std::shared_ptr<const Request> request,
            absl::Time deadline, Callback<Response> done) {
    Call(method, transport(server), std::move(what), std::move(request), deadline, std::move(done));
  }

  // `payload`, `to`: borrowed until `done`. `lent`: as for Transport::PushLent; null for Transport::Push.
  void Push(uint32_t server, v1::PushRequest header, absl::Span<const std::byte> payload, absl::Time deadline,
            std::function<void(absl::Status)> done, std::shared_ptr<model::LentGradients> lent = nullptr) {
    Push(transport(server), std::nullopt, std::move(header), payload, deadline, std::move(done), std::move(lent));
  }
  void Pull(uint32_t server, v1::PullRequest request, absl::Span<std::byte> to, absl::Time deadline,
            std::function<void(absl::Status)> done) {
    Pull(transport(server), std::nullopt, std::move(request), to, deadline, std::move(done));
  }
  // To all servers of the slice's chunk, by the routes. `done` gets the first error, or OK, once all have answered.
  void PushSlice(uint64_t chunk, const v1::PushRequest& header, absl::Span<const std::byte> payload,
                 absl::Time deadline, std::function<void(absl::Status)> done,
                 const std::shared_ptr<model::LentGradients>& lent);
  // From a holder of the chunk, by the routes and the reader's number.
  struct Source {
    uint64_t chunk = 0;
    uint32_t reader = 0;
  };
  void Pull(Source source, v1::PullRequest request, absl::Span<std::byte> to, absl::Time deadline,
            std::function<void(absl::Status)> done);
  // Where a server in this process has the bytes of a pull (Transport::Lease). Counts as no bytes in flight.
  void Lease(Source source, v1::PullRequest request, absl::Time deadline, Callback<model::LeasedBytes> done);
  // Runs `start`, which calls Pull or Lease: on a thread of the server's transport, if that moves bytes on its own,
  // so that the caller hands over many pulls in no time. The destructor waits for it.
  void HandOver(std::function<void()> start);
  // Waits until all pushes started before have been admitted to the bytes in flight: back pressure for the caller.
  Admissions& push_admissions() const { return *push_admissions_; }

  // Shows `line`, unless a line was shown within the last two seconds.
  void Report(const std::string& line);

  // Reports a wait that is not a call: shown like a call when it lasts.
  class Watch {
   public:
    Watch(Router* router, std::string what);
    ~Watch();
    Watch(const Watch&) = delete;
    Watch& operator=(const Watch&) = delete;

   private:
    Router* router_;
    std::list<std::pair<model::SteadyTime, std::string>>::iterator entry_;
  };

 private:
  using Answer = std::function<void(absl::Status)>;
  enum Direction : size_t { kPulls, kPushes, kNone };
  struct Try {
    Transport* server = nullptr;
    const v1::Epoch* epoch = nullptr;  // of the routes; null: there are none
    absl::Time deadline;
  };
  struct Operation {
    Transport* server = nullptr;
    std::optional<Source> source;  // of a pull or a push by the routes
    std::string what;
    absl::Time deadline;
    Direction direction = kNone;
    uint64_t bytes = 0;  // in flight
    bool awaits_commit = false;
    bool prompt = false;  // a server that lives answers within a moment, whatever it does
    std::function<void(const Try&, Answer)> send;
    Answer done;
    model::SteadyTime started = model::SteadyTime::Never();
    model::SteadyTime tried = model::SteadyTime::Never();  // the last time
    int tries = 0;
    uint32_t other_holders = 0;  // that were asked since the one that the routes name
    absl::Status last;
    std::shared_ptr<const Routes> routes;  // of the last try; of a call, of all
    std::list<std::shared_ptr<Operation>>::iterator active;
  };
  using OperationPtr = std::shared_ptr<Operation>;
  // What goes in one direction.
  struct Lane {
    std::deque<OperationPtr> waiting;  // for bytes in flight
    uint64_t inflight_bytes = 0;
    bool pumping = false;
  };
  enum class Next { kDone, kRetry, kSendOpen, kSendCommit, kNextHolder, kReroute, kAwaitRoutes };
  // An operation that a server refused, perhaps because the group has gone on to a later epoch.
  struct Refused {
    OperationPtr op;
    size_t looks_left = 0;  // that may find no later epoch before the refusal is final
  };

  // Of requests that name the epoch of the session: a try names that of the routes.
  template <typename Request>
  static std::shared_ptr<const Request> InEpoch(const std::shared_ptr<const Request>& request, const v1::Epoch* epoch);
  void Pull(Transport* server, std::optional<Source> source, v1::PullRequest request, absl::Span<std::byte> to,
            absl::Time deadline, std::function<void(absl::Status)> done);
  void Push(Transport* server, std::optional<Source> source, v1::PushRequest header,
            absl::Span<const std::byte> payload, absl::Time deadline, std::function<void(absl::Status)> done,
            std::shared_ptr<model::LentGradients> lent);
  Transport* ServerFor(Source source) const;
  // The holder from which the reader pulls the chunk: another one while that one does not answer.
  Transport* HolderFor(Source source) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  void Start(OperationPtr op);
  void Activate(const OperationPtr& op) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Send(const OperationPtr& op);
  void OnAnswer(const OperationPtr& op, absl::Status status);
  // After a try that ended with `status`: OK, or why operations at the server end, if it is silent and replaceable.
  absl::Status CheckSilence(const Operation& op, const absl::Status& status) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // As CheckSilence, of a reader's pull: OK while some holder of its chunk may answer.
  absl::Status CheckHolders(const Operation& op, const absl::Status& status) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Time TryDeadline(const Operation& op) const;
  bool Left(const Transport* server) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Next Classify(const Operation& op, const absl::Status& status) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Of a call that the server did not answer, or had no time for.
  Next AskAgain(const Operation& op, const absl::Status& status) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Whether the job has stopped at a server that others replace: the keeper leaves it out like one that is down.
  bool HasStopped(const Transport* server, const absl::Status& status) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void ReportStopped(const absl::Status& status);
  // Whether a refusal may come of an epoch that this session does not know yet.
  bool MayBeOutdated(const Operation& op, const absl::Status& status) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool IsSilent(const Transport* server) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Whether the server did not answer the last call.
  bool FailedLast(const Transport* server) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Install(std::shared_ptr<const model::EpochPlan> plan) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Whether by the routes the operation's server has its chunk.
  bool Serves(const Operation& op) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Whether the pull can be answered by another holder of the chunk, though its server has lost or not kept the
  // version.
  bool MayGoToNextHolder(const Operation& op, absl::string_view reason) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The holder of the pull's chunk that comes after its server.
  Transport* NextHolder(const Operation& op) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // How to go on with an operation instead of `next`: with a pull whose server does not answer, at another holder.
  Next TryAnotherHolder(Operation* op, Next next) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Goes on with an operation whose server left, or whose refusal was of an older epoch.
  void Reroute(const OperationPtr& op);
  void AwaitRoutes(const OperationPtr& op) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // For how long the oldest operation, or who asks again and again, has waited.
  absl::Duration LongestOperation(model::SteadyTime now) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Whether somebody waits for a later epoch of the group, or may do so, and no server is asked for it.
  bool LooksForRoutes() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Then asks one. On the router's thread.
  void LookForRoutes();
  void NoteLook(const Transport* server, const absl::StatusOr<v1::GetJobResponse>& answer, model::SteadyTime sent)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void OnLook(Transport* asked, model::SteadyTime sent, const absl::StatusOr<v1::GetJobResponse>& answer);
  // Another group has the job: what was refused, or waits for a server that does not answer, ends.
  void Supersede() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void FetchOpen(Transport* asked);
  void Follow(const v1::OpenRequest& open);
  absl::StatusOr<std::vector<std::unique_ptr<Transport>>> ConnectToNew(const v1::Table& table);
  // Transports of the members in the table's order, also of those that were just made.
  std::vector<std::unique_ptr<Transport>> TakeMembers(const v1::Table& table,
                                                      std::vector<std::unique_ptr<Transport>> made)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Duration Backoff(const Operation& op) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Finish(const OperationPtr& op, absl::Status status);
  absl::Status Explain(const Operation& op, const absl::Status& status) const;
  void Repair(const OperationPtr& op, Next how);
  // What the call needed first was tried.
  void Repaired(const OperationPtr& op, const absl::Status& repaired);
  // Waiting and later operations get CANCELLED, with `why`; an operation at a server gets the server's answer.
  void Stop(absl::string_view why);
  void CancelActive();
  // Sends what waits and has room, at most so many. Returns whether there is more that has.
  bool Pump(Direction direction, int operations_max = std::numeric_limits<int>::max());
  bool CanAdmit(const Lane& lane) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // When the router's thread has something to do at the latest.
  absl::Time NextWake(bool watching) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::string LongestWait(model::SteadyTime now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Run();

  absl::Mutex continuing_;  // taken before mutex_
  mutable absl::Mutex mutex_;
  std::vector<std::unique_ptr<Transport>> servers_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::unique_ptr<Transport>> left_ ABSL_GUARDED_BY(mutex_);  // operations may be under way there
  const RouterOptions options_;
  const std::shared_ptr<Admissions> push_admissions_ = std::make_shared<Admissions>();

  Silence silence_ ABSL_GUARDED_BY(mutex_);
  absl::Duration silence_max_ ABSL_GUARDED_BY(mutex_) = absl::InfiniteDuration();
  Follows follows_ ABSL_GUARDED_BY(mutex_) = Follows::kOwnGroup;
  std::shared_ptr<const Routes> routes_ ABSL_GUARDED_BY(mutex_);
  bool pinned_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status superseded_ ABSL_GUARDED_BY(mutex_);
  std::vector<Refused> refused_ ABSL_GUARDED_BY(mutex_);
  bool looking_ ABSL_GUARDED_BY(mutex_) = false;  // for a later epoch, at a server
  size_t looked_at_ ABSL_GUARDED_BY(mutex_) = 0;
  int looks_ ABSL_GUARDED_BY(mutex_) = 0;  // since the first refusal
  absl::Time look_after_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();
  model::SteadyTime waits_since_ ABSL_GUARDED_BY(mutex_) = model::SteadyTime::Never();
  absl::Time expected_until_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();  // somebody brings the next routes
  std::shared_ptr<const v1::OpenRequest> open_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<const v1::CommitRequest> commit_ ABSL_GUARDED_BY(mutex_);
  std::array<Lane, kNone> lanes_ ABSL_GUARDED_BY(mutex_);
  std::list<OperationPtr> active_ ABSL_GUARDED_BY(mutex_);  // oldest first
  std::multimap<absl::Time, std::function<void()>> timers_ ABSL_GUARDED_BY(mutex_);
  std::list<std::pair<model::SteadyTime, std::string>> watches_ ABSL_GUARDED_BY(mutex_);
  bool pump_wanted_ ABSL_GUARDED_BY(mutex_) = false;
  int handed_over_ ABSL_GUARDED_BY(mutex_) = 0;   // by HandOver, and not started yet
  absl::Status stopped_ ABSL_GUARDED_BY(mutex_);  // once stopped: what operations get
  model::SteadyTime last_report_ ABSL_GUARDED_BY(mutex_);
  absl::BitGen random_ ABSL_GUARDED_BY(mutex_);
  std::thread thread_;
  absl::Status made_;
};

template <typename Request>
std::shared_ptr<const Request> Router::InEpoch(const std::shared_ptr<const Request>& request, const v1::Epoch* epoch) {
  constexpr bool names_epoch = std::is_same_v<Request, v1::PushRequest> || std::is_same_v<Request, v1::NormRequest> ||
                               std::is_same_v<Request, v1::SealRequest> || std::is_same_v<Request, v1::PinRequest> ||
                               std::is_same_v<Request, v1::UnpinRequest>;
  if constexpr (names_epoch) {
    if (epoch == nullptr || !request->has_epoch() || model::Compare(request->epoch(), *epoch) == 0) return request;
    const auto renamed = std::make_shared<Request>(*request);
    *renamed->mutable_epoch() = *epoch;
    return renamed;
  }
  return request;
}

template <typename Request, typename Response>
void Router::Call(Method<Request, Response> method, Transport* server, std::string what,
                  std::shared_ptr<const Request> request, absl::Time deadline, Callback<Response> done,
                  std::shared_ptr<const Routes> chosen_by) {
  auto response = std::make_shared<Response>();
  auto op = std::make_shared<Operation>();
  op->server = server;
  op->routes = chosen_by == nullptr ? routes() : std::move(chosen_by);
  op->what = std::move(what);
  op->deadline = deadline;
  op->prompt = std::is_same_v<Request, v1::CommitRequest>;
  op->send = [method, request = std::move(request), response](const Try& at, Answer answer) {
    const auto sent = InEpoch(request, at.epoch);
    (at.server->*method)(*sent, at.deadline, [response, answer = std::move(answer)](absl::StatusOr<Response> r) {
      if (r.ok()) *response = std::move(*r);
      answer(r.status());
    });
  };
  op->done = [response, done = std::move(done)](absl::Status status) {
    if (status.ok()) {
      done(std::move(*response));
    } else {
      done(std::move(status));
    }
  };
  Start(std::move(op));
}

}  // namespace ballast::client
