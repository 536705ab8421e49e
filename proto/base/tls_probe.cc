#include "ballast/proto/base/tls_probe.h"

#include <netdb.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/ssl.h>
#include <openssl/x509v3.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "ballast/proto/base/broken_pipe.h"
#include "ballast/proto/base/descriptor.h"
#include "ballast/proto/base/status.h"

namespace ballast::model {
namespace {

struct Free {
  void operator()(BIO* bio) const { BIO_free(bio); }
  void operator()(X509* certificate) const { X509_free(certificate); }
  void operator()(EVP_PKEY* key) const { EVP_PKEY_free(key); }
  void operator()(SSL_CTX* context) const { SSL_CTX_free(context); }
  void operator()(SSL* tls) const { SSL_free(tls); }
  void operator()(addrinfo* found) const { freeaddrinfo(found); }
};
template <typename T>
using Owned = std::unique_ptr<T, Free>;

// How long the server may take to refuse the client once the client takes the handshake for done, as in TLS 1.3.
constexpr absl::Duration kRefusalWait = absl::Milliseconds(500);

Owned<BIO> Reading(const std::string& text) {
  return Owned<BIO>(BIO_new_mem_buf(text.data(), static_cast<int>(text.size())));
}

std::string Show(const X509_NAME* name) {
  char text[256] = {};
  return name == nullptr || X509_NAME_oneline(name, text, sizeof(text)) == nullptr ? "?" : text;
}

std::string Show(absl::Time time) { return absl::FormatTime("%Y-%m-%dT%H:%M:%SZ", time, absl::UTCTimeZone()); }
std::string Now() { return Show(absl::Now()); }

std::string Show(const ASN1_TIME* time) {
  tm parts = {};
  return ASN1_TIME_to_tm(time, &parts) == 1 ? Show(absl::FromTM(parts, absl::UTCTimeZone())) : "?";
}

// The names of a certificate, as OpenSSL spells them: "DNS:a, IP Address:10.0.0.1".
std::string AlternativeNames(X509* certificate) {
  const int at = X509_get_ext_by_NID(certificate, NID_subject_alt_name, -1);
  const Owned<BIO> out(BIO_new(BIO_s_mem()));
  if (at < 0 || X509V3_EXT_print(out.get(), X509_get_ext(certificate, at), 0, 0) != 1) return "no names";
  char* bytes = nullptr;
  const long size = BIO_get_mem_data(out.get(), &bytes);
  return std::string(bytes, static_cast<size_t>(size));
}

std::string Show(X509* certificate) {
  return absl::StrCat(Show(X509_get_subject_name(certificate)), " for ", AlternativeNames(certificate), ", issued by ",
                      Show(X509_get_issuer_name(certificate)), ", valid from ", Show(X509_get0_notBefore(certificate)),
                      " to ", Show(X509_get0_notAfter(certificate)));
}

std::vector<Owned<X509>> ParseAll(const std::string& pem) {
  std::vector<Owned<X509>> all;
  const Owned<BIO> bio = Reading(pem);
  while (X509* one = PEM_read_bio_X509(bio.get(), nullptr, nullptr, nullptr)) all.emplace_back(one);
  ERR_clear_error();
  return all;
}

bool AwaitSocket(int fd, short events, absl::Time deadline) {
  pollfd wanted = {fd, events, 0};
  const absl::Duration left = std::max(deadline - absl::Now(), absl::ZeroDuration());
  return poll(&wanted, 1, static_cast<int>(absl::ToInt64Milliseconds(left))) == 1;
}

// -1: nobody answers.
Descriptor Connect(const Address& server, absl::Time deadline) {
  addrinfo hints = {}, *raw = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  if (getaddrinfo(server.host.c_str(), std::to_string(server.port).c_str(), &hints, &raw) != 0) return Descriptor();
  const Owned<addrinfo> found(raw);
  for (const addrinfo* at = found.get(); at != nullptr; at = at->ai_next) {
    Descriptor socket(::socket(at->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, at->ai_protocol));
    if (socket.get() < 0) continue;
    int error = connect(socket.get(), at->ai_addr, at->ai_addrlen) == 0 ? 0 : errno;
    if (error == EINPROGRESS) {
      socklen_t size = sizeof(error);
      if (!AwaitSocket(socket.get(), POLLOUT, deadline)) continue;
      if (getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &size) != 0) continue;
    }
    if (error == 0) return socket;
  }
  return Descriptor();
}

// Calls `step` until OpenSSL no longer waits for the socket. Returns its last result.
template <typename Step>
int Drive(SSL* tls, int fd, absl::Time deadline, const Step& step) {
  for (;;) {
    ERR_clear_error();
    const int result = step();
    const int error = result > 0 ? SSL_ERROR_NONE : SSL_get_error(tls, result);
    const bool waits = error == SSL_ERROR_WANT_READ || error == SSL_ERROR_WANT_WRITE;
    if (!waits || !AwaitSocket(fd, error == SSL_ERROR_WANT_READ ? POLLIN : POLLOUT, deadline)) return result;
  }
}

class Probe {
 public:
  Probe(const Address& server, const AccessContent& access) : server_(server), access_(access) {}
  absl::Status Run(absl::Time deadline);

