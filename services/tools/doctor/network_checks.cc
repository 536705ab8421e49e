// Ports of a server, and its peers.
#include <arpa/inet.h>
#include <netdb.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "ballast/proto/base/address.h"
#include "ballast/proto/model/protocol.h"
#include "ballast/proto/registry/roster.h"
#include "ballast/services/gateway/security/certificates.h"
#include "ballast/services/tools/cluster.h"
#include "ballast/services/tools/doctor/checks.h"

namespace ballast::services {
namespace {

// As the alert on certificates.
constexpr absl::Duration kEndsSoon = absl::Hours(14 * 24);

using Addresses = std::unique_ptr<addrinfo, void (*)(addrinfo*)>;
Addresses Resolve(const model::Address& address) {
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE;
  addrinfo* found = nullptr;
  if (getaddrinfo(address.host.c_str(), std::to_string(address.port).c_str(), &hints, &found) != 0) found = nullptr;
  return Addresses(found, [](addrinfo* list) {
    if (list != nullptr) freeaddrinfo(list);
  });
}

// 0, or the error of listening there.
int ListenError(const addrinfo& at) {
  const int socket_fd = socket(at.ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (socket_fd < 0) return errno;
  const auto close_at_end = absl::MakeCleanup([socket_fd] { close(socket_fd); });
  const int on = 1;
  setsockopt(socket_fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  return bind(socket_fd, at.ai_addr, at.ai_addrlen) == 0 && listen(socket_fd, 1) == 0 ? 0 : errno;
}

// `key`: of the configuration. Says who has a taken port where a Ballast server answers there.
Check CheckPort(const Subject& subject, const std::string& key, const std::string& text) {
  Check check{Verdict::kOk, key, absl::StrCat(text, " is free"), "a free port of this machine"};
  const auto address = model::ParseAddress(text, model::AddressUse::kListen);
  const Addresses at = address.ok() ? Resolve(*address) : Addresses(nullptr, [](addrinfo*) {});
  const int error = at == nullptr ? EADDRNOTAVAIL : ListenError(*at);
  if (error == 0) return check;
  check.verdict = Verdict::kBad;
  check.found = absl::StrCat(text, ": ", at == nullptr ? "no such host" : std::strerror(error));
  check.mend = absl::StrCat(key, ": another address of this machine");
  if (error == EACCES) check.mend = absl::StrCat(key, ": a port from 1024 on");
  if (error != EADDRINUSE) return check;
  check.mend = absl::StrCat("ss -ltnp 'sport = :", address->port, "' names the process that has it; stop that one, or ",
                            key, ": another port");
  if (key != "listen") return check;
  const std::vector<ServerView> views = LookAt({text}, subject.asking);
  if (!views[0].error.ok()) return check;
  check.verdict = Verdict::kNote;
  check.found = absl::StrCat(text, " is taken by the Ballast server '", views[0].status.server_id(), "', version ",
                             views[0].status.version());
  check.mend = "nothing, if that is this server; else listen: another port";
  return check;
}

bool OnlyThisMachine(const std::string& text) {
  const auto address = model::ParseAddress(text, model::AddressUse::kListen);
  if (!address.ok()) return true;
  const Addresses at = Resolve(*address);
  for (const addrinfo* one = at.get(); one != nullptr; one = one->ai_next) {
    if (one->ai_family == AF_INET) {
      const auto* v4 = reinterpret_cast<const sockaddr_in*>(one->ai_addr);
      if (ntohl(v4->sin_addr.s_addr) >> 24 != IN_LOOPBACKNET) return false;
    } else if (one->ai_family == AF_INET6) {
      const auto* v6 = reinterpret_cast<const sockaddr_in6*>(one->ai_addr);
      if (!IN6_IS_ADDR_LOOPBACK(&v6->sin6_addr)) return false;
    }
  }
  return true;
}

Check CheckExposure(const Config& config) {
  Check check{Verdict::kOk, "reach", "only this machine can reach it", "loopback, or a network of trusted machines"};
  if (OnlyThisMachine(config.listen)) return check;
  if (config.guard.tls.enabled() && config.guard.asks_identity()) {
    check.found = absl::StrCat(config.listen, ", by TLS, and clients have identities");
    return check;
  }
  check.verdict = Verdict::kNote;
  check.found = config.guard.tls.enabled()
                    ? absl::StrCat(config.listen, ": any client that reaches the port can read, train and drop jobs")
                : config.guard.asks_identity()
                    ? absl::StrCat(config.listen, ": without TLS, so that tokens of other machines are refused")
                    : absl::StrCat(config.listen,
                                   ": any client that reaches the port can read, train and drop jobs, without TLS");
  check.mend =
      "tls.certificate, tls.key and tls.client_ca; a firewall that admits only trainers, servers "
      "and operators; or listen: 127.0.0.1:7070";
  return check;
}

// The HTTP port tells names of jobs and figures, and changes nothing.
Check CheckHttpExposure(const Config& config) {
  Check check{Verdict::kOk, "HTTP reach", "only this machine can reach it", "loopback, or certificates"};
  if (OnlyThisMachine(config.metrics_listen)) return check;
  if (config.metrics_tls && !config.guard.tls.client_ca.empty()) {
    check.found = absl::StrCat(config.metrics_listen, ", by TLS, for clients with a certificate");
    return check;
  }
  check.verdict = Verdict::kNote;
  check.found = absl::StrCat(config.metrics_listen, ": any client that reaches the port sees all jobs and metrics",
                             config.metrics_tls ? "" : ", without TLS");
  check.mend = "metrics_tls: true with tls.client_ca; or metrics_listen: 127.0.0.1:9070";
  return check;
}

Check CheckCertificates(const CertificatePaths& paths) {
  Check check{Verdict::kOk, "certificates", "", "good files, valid for two more weeks"};
  const absl::Time now = absl::Now();
  const absl::StatusOr<Certificates> read = ReadCertificates(paths, now);
  if (!read.ok()) {
    check.verdict = Verdict::kBad;
    check.found = std::string(read.status().message());
    check.mend = "another file there; a server that runs keeps what it read before";
    return check;
  }
  const std::pair<absl::Time, const char*> first =
      std::min({std::make_pair(read->certificate_not_after, "tls.certificate"),
                std::make_pair(read->client_ca_not_after, "tls.client_ca"),
                std::make_pair(read->crl_not_after, "tls.crl_directory")},
               [](const auto& a, const auto& b) { return a.first < b.first; });
  check.found = absl::StrCat(first.second, " is the first to end, at ",
                             absl::FormatTime("%Y-%m-%d %H:%M UTC", first.first, absl::UTCTimeZone()));
  if (first.first - now >= kEndsSoon) return check;
  check.verdict = Verdict::kNote;
  check.mend = absl::StrCat("renew ", first.second, "; a running server reads it by itself");
  return check;
}

Check CheckRegistry(const Subject& subject) {
  const std::string& text = subject.config->discovery;
  Check check{Verdict::kOk, "registry", "", "etcd that answers"};
  registry::Registry etcd(*registry::ParseRegistryUrl(text));
  const auto entries = etcd.List(absl::Now() + subject.asking.timeout);
  if (entries.ok()) {
    check.found = absl::StrCat(text, " has ", entries->size(), entries->size() == 1 ? " server" : " servers");
    return check;
  }
  // The server starts without, and registers once etcd answers.
  check.verdict = Verdict::kNote;
  check.found = std::string(entries.status().message());
  check.mend =
      absl::StrCat("etcdctl --endpoints ", etcd.url().endpoints.front(), " endpoint health; or discovery: another");
  return check;
}

Checks CheckPeers(const Subject& subject) {
  const auto servers = registry::FindServers(subject.servers, subject.asking.timeout);
  if (!servers.ok()) {
    return {{Verdict::kNote, "peers", std::string(servers.status().message()), "servers that answer",
             "start them with `discovery`, or give --servers host:port,..."}};
  }
  Checks checks;
  for (const ServerView& view : LookAt(*servers, subject.asking)) {
    Check check{Verdict::kOk, absl::StrCat("peer ", view.address), "", absl::StrCat("version ", model::Version())};
    if (!view.error.ok()) {
      check.verdict = Verdict::kNote;
      check.found = absl::StrCat("no answer: ", view.error.message());
      check.mend = "start it, or take it out of --servers";
    } else {
      check.found = absl::StrCat("version ", view.status.version(), ", server '", view.status.server_id(), "'");
      if (view.status.version() != model::Version()) {
        check.verdict = Verdict::kNote;
        check.mend = "the same release of Ballast on all servers and trainers";
      }
    }
    checks.push_back(check);
  }
  return checks;
}

}  // namespace

// A server raises its soft limit to the hard one, keeps 1024 for files, and gives the rest to connections.
Check CheckDescriptors() {
  constexpr uint64_t kWanted = 4096;
  rlimit limit = {};
  getrlimit(RLIMIT_NOFILE, &limit);
  Check check{Verdict::kOk, "descriptors", absl::StrCat(limit.rlim_max), absl::StrCat("at least ", kWanted)};
  if (limit.rlim_max == RLIM_INFINITY) check.found = "unlimited";
  if (limit.rlim_max >= kWanted) return check;
  check.verdict = Verdict::kNote;
  absl::StrAppend(&check.found, ": fewer trainers can connect, one connection each");
  check.mend = "ulimit -Hn 524288; systemd: LimitNOFILE=524288; podman, docker: --ulimit nofile=524288";
  return check;
}

Checks CheckNetwork(const Subject& subject) {
  Checks checks;
  if (subject.config.has_value()) {
    checks.push_back(CheckPort(subject, "listen", subject.config->listen));
    checks.push_back(CheckPort(subject, "metrics_listen", subject.config->metrics_listen));
    checks.push_back(CheckExposure(*subject.config));
    checks.push_back(CheckHttpExposure(*subject.config));
    if (subject.config->guard.tls.enabled()) checks.push_back(CheckCertificates(subject.config->guard.tls));
    if (!subject.config->discovery.empty()) checks.push_back(CheckRegistry(subject));
  }
  checks.push_back(CheckDescriptors());
  const Checks peers = CheckPeers(subject);
  checks.insert(checks.end(), peers.begin(), peers.end());
  return checks;
}

}  // namespace ballast::services
