// Calls to all of a job's servers, and the one place that retries.
//
// While the server is UNAVAILABLE or a single try runs out of time, a call is sent again with jittered backoff, until
// the call's deadline. On NOT_OPEN the router sends the epoch's Open and asks again. On BEHIND it sends the last Commit
// and asks again. The last Commit also goes before each further try of a pull, unless the server said BUSY: the server
// may have been restarted and have lost what was not synced. Callers notice none of these repairs. Every other answer
// is final.
//
// Bounds: pushes in flight hold at most `inflight_bytes_max` bytes, and pulls as many (a single larger call may go
// alone); the rest wait in order of arrival. No pull waits for a push, and no push for a pull.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <limits>
#include <list>
#include <map>
#include <memory>
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
#include "ballast/client/transport/answers.h"
#include "ballast/client/transport/tally.h"

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

  uint32_t server_count() const { return static_cast<uint32_t>(servers_.size()); }
  std::string name(uint32_t server) const { return servers_[server]->name(); }
  // For calls that must not be retried: calls to a server in this process.
  Transport* transport(uint32_t server) const { return servers_[server].get(); }
  // Makes server order[i] the new server i. Servers that `order` leaves out leave: operations at them end with
  // CANCELLED. REQUIRES: no operation under way at a server that stays.
  void Reorder(absl::Span<const uint32_t> order);

  // From now on operations at these servers end with ABORTED (SERVER_DOWN) once the server has been silent for `after`:
  // the group can go on without it if it starts again. Other servers are waited for. By index. Silent is a server that
  // nobody can connect to, and one that does not answer a Commit; other calls may wait at a server that lives.
  void SetReplaceable(const std::vector<bool>& servers, absl::Duration after);
  // Set the requests that answer NOT_OPEN and BEHIND from now on.
  void SetOpen(std::shared_ptr<const v1::OpenRequest> open);
  void SetCommit(std::shared_ptr<const v1::CommitRequest> commit);

  template <typename Request, typename Response>
  using Method = void (Transport::*)(const Request&, absl::Time, Callback<Response>);

  // `what` is for messages: "Seal of step 3".
  template <typename Request, typename Response>
  void Call(Method<Request, Response> method, uint32_t server, std::string what, std::shared_ptr<const Request> request,
            absl::Time deadline, Callback<Response> done);

  // Sends the same request to every server, or to the first `servers`. Returns all answers in order of servers, or the
  // first error.
  template <typename Request, typename Response>
  absl::StatusOr<std::vector<Response>> CallAll(Method<Request, Response> method, const std::string& what,
                                                const Request& request, absl::Time deadline,
                                                uint32_t servers = std::numeric_limits<uint32_t>::max());
  // Sends the same request to every server and returns at once.
  template <typename Request, typename Response>
  std::shared_ptr<Answers<Response>> Ask(Method<Request, Response> method, const std::string& what,
                                         const Request& request, absl::Time deadline);

  // `payload`, `to`: borrowed until `done`. `lent`: as for Transport::PushLent; null for Transport::Push.
  void Push(uint32_t server, v1::PushRequest header, absl::Span<const std::byte> payload, absl::Time deadline,
            std::function<void(absl::Status)> done, std::shared_ptr<model::LentGradients> lent = nullptr);
  void Pull(uint32_t server, v1::PullRequest request, absl::Span<std::byte> to, absl::Time deadline,
            std::function<void(absl::Status)> done);
  // Where a server in this process has the bytes of a pull (Transport::Lease). Counts as no bytes in flight.
  void Lease(uint32_t server, v1::PullRequest request, absl::Time deadline, Callback<model::LeasedBytes> done);
  // Runs `start`, which calls Pull or Lease: on a thread of the server's transport, if that moves bytes on its own,
  // so that the caller hands over many pulls in no time. The destructor waits for it.
  void HandOver(std::function<void()> start, uint32_t server = 0);
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
    std::list<std::pair<absl::Time, std::string>>::iterator entry_;
  };

 private:
  using Answer = std::function<void(absl::Status)>;
  enum Direction : size_t { kPulls, kPushes, kNone };
  struct Operation {
    Transport* server = nullptr;
    std::string what;
    absl::Time deadline;
    Direction direction = kNone;
    uint64_t bytes = 0;  // in flight
    bool awaits_commit = false;
    bool prompt = false;  // a server that lives answers within a moment, whatever it does
    std::function<void(absl::Time try_deadline, Answer)> send;
    Answer done;
    absl::Time started = absl::InfiniteFuture();
    absl::Time tried = absl::InfiniteFuture();  // the last time
    int tries = 0;
    absl::Status last;
    std::list<std::shared_ptr<Operation>>::iterator active;
  };
  using OperationPtr = std::shared_ptr<Operation>;
  // What goes in one direction.
  struct Lane {
    std::deque<OperationPtr> waiting;  // for bytes in flight
    uint64_t inflight_bytes = 0;
    bool pumping = false;
  };
  enum class Next { kDone, kRetry, kSendOpen, kSendCommit };

  void Start(OperationPtr op);
  void Activate(const OperationPtr& op) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Send(const OperationPtr& op);
  void OnAnswer(const OperationPtr& op, absl::Status status);
  // Notes the end of a try that began at `since`. OK, or why operations at the server end: it is silent and
  // replaceable.
  absl::Status Silence(const Transport* server, bool prompt, const absl::Status& status, absl::Time since)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Time TryDeadline(const Operation& op) const;
  bool Left(const Transport* server) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Next Classify(const Operation& op, const absl::Status& status) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Duration Backoff(const Operation& op) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Finish(const OperationPtr& op, absl::Status status);
  absl::Status Explain(const Operation& op, const absl::Status& status) const;
  void Repair(const OperationPtr& op, Next how);
  // Waiting and later operations get CANCELLED, with `why`; an operation at a server gets the server's answer.
  void Stop(absl::string_view why);
  void CancelActive();
  // Sends what waits and has room, at most so many. Returns whether there is more that has.
  bool Pump(Direction direction, int operations_max = std::numeric_limits<int>::max());
  bool CanAdmit(const Lane& lane) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::string LongestWait(absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Run();

  mutable absl::Mutex mutex_;
  std::vector<std::unique_ptr<Transport>> servers_;
  std::vector<std::unique_ptr<Transport>> left_ ABSL_GUARDED_BY(mutex_);  // operations may be under way there
  const RouterOptions options_;
  const std::shared_ptr<Admissions> push_admissions_ = std::make_shared<Admissions>();

  std::map<const Transport*, absl::Time> silent_since_ ABSL_GUARDED_BY(mutex_);  // of replaceable servers
  absl::Duration silence_max_ ABSL_GUARDED_BY(mutex_) = absl::InfiniteDuration();
  std::shared_ptr<const v1::OpenRequest> open_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<const v1::CommitRequest> commit_ ABSL_GUARDED_BY(mutex_);
  std::array<Lane, kNone> lanes_ ABSL_GUARDED_BY(mutex_);
  std::list<OperationPtr> active_ ABSL_GUARDED_BY(mutex_);  // oldest first
  std::multimap<absl::Time, std::function<void()>> timers_ ABSL_GUARDED_BY(mutex_);
  std::list<std::pair<absl::Time, std::string>> watches_ ABSL_GUARDED_BY(mutex_);
  bool pump_wanted_ ABSL_GUARDED_BY(mutex_) = false;
  int handed_over_ ABSL_GUARDED_BY(mutex_) = 0;   // by HandOver, and not started yet
  absl::Status stopped_ ABSL_GUARDED_BY(mutex_);  // once stopped: what operations get
  absl::Time last_report_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();
  absl::BitGen random_ ABSL_GUARDED_BY(mutex_);
  std::thread thread_;
  absl::Status made_;
};

