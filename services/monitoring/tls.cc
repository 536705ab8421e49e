#include "ballast/services/monitoring/tls.h"

#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/ssl.h>
#include <openssl/x509_vfy.h>
#include <spdlog/spdlog.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ballast/proto/base/listening_sockets.h"
#include "ballast/proto/base/status.h"

namespace ballast::services {
namespace {

using Bio = std::unique_ptr<BIO, decltype(&BIO_free)>;

Bio Reading(const std::string& text) {
  return {BIO_new_mem_buf(text.data(), static_cast<int>(text.size())), &BIO_free};
}

absl::Status NotTaken(const char* what) {
  std::array<char, 256> why{};
  ERR_error_string_n(ERR_get_error(), why.data(), why.size());
  ERR_clear_error();
  return model::Error(absl::StatusCode::kInternal, model::kIo,
                      absl::StrCat("OpenSSL does not take the ", what, " that was checked: ", why.data()));
}

Guard* GuardOf(const SSL* tls) { return static_cast<Guard*>(SSL_CTX_get_app_data(SSL_get_SSL_CTX(tls))); }

bool TakePair(SSL_CTX* context, const std::string& pair) {
  const std::unique_ptr<EVP_PKEY, decltype(&EVP_PKEY_free)> key(
      PEM_read_bio_PrivateKey(Reading(pair).get(), nullptr, nullptr, nullptr), &EVP_PKEY_free);
  const Bio text = Reading(pair);
  bool good = key != nullptr;
  for (int i = 0; good; ++i) {
    X509* const certificate = PEM_read_bio_X509(text.get(), nullptr, nullptr, nullptr);
    if (certificate == nullptr) {
      ERR_clear_error();
      return i > 0 && SSL_CTX_use_PrivateKey(context, key.get()) == 1;
    }
    good =
        (i == 0 ? SSL_CTX_use_certificate(context, certificate) : SSL_CTX_add1_chain_cert(context, certificate)) == 1;
    X509_free(certificate);
  }
  return false;
}

std::string PemOf(X509* certificate) {
  const Bio text(BIO_new(BIO_s_mem()), &BIO_free);
  char* begin = nullptr;
  if (certificate == nullptr || PEM_write_bio_X509(text.get(), certificate) != 1) return "";
  const long length = BIO_get_mem_data(text.get(), &begin);
  return {begin, static_cast<size_t>(length)};
}

// In place of OpenSSL's check: the guard's, with one rule for all ports.
int Check(X509_STORE_CTX* checked, void*) {
  auto* const tls = static_cast<SSL*>(X509_STORE_CTX_get_ex_data(checked, SSL_get_ex_data_X509_STORE_CTX_idx()));
  std::string chain;
  STACK_OF(X509)* const shown = X509_STORE_CTX_get0_untrusted(checked);
  for (int i = 0; i < sk_X509_num(shown); ++i) chain += PemOf(sk_X509_value(shown, i));
  const absl::Status met =
      GuardOf(tls)->MeetClient(PemOf(X509_STORE_CTX_get0_cert(checked)), chain, model::PeerName(SSL_get_fd(tls)));
  X509_STORE_CTX_set_error(checked, met.ok() ? X509_V_OK : X509_V_ERR_APPLICATION_VERIFICATION);
  return met.ok() ? 1 : 0;
}

// Asks clients for certificates by these CAs.
bool TakeClientCas(SSL_CTX* context, const Certificates& certificates) {
  const Bio text = Reading(certificates.client_ca);
  bool good = true;
  while (X509* const ca = PEM_read_bio_X509(text.get(), nullptr, nullptr, nullptr)) {
    good = good && SSL_CTX_add_client_CA(context, ca) == 1;
    X509_free(ca);
  }
  ERR_clear_error();
  SSL_CTX_set_cert_verify_callback(context, &Check, nullptr);
  SSL_CTX_set_verify(context, SSL_VERIFY_PEER, nullptr);
  return good;
}

}  // namespace

Line::Line(int fd, ssl_st* tls) : fd_(fd), tls_(tls) {}
Line::Line(Line&& other) noexcept : fd_(std::exchange(other.fd_, -1)), tls_(std::exchange(other.tls_, nullptr)) {}
Line::~Line() {
  SSL_free(tls_);
  if (fd_ >= 0) ::close(fd_);
}

ssize_t Line::Result(int returned) const {
  if (returned > 0) return returned;
  const int error = SSL_get_error(tls_, returned);
  if (error == SSL_ERROR_ZERO_RETURN) return 0;
  if (error == SSL_ERROR_SSL && ERR_GET_LIB(ERR_peek_error()) == ERR_LIB_SSL &&
      ERR_GET_REASON(ERR_peek_error()) == SSL_R_HTTP_REQUEST) {
    GuardOf(tls_)->RefusePlain(model::PeerName(fd_));
  }
  errno = error == SSL_ERROR_WANT_READ || error == SSL_ERROR_WANT_WRITE ? EAGAIN : EPROTO;
  return -1;
}

ssize_t Line::Receive(char* to, size_t size) {
  if (tls_ == nullptr) return ::recv(fd_, to, size, 0);
  ERR_clear_error();
  return Result(SSL_read(tls_, to, static_cast<int>(size)));
}

ssize_t Line::Send(const char* from, size_t size) {
  if (tls_ == nullptr) return ::send(fd_, from, size, MSG_NOSIGNAL);
  ERR_clear_error();
  return Result(SSL_write(tls_, from, static_cast<int>(size)));
}

void Line::EndSending() {
  if (tls_ != nullptr) {
    ERR_clear_error();
    (void)SSL_shutdown(tls_);
  }
  (void)::shutdown(fd_, SHUT_WR);
}

ssize_t Line::Drain() {
  std::array<char, 4096> ignored;
  ssize_t n = 0;
  while ((n = ::recv(fd_, ignored.data(), ignored.size(), 0)) > 0) continue;
  return n;
}

bool Line::certified() const { return tls_ != nullptr && SSL_get0_peer_certificate(tls_) != nullptr; }

absl::StatusOr<std::unique_ptr<TlsSessions>> TlsSessions::Make(Guard* guard) {
  std::unique_ptr<TlsSessions> sessions(new TlsSessions(guard));
  BALLAST_RETURN_IF_ERROR(sessions->Renew(guard->certificates()->current()));
  return sessions;
}

absl::Status TlsSessions::Renew(std::shared_ptr<const Certificates> certificates) {
  of_ = std::move(certificates);
  std::shared_ptr<SSL_CTX> context(SSL_CTX_new(TLS_server_method()), &SSL_CTX_free);
  if (context == nullptr) return NotTaken("memory");
  SSL_CTX_set_app_data(context.get(), guard_);
  SSL_CTX_set_min_proto_version(context.get(), TLS1_2_VERSION);
  SSL_CTX_set_options(context.get(), SSL_OP_NO_TICKET | SSL_OP_NO_RENEGOTIATION | SSL_OP_CIPHER_SERVER_PREFERENCE);
  SSL_CTX_set_session_cache_mode(context.get(), SSL_SESS_CACHE_OFF);
  SSL_CTX_set_num_tickets(context.get(), 0);
  SSL_CTX_set_mode(context.get(), SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
  if (!TakePair(context.get(), of_->pair)) return NotTaken("certificate");
  if (!of_->client_ca.empty() && !TakeClientCas(context.get(), *of_)) return NotTaken("client_ca");
  context_ = std::move(context);
  return absl::OkStatus();
}

ssl_st* TlsSessions::Accept(int fd) {
  if (auto now = guard_->certificates()->current(); now != of_) {
    const absl::Status status = Renew(std::move(now));
    if (!status.ok())
      spdlog::error("the HTTP port goes on with its old certificates: {}", std::string(status.message()));
  }
  SSL* const tls = SSL_new(context_.get());
  if (tls == nullptr) return nullptr;
  SSL_set_accept_state(tls);
  if (SSL_set_fd(tls, fd) == 1) return tls;
  SSL_free(tls);
  return nullptr;
}

}  // namespace ballast::services
