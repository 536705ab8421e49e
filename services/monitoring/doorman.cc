#include "ballast/services/monitoring/doorman.h"

#include <signal.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <map>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "ballast/proto/base/address.h"
#include "ballast/proto/base/listening_sockets.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/base/threads.h"

namespace ballast::services {
namespace {

// A client on a bad network sends a request of 1 KiB in far less; Prometheus gives a scrape 10 s by default.
constexpr absl::Duration kReadMax = absl::Seconds(5);
constexpr absl::Duration kWriteMax = absl::Seconds(10);
// After the answer, for what the client still sends: closed earlier, the kernel would reset the connection and the
// client might lose the end of the answer.
constexpr absl::Duration kLingerMax = absl::Seconds(1);
// Connections that the kernel holds until they are accepted; they cost the process nothing.
constexpr int kBacklog = 1024;
constexpr int kAnswerThreads = 2;

constexpr uint64_t kListener = 0, kWake = 1, kFirstConnection = 2;

}  // namespace

struct Doorman::Impl {
  enum class State { kReading, kAnswering, kSending, kLingering };
  struct Connection {
    explicit Connection(Line line) : line(std::move(line)) {}
    Line line;
    State state = State::kReading;
    absl::Time until;
    std::string request, answer;
    size_t sent = 0;
  };
  using Connections = std::map<uint64_t, Connection>;  // by number, thus by age
  // Threads that answer.
  struct Desk {
    explicit Desk(int threads) : executor(threads) {}
    ThreadExecutor executor;
    size_t wanted = 0;  // answers, also of connections that gave up their place meanwhile; the door's thread only
  };
  struct Answered {
    uint64_t number;  // of the connection
    Desk* desk;
    std::string bytes;
  };

  Impl(std::vector<int> listeners, Answer answer, IsQuick is_quick, std::unique_ptr<TlsSessions> tls)
      : answer(std::move(answer)),
        is_quick(std::move(is_quick)),
        tls(std::move(tls)),
        listeners(std::move(listeners)),
        wake(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)),
        epoll(::epoll_create1(EPOLL_CLOEXEC)) {
    for (const int listener : this->listeners) Watch(listener, kListener, EPOLLIN);
    Watch(wake, kWake, EPOLLIN);
  }
  ~Impl() {
    for (const int listener : listeners) ::close(listener);
    for (const int fd : {wake, epoll}) ::close(fd);
  }

  void Watch(int fd, uint64_t number, uint32_t events) const {
    epoll_event event{};
    event.events = events;
    event.data.u64 = number;
    (void)::epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event);
  }
  void Wake() const {
    const uint64_t one = 1;
    (void)!::write(wake, &one, sizeof one);
  }

  void Run();
  void Accept(int listener);
  // The connection to give up when there is no room: the oldest without a whole request, or the oldest of all.
  Connections::iterator Yielding();
  Connections::iterator Close(Connections::iterator at);
  void Go(Connections::iterator at);
  void Read(Connections::iterator at);
  void Send(Connections::iterator at);
  void TakeAnswers();
  void CloseLate();

  const Answer answer;
  const IsQuick is_quick;
  const std::unique_ptr<TlsSessions> tls;  // the door's thread only; null: in the clear
  std::string address;
  const std::vector<int> listeners;
  const int wake, epoll;

  // The door's thread only.
  Connections connections;
  uint64_t next_number = kFirstConnection;
  size_t unsent_bytes = 0;

  absl::Mutex mu;
  bool stopping ABSL_GUARDED_BY(mu) = false;
  std::vector<Answered> answers ABSL_GUARDED_BY(mu);

  std::thread door;
  Desk answering{kAnswerThreads}, quick{1};
};