template <typename Request, typename Response>
void Router::Call(Method<Request, Response> method, uint32_t server, std::string what,
                  std::shared_ptr<const Request> request, absl::Time deadline, Callback<Response> done) {
  auto response = std::make_shared<Response>();
  auto op = std::make_shared<Operation>();
  op->server = servers_[server].get();
  op->what = std::move(what);
  op->deadline = deadline;
  op->prompt = std::is_same_v<Request, v1::CommitRequest>;
  op->send = [transport = servers_[server].get(), method, request = std::move(request), response](
                 absl::Time try_deadline, Answer answer) {
    (transport->*method)(*request, try_deadline, [response, answer = std::move(answer)](absl::StatusOr<Response> r) {
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

template <typename Request, typename Response>
absl::StatusOr<std::vector<Response>> Router::CallAll(Method<Request, Response> method, const std::string& what,
                                                      const Request& request, absl::Time deadline, uint32_t servers) {
  struct State {
    Tally tally;
    std::vector<Response> answers;
  };
  auto state = std::make_shared<State>();
  servers = std::min(servers, server_count());
  state->answers.resize(servers);
  state->tally.Start(static_cast<int>(servers));
  const auto shared = std::make_shared<const Request>(request);
  for (uint32_t i = 0; i < servers; ++i) {
    Call<Request, Response>(method, i, what, shared, deadline, [state, i](absl::StatusOr<Response> answer) {
      if (answer.ok()) state->answers[i] = std::move(*answer);
      state->tally.Finish(answer.status());
    });
  }
  if (absl::Status status = state->tally.Wait(); !status.ok()) return status;
  return std::move(state->answers);
}

template <typename Request, typename Response>
std::shared_ptr<Answers<Response>> Router::Ask(Method<Request, Response> method, const std::string& what,
                                               const Request& request, absl::Time deadline) {
  auto answers = std::make_shared<Answers<Response>>(server_count());
  const auto shared = std::make_shared<const Request>(request);
  for (uint32_t i = 0; i < server_count(); ++i) {
    Call<Request, Response>(method, i, what, shared, deadline,
                            [answers, i](absl::StatusOr<Response> answer) { answers->Add(i, std::move(answer)); });
  }
  return answers;
}

}  // namespace ballast::client
