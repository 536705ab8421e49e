#include "ballast/services/http/tls.h"

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
#include "ballast/proto/model/status.h"

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

bool TakeClientCas(SSL_CTX* context, const Certificates& certificates) {
  X509_STORE* const store = SSL_CTX_get_cert_store(context);
  const Bio text = Reading(certificates.client_ca);
  bool good = true;
  while (X509* const ca = PEM_read_bio_X509(text.get(), nullptr, nullptr, nullptr)) {
    good = good && X509_STORE_add_cert(store, ca) == 1 && SSL_CTX_add_client_CA(context, ca) == 1;
    X509_free(ca);
  }
  for (const auto& [name, list] : certificates.crls) {
    X509_CRL* const crl = PEM_read_bio_X509_CRL(Reading(list).get(), nullptr, nullptr, nullptr);
    good = good && crl != nullptr && X509_STORE_add_crl(store, crl) == 1;
    X509_CRL_free(crl);
  }
  ERR_clear_error();
  // As gRPC asks for revocations on the other port.
  if (!certificates.crls.empty()) X509_STORE_set_flags(store, X509_V_FLAG_CRL_CHECK | X509_V_FLAG_CRL_CHECK_ALL);
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

absl::StatusOr<std::unique_ptr<TlsSessions>> TlsSessions::Make(const ServedCertificates* certificates) {
  std::unique_ptr<TlsSessions> sessions(new TlsSessions(certificates));
  BALLAST_RETURN_IF_ERROR(sessions->Renew(certificates->current()));
  return sessions;
}

absl::Status TlsSessions::Renew(std::shared_ptr<const Certificates> certificates) {
  of_ = std::move(certificates);
  std::shared_ptr<SSL_CTX> context(SSL_CTX_new(TLS_server_method()), &SSL_CTX_free);
  if (context == nullptr) return NotTaken("memory");
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
  if (auto now = certificates_->current(); now != of_) {
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