void Doorman::Impl::Run() {
  // OpenSSL writes to sockets that their client has closed; the error is enough.
  sigset_t broken_pipe;
  sigemptyset(&broken_pipe);
  sigaddset(&broken_pipe, SIGPIPE);
  pthread_sigmask(SIG_BLOCK, &broken_pipe, nullptr);
  while (true) {
    absl::Duration wait = connections.empty() ? absl::InfiniteDuration() : kWriteMax;
    for (const auto& [number, connection] : connections) wait = std::min(wait, connection.until - absl::Now());
    // Rounded up, or the loop would turn idly for the last millisecond.
    const int wait_ms = wait == absl::InfiniteDuration()
                            ? -1
                            : static_cast<int>(absl::ToInt64Milliseconds(std::max(wait, absl::ZeroDuration()))) + 1;
    std::array<epoll_event, 64> events;
    const int count = ::epoll_wait(epoll, events.data(), static_cast<int>(events.size()), wait_ms);
    for (int i = 0; i < count; ++i) {
      if (events[i].data.u64 == kListener) {
        for (const int listener : listeners) Accept(listener);
      } else if (events[i].data.u64 == kWake) {
        uint64_t ignored = 0;
        (void)!::read(wake, &ignored, sizeof ignored);
      } else if (const auto at = connections.find(events[i].data.u64); at != connections.end()) {
        Go(at);
      }
    }
    {
      absl::MutexLock lock(&mu);
      if (stopping) return;
    }
    TakeAnswers();
    CloseLate();
  }
}

Doorman::Impl::Connections::iterator Doorman::Impl::Close(Connections::iterator at) {
  unsent_bytes -= at->second.answer.size() - at->second.sent;
  return connections.erase(at);  // closes the descriptor, and epoll forgets it with that
}

Doorman::Impl::Connections::iterator Doorman::Impl::Yielding() {
  const auto idle = std::find_if(connections.begin(), connections.end(),
                                 [](const auto& entry) { return entry.second.state == State::kReading; });
  return idle == connections.end() ? connections.begin() : idle;
}

