#include "ballast/services/monitoring/http_port.h"

#include <httplib.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "ballast/proto/base/status.h"
#include "ballast/services/counters/step_log.h"
#include "ballast/services/monitoring/cluster_view.h"
#include "ballast/services/monitoring/doorman.h"
#include "ballast/services/monitoring/families.h"
#include "ballast/services/monitoring/page/page.h"
#include "ballast/services/monitoring/show.h"

namespace ballast::services {
namespace {

constexpr char kLivez[] = "/livez", kReadyz[] = "/readyz";
constexpr char kPlain[] = "text/plain; charset=utf-8";
constexpr char kJson[] = "application/json";
constexpr char kCertificateExpected[] =
    "expected a client certificate from a CA of the server's tls.client_ca; /livez and /readyz need none\n";
constexpr char kPrometheus[] = "text/plain; version=0.0.4; charset=utf-8";

struct Answer {
  std::string body;
  const char* type = kPlain;
  int status = 200;
};
using Route = std::function<Answer(const httplib::Request&)>;

// One request in memory, and its answer: the doorman alone touches sockets.
class MemoryStream final : public httplib::Stream {
 public:
  explicit MemoryStream(const std::string& request) : request_(request) {}
  bool is_readable() const override { return true; }
  bool is_writable() const override { return true; }
  ssize_t read(char* to, size_t size) override {
    const size_t n = std::min(size, request_.size() - read_);
    std::memcpy(to, request_.data() + read_, n);
    read_ += n;
    return static_cast<ssize_t>(n);
  }
  ssize_t write(const char* from, size_t size) override {
    answer_.append(from, size);
    return static_cast<ssize_t>(size);
  }
  void get_remote_ip_and_port(std::string& ip, int& port) const override { ip = "", port = 0; }
  void get_local_ip_and_port(std::string& ip, int& port) const override { ip = "", port = 0; }
  socket_t socket() const override { return INVALID_SOCKET; }
  std::string Take() { return std::move(answer_); }

 private:
  const std::string& request_;
  size_t read_ = 0;
  std::string answer_;
};

// httplib's reading of requests and writing of answers, without its sockets and threads.
class Protocol final : private httplib::Server {
 public:
  // `otherwise`: the answer at other paths than those of `routes`.
  Protocol(std::map<std::string, Route> routes, Answer otherwise)
      : routes_(std::move(routes)), otherwise_(std::move(otherwise)) {
    set_default_headers({{"Cache-Control", "no-store"},
                         {"Content-Security-Policy", "default-src 'self'"},
                         {"X-Content-Type-Options", "nosniff"}});
    set_pre_routing_handler([this](const httplib::Request& request, httplib::Response& response) {
      Respond(request, &response);
      return HandlerResponse::Handled;
    });
  }

  std::string Process(const std::string& request) {
    MemoryStream stream(request);
    bool closed = false;
    // A list of many ranges would be answered with as many copies.
    process_request(stream, /*close_connection=*/true, closed, [](httplib::Request& r) { r.ranges.clear(); });
    return stream.Take();
  }

 private:
  void Respond(const httplib::Request& request, httplib::Response* response) const {
    const auto route = routes_.find(request.path);
    if (request.method != "GET" && request.method != "HEAD") {
      response->status = 405;
      response->set_header("Allow", "GET, HEAD");
      response->set_content("this port only reads: send GET or HEAD\n", kPlain);
    } else {
      Answer answer = route == routes_.end() ? otherwise_ : route->second(request);
      response->status = answer.status;
      response->set_content(std::move(answer.body), answer.type);
    }
  }

  const std::map<std::string, Route> routes_;
  const Answer otherwise_;
};

// By the request's line, "GET /livez HTTP/1.1".
bool IsProbe(const std::string& request) {
  const size_t begin = request.find(' ') + 1;
  const absl::string_view path = absl::string_view(request).substr(begin, request.find_first_of(" ?\r", begin) - begin);
  return path == kLivez || path == kReadyz;
}

Answer NotFound(const std::map<std::string, Route>& routes) {
  std::string known;
  for (const auto& [path, ignored] : routes) absl::StrAppend(&known, " ", path);
  return {absl::StrCat("no such path; expected one of", known, "\n"), kPlain, 404};
}

}  // namespace

struct HttpPort::Impl {
  Impl(const RecoveryProgress* progress, const SecurityCounters* security) : progress(progress), security(security) {}