 private:
  bool Prepare();
  absl::Status JudgeServer() const;
  absl::Status JudgeRefusal(unsigned long error) const;
  absl::Status Wrong(absl::string_view message) const {
    return Error(absl::StatusCode::kFailedPrecondition, kTls,
                 absl::StrCat("no connection to ", FormatAddress(server_), " by TLS: ", message));
  }
  std::string Wanted() const;  // by the server
  std::string OwnFault(const std::vector<Owned<X509>>& own) const;

  const Address server_;
  const AccessContent& access_;
  Owned<SSL_CTX> context_;
  Owned<SSL> tls_;
};

bool Probe::Prepare() {
  context_.reset(SSL_CTX_new(TLS_client_method()));
  if (context_ == nullptr) return false;
  for (const Owned<X509>& ca : ParseAll(access_.ca)) {
    X509_STORE_add_cert(SSL_CTX_get_cert_store(context_.get()), ca.get());
  }
  X509_STORE_set_flags(SSL_CTX_get_cert_store(context_.get()), X509_V_FLAG_PARTIAL_CHAIN | X509_V_FLAG_TRUSTED_FIRST);
  const std::vector<Owned<X509>> own = ParseAll(access_.certificate);
  const Owned<EVP_PKEY> key(PEM_read_bio_PrivateKey(Reading(access_.key).get(), nullptr, nullptr, nullptr));
  if (!own.empty() && key != nullptr) {
    SSL_CTX_use_certificate(context_.get(), own[0].get());
    SSL_CTX_use_PrivateKey(context_.get(), key.get());
    for (size_t i = 1; i < own.size(); ++i) SSL_CTX_add1_chain_cert(context_.get(), own[i].get());
  }
  tls_.reset(SSL_new(context_.get()));
  if (tls_ == nullptr) return false;
  static constexpr unsigned char kH2[] = {2, 'h', '2'};
  SSL_set_alpn_protos(tls_.get(), kH2, sizeof(kH2));
  SSL_set_verify(tls_.get(), SSL_VERIFY_NONE, nullptr);  // judged afterwards, with what was shown
  X509_VERIFY_PARAM* const wanted = SSL_get0_param(tls_.get());
  if (X509_VERIFY_PARAM_set1_ip_asc(wanted, server_.host.c_str()) != 1) {
    SSL_set_tlsext_host_name(tls_.get(), server_.host.c_str());
    X509_VERIFY_PARAM_set1_host(wanted, server_.host.c_str(), 0);
  }
  return true;
}

std::string Probe::Wanted() const {
  std::vector<std::string> names;
  const STACK_OF(X509_NAME)* const cas = SSL_get0_peer_CA_list(tls_.get());
  for (int i = 0; cas != nullptr && i < sk_X509_NAME_num(cas); ++i) names.push_back(Show(sk_X509_NAME_value(cas, i)));
  return names.empty() ? "a client's certificate"
                       : absl::StrCat("a client's certificate by ", absl::StrJoin(names, ", "));
}

absl::Status Probe::JudgeServer() const {
  X509* const shown = SSL_get0_peer_certificate(tls_.get());
  if (shown == nullptr) return absl::OkStatus();
  if (access_.ca.empty()) {
    return Wrong(absl::StrCat("the server speaks TLS, and this client has no `ca`; the server shows ", Show(shown),
                              ". Give the file of its CA"));
  }
  const long error = SSL_get_verify_result(tls_.get());
  if (error == X509_V_OK) return absl::OkStatus();
  std::vector<std::string> cas;
  for (const Owned<X509>& ca : ParseAll(access_.ca)) cas.push_back(Show(X509_get_subject_name(ca.get())));
  return Wrong(absl::StrCat("this client refuses the server's certificate: ", X509_verify_cert_error_string(error),
                            "; wanted one for ", server_.host, ", valid now (", Now(), "), by ",
                            absl::StrJoin(cas, ", "), " (`ca`); the server shows ", Show(shown)));
}

// What of the client's own certificate the server must refuse; empty: nothing.
std::string Probe::OwnFault(const std::vector<Owned<X509>>& own) const {
  if (own.empty()) return "this client shows no certificate";
  for (const Owned<X509>& certificate : own) {
    if (X509_cmp_current_time(X509_get0_notAfter(certificate.get())) < 0) return "the client's certificate has expired";
    if (X509_cmp_current_time(X509_get0_notBefore(certificate.get())) > 0) {
      return "the client's certificate is not valid yet";
    }
  }
  const STACK_OF(X509_NAME)* const cas = SSL_get0_peer_CA_list(tls_.get());
  const int count = cas == nullptr ? 0 : sk_X509_NAME_num(cas);
  for (int i = 0; i < count; ++i) {
    for (const Owned<X509>& certificate : own) {
      if (X509_NAME_cmp(X509_get_issuer_name(certificate.get()), sk_X509_NAME_value(cas, i)) == 0) return "";
    }
  }
  return count == 0 ? "" : "the client's certificate is by another CA";
}

// After the server ended the connection, with an alert or, where `error` is 0, without a word.
absl::Status Probe::JudgeRefusal(unsigned long error) const {
  const std::vector<Owned<X509>> own = ParseAll(access_.certificate);
  const char* const text = error == 0 ? nullptr : ERR_reason_error_string(error);
  std::string cause = OwnFault(own);
  if (cause.empty()) cause = "the server ended the connection after the handshake; its log says why";
  return Wrong(absl::StrCat("the server refuses this client: ", cause,
                            text == nullptr ? "" : absl::StrCat(" (it says '", text, "')"), "; it wants ", Wanted(),
                            ", valid now (", Now(), "); the client shows ",
                            own.empty() ? "none (`certificate`, `key`)" : Show(own[0].get())));
}

absl::Status Probe::Run(absl::Time deadline) {
  const Descriptor socket = Connect(server_, deadline);
  if (socket.get() < 0 || !Prepare()) return absl::OkStatus();
  SSL_set_fd(tls_.get(), socket.get());
  const int shaken = Drive(tls_.get(), socket.get(), deadline, [this] { return SSL_connect(tls_.get()); });
  const unsigned long error = ERR_peek_last_error();
  BALLAST_RETURN_IF_ERROR(JudgeServer());
  if (shaken != 1) {
    if (access_.ca.empty() || error == 0) return absl::OkStatus();  // a plain server, or none that answers
    if (ERR_GET_REASON(error) == SSL_R_WRONG_VERSION_NUMBER || ERR_GET_REASON(error) == SSL_R_HTTP_REQUEST) {
      return Wrong(
          "the server answers in the clear, and this client has a `ca`; give the server a certificate "
          "(tls.certificate, tls.key), or connect without `ca`");
    }
    return JudgeRefusal(error);
  }
  // gRPC's server speaks first. A refusal of the client's certificate comes here.
  char first = 0;
  const absl::Time until = std::min(deadline, absl::Now() + kRefusalWait);
  const int got = Drive(tls_.get(), socket.get(), until, [&] { return SSL_read(tls_.get(), &first, 1); });
  if (got > 0) return absl::OkStatus();
  const int outcome = SSL_get_error(tls_.get(), got);
  if (outcome == SSL_ERROR_WANT_READ) return absl::OkStatus();
  const unsigned long alert = ERR_peek_last_error();
  return JudgeRefusal(ERR_GET_REASON(alert) == SSL_R_UNEXPECTED_EOF_WHILE_READING ? 0 : alert);
}

}  // namespace

absl::Status ProbeTls(const Address& server, const AccessContent& access, absl::Time deadline) {
  const BrokenPipeBlock block;  // for OpenSSL
  const absl::Status found = Probe(server, access).Run(deadline);
  ERR_clear_error();
  return found;
}

}  // namespace ballast::model