void Doorman::Impl::Accept(int listener) {
  while (true) {
    const int fd = ::accept4(listener, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0 && errno == EINTR) continue;
    if (fd < 0 && (errno == EMFILE || errno == ENFILE) && !connections.empty()) {
      Close(Yielding());
      continue;
    }
    if (fd < 0 && errno != EAGAIN && errno != ECONNABORTED) {
      // No descriptor, and none to give up: the listener would be ready again at once.
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    if (fd < 0) return;
    if (connections.size() == kConnectionsMax) Close(Yielding());
    ssl_st* const session = tls == nullptr ? nullptr : tls->Accept(fd);
    if (tls != nullptr && session == nullptr) {
      ::close(fd);
      continue;
    }
    const auto at = connections.emplace_hint(connections.end(), next_number++, Line(fd, session));
    at->second.until = absl::Now() + kReadMax;
    Watch(fd, at->first, EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET);
    Go(at);  // a request that is there already is not pushed out by the next connections
  }
}

void Doorman::Impl::Go(Connections::iterator at) {
  switch (at->second.state) {
    case State::kReading:
      return Read(at);
    case State::kAnswering:
      return;  // the client may have hung up; writing tells
    case State::kSending:
      return Send(at);
    case State::kLingering: {
      if (at->second.line.Drain() == 0 || errno != EAGAIN) Close(at);
      return;
    }
  }
}

void Doorman::Impl::Read(Connections::iterator at) {
  Connection& connection = at->second;
  std::array<char, 4096> piece;
  while (connection.request.size() <= kRequestBytesMax) {
    const ssize_t n = connection.line.Receive(piece.data(), piece.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) return;
    if (n <= 0) {
      Close(at);
      return;
    }
    const size_t before = std::max<size_t>(connection.request.size(), 3) - 3;
    connection.request.append(piece.data(), static_cast<size_t>(n));
    const size_t end = connection.request.find("\r\n\r\n", before);
    if (end == std::string::npos) continue;
    connection.request.resize(end + 4);  // a body, or a second request, is not read
    Desk* const desk = is_quick && is_quick(connection.request) ? &quick : &answering;
    if (desk->wanted == kConnectionsMax) break;
    ++desk->wanted;
    connection.state = State::kAnswering;
    connection.until = absl::InfiniteFuture();
    const auto work = [this, desk, number = at->first, request = std::move(connection.request),
                       certified = connection.line.certified()] {
      std::string bytes = answer(request, certified);
      {
        absl::MutexLock lock(&mu);
        answers.push_back({number, desk, std::move(bytes)});
      }
      Wake();
    };
    // Where no thread can be made, the others wait: /readyz and /metrics tell of the limit.
    desk->executor.Prepare().ok() ? desk->executor.Post(work) : work();
    return;
  }
  Close(at);
}

void Doorman::Impl::TakeAnswers() {
  std::vector<Answered> ready;
  {
    absl::MutexLock lock(&mu);
    ready.swap(answers);
  }
  for (auto& [number, desk, bytes] : ready) {
    --desk->wanted;
    const auto at = connections.find(number);
    if (at == connections.end()) continue;  // gave up its place
    at->second.answer = std::move(bytes);
    at->second.state = State::kSending;
    at->second.until = absl::Now() + kWriteMax;
    unsent_bytes += at->second.answer.size();
    Send(at);
  }
  for (auto at = connections.begin(); unsent_bytes > kUnsentBytesMax && at != connections.end();) {
    at = at->second.state == State::kSending ? Close(at) : std::next(at);
  }
}

void Doorman::Impl::Send(Connections::iterator at) {
  Connection& connection = at->second;
  while (connection.sent < connection.answer.size()) {
    const ssize_t n =
        connection.line.Send(connection.answer.data() + connection.sent, connection.answer.size() - connection.sent);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) return;
    if (n <= 0) {
      Close(at);
      return;
    }
    connection.sent += static_cast<size_t>(n);
    unsent_bytes -= static_cast<size_t>(n);
  }
  connection.answer.clear();
  connection.answer.shrink_to_fit();
  connection.sent = 0;
  connection.line.EndSending();
  connection.state = State::kLingering;
  connection.until = absl::Now() + kLingerMax;
  Go(at);
}

void Doorman::Impl::CloseLate() {
  const absl::Time now = absl::Now();
  for (auto at = connections.begin(); at != connections.end();)
    at = at->second.until <= now ? Close(at) : std::next(at);
}

absl::StatusOr<std::unique_ptr<Doorman>> Doorman::Start(const std::string& listen, Answer answer,
                                                        std::unique_ptr<TlsSessions> tls, IsQuick is_quick) {
  BALLAST_ASSIGN_OR_RETURN(model::Address address, model::ParseAddress(listen, model::AddressUse::kListen));
  const absl::StatusOr<std::vector<int>> listeners = model::ListenOn(&address, kBacklog);
  if (!listeners.ok()) {
    return model::Error(
        absl::StatusCode::kFailedPrecondition, model::kBadConfig,
        absl::StrCat("cannot serve metrics on '", listen,
                     "': the port is in use, or the address does not belong to this machine; choose another "
                     "`metrics_listen` (",
                     listeners.status().message(), ")"));
  }
  auto impl = std::make_unique<Impl>(*listeners, std::move(answer), std::move(is_quick), std::move(tls));
  impl->address = model::FormatAddress(address);
  BALLAST_ASSIGN_OR_RETURN(impl->door, model::MakeThread([impl = impl.get()] { impl->Run(); }));
  return std::unique_ptr<Doorman>(new Doorman(std::move(impl)));
}

Doorman::Doorman(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

Doorman::~Doorman() {
  {
    absl::MutexLock lock(&impl_->mu);
    impl_->stopping = true;
  }
  impl_->Wake();
  impl_->door.join();
  for (Impl::Desk* const desk : {&impl_->answering, &impl_->quick}) desk->executor.Join();
}

const std::string& Doorman::address() const { return impl_->address; }

}  // namespace ballast::services
