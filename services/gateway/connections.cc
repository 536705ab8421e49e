#include "ballast/services/gateway/connections.h"

#include <dirent.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <spdlog/spdlog.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/time/clock.h"
#include "ballast/proto/base/listening_sockets.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/base/threads.h"
#include "ballast/services/counters/process_counters.h"

namespace ballast::services {
namespace {

// Connections that the kernel holds until they are accepted; they cost the process nothing.
constexpr int kBacklog = 4096;
// More than the ranks of a large job have; each that is idle takes 25 KiB in gRPC.
constexpr uint64_t kConnectionsMax = 16384;
// Kept free for jobs, their files, and the HTTP port.
constexpr uint64_t kDescriptorsKept = 1024;
constexpr int kTickMs = 100;
constexpr absl::Duration kLookInterval = absl::Seconds(1);
// The first byte of each connection by TLS: the type of its record (RFC 8446, 5.1).
constexpr char kTlsHandshake = 22;

uint64_t OpenDescriptors() {
  DIR* const directory = ::opendir("/proc/self/fd");
  if (directory == nullptr) return 0;
  uint64_t count = 0;
  while (::readdir(directory) != nullptr) ++count;
  ::closedir(directory);
  return count;
}

uint64_t AllowedConnections() {
  rlimit limit{};
  (void)::getrlimit(RLIMIT_NOFILE, &limit);
  const uint64_t open = OpenDescriptors();
  const uint64_t free = limit.rlim_cur > open ? limit.rlim_cur - open : 0;
  return std::clamp<uint64_t>(free - std::min(kDescriptorsKept, free / 2), 4, kConnectionsMax);
}

uint64_t CookieOf(int fd) {
  uint64_t cookie = 0;
  socklen_t length = sizeof cookie;
  return ::getsockopt(fd, SOL_SOCKET, SO_COOKIE, &cookie, &length) == 0 ? cookie : 0;
}

std::string WithoutScope(const std::string& peer) {
  if (peer.find('%') == std::string::npos) return peer;
  std::string plain = absl::StrReplaceAll(peer, {{"%5B", "["}, {"%5D", "]"}, {"%25", "%"}});
  const size_t scope = plain.find('%'), end = plain.find(']');
  if (scope != std::string::npos && end != std::string::npos && scope < end) plain.erase(scope, end - scope);
  return plain;
}

// Ends the socket with this cookie, which gRPC may close at any moment: then the number is another's. `spare`, which
// always is a descriptor, becomes the same socket's for as long as it is looked at, and then `idle`'s.
void ShutDown(int fd, uint64_t cookie, int spare, int idle) {
  if (::dup3(fd, spare, O_CLOEXEC) < 0) return;
  if (CookieOf(spare) == cookie) (void)::shutdown(spare, SHUT_RDWR);
  (void)::dup3(idle, spare, O_CLOEXEC);
}

void Watch(int epoll, int fd, uint32_t events, int operation = EPOLL_CTL_ADD) {
  epoll_event event{};
  event.events = events;
  event.data.fd = fd;
  (void)::epoll_ctl(epoll, operation, fd, &event);
}

// Somebody waits to be accepted.
bool IsAwaited(int listener) {
  pollfd entry{.fd = listener, .events = POLLIN, .revents = 0};
  return ::poll(&entry, 1, 0) > 0;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Connections>> Connections::Listen(const model::Address& address, uint64_t max) {
  model::Address taken = address;
  BALLAST_ASSIGN_OR_RETURN(std::vector<int> listeners, model::ListenOn(&taken, kBacklog));
  return std::unique_ptr<Connections>(
      new Connections(std::move(taken), std::move(listeners), max > 0 ? max : AllowedConnections()));
}

Connections::Connections(model::Address address, std::vector<int> listeners, uint64_t max)
    : address_(std::move(address)),
      listeners_(std::move(listeners)),
      max_(max),
      epoll_(::epoll_create1(EPOLL_CLOEXEC)),
      wake_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)),
      spare_(::fcntl(wake_, F_DUPFD_CLOEXEC, 0)) {
  Watch(epoll_, wake_, EPOLLIN);
  for (const int listener : listeners_) Watch(epoll_, listener, EPOLLIN);
  OfProcess().connections_max = max_;
}

Connections::~Connections() {
  Stop();
  for (const int listener : listeners_) ::close(listener);
  for (const int fd : {spare_, wake_, epoll_}) ::close(fd);
  OfProcess().connections = 0;
}

absl::Status Connections::Start(std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> grpc,
                                std::function<void()> tick, std::function<void(const std::string&)> refuse_plain) {
  grpc_ = std::move(grpc);
  tick_ = std::move(tick);
  refuse_plain_ = std::move(refuse_plain);
  if (epoll_ < 0 || wake_ < 0 || spare_ < 0) {
    return model::Error(absl::StatusCode::kResourceExhausted, model::kLimit,
                        "the server lacks descriptors for its own use; raise the limit of open files");
  }
  BALLAST_ASSIGN_OR_RETURN(thread_, model::MakeThread([this] { Run(); }));
  return absl::OkStatus();
}

void Connections::Stop() {
  {
    absl::MutexLock lock(&mu_);
    stopping_ = true;
  }
  Wake();
  if (thread_.joinable()) thread_.join();
  absl::MutexLock lock(&mu_);
  for (const auto& [fd, connection] : connections_) {
    if (connection.silent) ::close(fd);
  }
  connections_.clear();
  by_peer_.clear();
  known_.clear();
  all_known_ = 0;
}

void Connections::Wake() {
  const uint64_t one = 1;
  (void)!::write(wake_, &one, sizeof one);
}

void Connections::Run() {
  absl::Time looked = absl::Now(), ticked = looked;
  while (true) {
    std::array<epoll_event, 64> events;
    const int count = ::epoll_wait(epoll_, events.data(), static_cast<int>(events.size()), kTickMs);
    {
      absl::MutexLock lock(&mu_);
      if (stopping_) return;
    }
    bool woken = false;
    for (int i = 0; i < count; ++i) {
      const int fd = events[i].data.fd;
      if (std::find(listeners_.begin(), listeners_.end(), fd) != listeners_.end()) {
        Accept(fd);
      } else if (fd != wake_) {
        Greet(fd);
      } else {
        uint64_t times = 0;
        woken = ::read(wake_, &times, sizeof times) > 0;
      }
    }
    const absl::Time now = absl::Now();
    if (woken || now - ticked >= absl::Milliseconds(kTickMs)) {
      ticked = now;
      tick_();
    }
    if (now - looked >= kLookInterval) {
      looked = now;
      EndOld();
      if (!listening_) ListenAgain(true);
    }
  }
}

void Connections::ListenAgain(bool on) {
  listening_ = on;
  for (const int listener : listeners_) Watch(epoll_, listener, on ? uint32_t{EPOLLIN} : 0U, EPOLL_CTL_MOD);
}

void Connections::Accept(int listener) {
  while (true) {
    absl::MutexLock lock(&mu_);
    if (connections_.size() >= max_ && !IsAwaited(listener)) return;
    if (connections_.size() >= max_ && !MakeRoom()) {
      // Whoever comes waits in the kernel until a connection ends.
      spdlog::warn("all {} connections are in use by clients that were let in; others wait", max_);
      return ListenAgain(false);
    }
    sockaddr_storage from{};
    socklen_t length = sizeof from;
    const int fd = ::accept4(listener, reinterpret_cast<sockaddr*>(&from), &length, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0 && (errno == EINTR || errno == ECONNABORTED)) continue;
    if (fd < 0 && errno != EAGAIN) {
      spdlog::warn("cannot accept a connection: {}; {} are open, {} may be", std::strerror(errno), connections_.size(),
                   max_);
      (void)MakeRoom();
      return ListenAgain(false);
    }
    if (fd < 0) return;
    std::string peer = model::PeerName(from);
    if (peer == tried_) {
      tried_.clear();
      ::close(fd);
      continue;
    }
    if (const auto old = connections_.find(fd); old != connections_.end()) Forget(old);  // gRPC closed it
    Connection& connection = connections_[fd];
    connection.cookie = CookieOf(fd);
    connection.since = absl::Now();
    connection.peer = std::move(peer);
    by_peer_[connection.peer] = fd;
    OfProcess().connections = connections_.size();
    Watch(epoll_, fd, EPOLLIN | EPOLLRDHUP);
  }
}

// The oldest strangers yield, whatever they have said: whoever comes needs some time to say something. Many at once,
// since finding them takes a look at all.
bool Connections::MakeRoom() {
  std::vector<ByDescriptor::iterator> yielding;
  for (auto at = connections_.begin(); at != connections_.end();) {
    const auto next = std::next(at);
    if (!at->second.silent && CookieOf(at->first) != at->second.cookie) {
      Forget(at);
    } else if (!at->second.known()) {
      yielding.push_back(at);
    }
    at = next;
  }
  if (connections_.size() < max_) return true;
  const auto end = yielding.begin() + static_cast<ptrdiff_t>(std::min<size_t>(yielding.size(), max_ / 16 + 1));
  std::partial_sort(yielding.begin(), end, yielding.end(),
                    [](const auto& a, const auto& b) { return a->second.since < b->second.since; });
  for (auto at = yielding.begin(); at != end; ++at) {
    OfProcess().ended_strangers.fetch_add(1, std::memory_order_relaxed);
    End(*at);
  }
  return !yielding.empty();
}

void Connections::Forget(ByDescriptor::iterator at) {
  if (const auto peer = by_peer_.find(at->second.peer); peer != by_peer_.end() && peer->second == at->first) {
    by_peer_.erase(peer);
  }
  if (at->second.known()) {
    --all_known_;
    const auto known = known_.find(at->second.who);
    if (--known->second == 0) known_.erase(known);
  }
  connections_.erase(at);
}

void Connections::End(ByDescriptor::iterator at) {
  // gRPC closes the descriptors that it was given, once it sees their end.
  if (at->second.silent) {
    ::close(at->first);
  } else {
    ShutDown(at->first, at->second.cookie, spare_, wake_);
  }
  Forget(at);
}

void Connections::Greet(int fd) {
  grpc::experimental::ExternalConnectionAcceptor::NewConnectionParameters connection;
  {
    absl::MutexLock lock(&mu_);
    const auto at = connections_.find(fd);
    if (at == connections_.end() || !at->second.silent) return;
    char first = 0;
    const ssize_t received = ::recv(fd, &first, 1, MSG_PEEK);
    if (received == 0 || (received < 0 && errno != EAGAIN && errno != EINTR)) return End(at);  // 0: the client is gone
    if (received < 0) return;
    if (refuse_plain_ && first != kTlsHandshake) {
      refuse_plain_(at->second.peer);
      return End(at);
    }
    at->second.silent = false;
    (void)::epoll_ctl(epoll_, EPOLL_CTL_DEL, fd, nullptr);
    const int on = 1;
    (void)::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    connection.listener_fd = listeners_[0];
    connection.fd = fd;
  }
  grpc_->HandleNewConnection(&connection);
}

void Connections::EndOld() {
  absl::MutexLock lock(&mu_);
  const absl::Time now = absl::Now();
  for (auto at = connections_.begin(); at != connections_.end();) {
    const auto next = std::next(at);
    const Connection& connection = at->second;
    if (!connection.silent && CookieOf(at->first) != connection.cookie) {
      Forget(at);
    } else if (!connection.known() && now - connection.since > (connection.silent ? kSilentMax : kStrangerMax)) {
      OfProcess().ended_strangers.fetch_add(1, std::memory_order_relaxed);
      End(at);
    }
    at = next;
  }
  OfProcess().connections = connections_.size();
}

absl::Status Connections::Know(const std::string& peer, const std::string& who) {
  const std::string plain = WithoutScope(peer);
  absl::MutexLock lock(&mu_);
  const auto at = by_peer_.find(plain);
  if (at == by_peer_.end()) return absl::OkStatus();
  Connection& connection = connections_.at(at->second);
  if (connection.known()) return absl::OkStatus();
  const auto held = known_.find(who);
  const uint64_t own = held == known_.end() ? 0 : held->second;
  const uint64_t left = max_ - std::min(max_, all_known_ - own);
  if (own >= std::max<uint64_t>(left - left / 8, 1)) {
    return model::Error(absl::StatusCode::kUnavailable, model::kBusy,
                        absl::StrCat("this caller has ", own, " of the ", max_, " connections that this server takes (",
                                     all_known_ - own, " are others'): close some, or raise `connections`"));
  }
  connection.who = who;
  ++known_[who];
  ++all_known_;
  return absl::OkStatus();
}

absl::Status Connections::Try(absl::Duration patience) {
  // The wildcard address leads to this machine.
  sockaddr_storage to{};
  socklen_t length = sizeof to;
  if (::getsockname(listeners_[0], reinterpret_cast<sockaddr*>(&to), &length) != 0) {
    return absl::UnavailableError("the listening socket is gone");
  }
  const int fd = ::socket(to.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) return absl::UnavailableError(absl::StrCat("cannot make a socket: ", std::strerror(errno)));
  {
    absl::MutexLock lock(&mu_);  // so that the accepting thread knows the peer before it comes
    (void)::connect(fd, reinterpret_cast<sockaddr*>(&to), length);
    sockaddr_storage own{};
    socklen_t own_length = sizeof own;
    (void)::getsockname(fd, reinterpret_cast<sockaddr*>(&own), &own_length);
    tried_ = model::PeerName(own);
    const auto accepted = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return tried_.empty(); };
    (void)mu_.AwaitWithTimeout(absl::Condition(&accepted), patience);
  }
  ::close(fd);
  absl::MutexLock lock(&mu_);
  if (std::exchange(tried_, "").empty()) return absl::OkStatus();
  return absl::UnavailableError(
      absl::StrCat("the port accepts no connection; ", connections_.size(), " of ", max_, " are open"));
}

}  // namespace ballast::services