  // What an answer is made of. The server stays until the answer is done, which may wait for a job: without the lock.
  struct Seen {
    std::shared_ptr<const StateServer> server;  // null: not ready, or stopping
    ServerState state;
    std::string rpc_address;
  };
  Seen See() const {
    absl::MutexLock lock(&mu);
    if (server != nullptr) ++readers;
    return {{server, [this](const StateServer* read) { Leave(read); }}, state, rpc_address};
  }
  void Leave(const StateServer* read) const {
    absl::MutexLock lock(&mu);
    if (read != nullptr) --readers;
  }
  void AwaitReaders() const {
    const auto none = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) { return readers == 0; };
    absl::MutexLock lock(&mu, absl::Condition(&none));
  }
  v1::GetServerStatusResponse Status(const Seen& seen) const {
    v1::GetServerStatusResponse status;
    if (seen.server != nullptr) status = seen.server->Status();
    status.set_state(ServerStateName(seen.state));
    status.set_recovery_done_bytes(progress->done_bytes);
    status.set_recovery_total_bytes(progress->total_bytes);
    return status;
  }
  Answer Ready() const {
    absl::MutexLock lock(&mu);
    const std::string wrong = fault ? fault() : "";
    return {absl::StrCat("{\"state\":\"", ServerStateName(state), "\",\"recovery_done_bytes\":",
                         progress->done_bytes.load(), ",\"recovery_total_bytes\":", progress->total_bytes.load(),
                         wrong.empty() ? "" : absl::StrCat(",\"fault\":", Quote(wrong)), "}\n"),
            kJson, state == ServerState::kReady && wrong.empty() ? 200 : 503};
  }
  Answer Metrics() const {
    const Seen seen = See();
    return {ShowMetrics(seen.server.get(), seen.state, *progress, security), kPrometheus};
  }
  Answer StatusJson() const {
    const Seen seen = See();
    return {ShowJson(
                Judge({{.address = seen.rpc_address, .error = absl::OkStatus(), .status = Status(seen)}}, Asked::kOne)),
            kJson};
  }
  Answer StepsJson(const httplib::Request& request) const {
    v1::GetStepsRequest wanted;
    wanted.set_job(request.get_param_value("job"));
    uint32_t last = StepLog::kStepsShown;
    if (request.has_param("last") && !absl::SimpleAtoi(request.get_param_value("last"), &last)) {
      return {"last: expected a number of steps\n", kPlain, 400};
    }
    wanted.set_last(last);
    v1::GetStepsResponse steps;
    if (const Seen seen = See(); seen.server != nullptr) steps = seen.server->Steps(wanted);
    return {ShowMessage(steps) + "\n", kJson};
  }
  // Of Kubernetes, which tell of no job, and wait for none.
  std::map<std::string, Route> Probes() const {
    return {{kLivez, [](const auto&) { return Answer{"ok\n"}; }}, {kReadyz, [this](const auto&) { return Ready(); }}};
  }
  std::map<std::string, Route> Routes() const {
    std::map<std::string, Route> routes = Probes();
    routes["/metrics"] = [this](const auto&) { return Metrics(); };
    routes["/status.json"] = [this](const auto&) { return StatusJson(); };
    routes["/steps.json"] = [this](const httplib::Request& request) { return StepsJson(request); };
    for (const PageFile& file : PageFiles()) {
      routes[std::string(file.path)] = [&file](const auto&) { return Answer{std::string(file.bytes), file.type}; };
    }
    return routes;
  }

  const RecoveryProgress* const progress;
  const SecurityCounters* const security;
  mutable absl::Mutex mu;
  ServerState state ABSL_GUARDED_BY(mu) = ServerState::kRecovering;
  const StateServer* server ABSL_GUARDED_BY(mu) = nullptr;
  mutable int readers ABSL_GUARDED_BY(mu) = 0;  // answers under way that read `server`, or read it before Withdraw
  std::string rpc_address ABSL_GUARDED_BY(mu);
  std::function<std::string()> fault ABSL_GUARDED_BY(mu);
  Protocol protocol{Routes(), NotFound(Routes())};
  // For clients without a certificate, where the port asks for one.
  Protocol probes{Probes(), {kCertificateExpected, kPlain, 403}};
  std::unique_ptr<Doorman> doorman;  // last: its threads use what stands above
};

absl::StatusOr<std::unique_ptr<HttpPort>> HttpPort::Start(const std::string& listen, const RecoveryProgress* progress,
                                                          const SecurityCounters* security, Guard* guard) {
  auto impl = std::make_unique<Impl>(progress, security);
  std::unique_ptr<TlsSessions> tls;
  if (guard != nullptr) {
    BALLAST_ASSIGN_OR_RETURN(tls, TlsSessions::Make(guard));
  }
  const bool asks = guard != nullptr && !guard->certificates()->paths().client_ca.empty();
  const auto answer = [impl = impl.get(), asks](const std::string& request, bool certified) {
    return (asks && !certified ? impl->probes : impl->protocol).Process(request);
  };
  BALLAST_ASSIGN_OR_RETURN(impl->doorman, Doorman::Start(listen, answer, std::move(tls), IsProbe));
  return std::unique_ptr<HttpPort>(new HttpPort(std::move(impl)));
}

HttpPort::HttpPort(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
HttpPort::~HttpPort() = default;

void HttpPort::Serve(const StateServer* state, const std::string& address, std::function<std::string()> fault) {
  absl::MutexLock lock(&impl_->mu);
  impl_->server = state;
  impl_->rpc_address = address;
  impl_->fault = std::move(fault);
  impl_->state = ServerState::kReady;
}

void HttpPort::Withdraw() {
  absl::MutexLock lock(&impl_->mu);
  impl_->server = nullptr;
  impl_->fault = nullptr;
  impl_->state = ServerState::kStopping;
}

void HttpPort::AwaitAnswers() { impl_->AwaitReaders(); }

const std::string& HttpPort::address() const { return impl_->doorman->address(); }

}  // namespace ballast::services
