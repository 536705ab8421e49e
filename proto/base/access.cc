#include "ballast/proto/base/access.h"

#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/x509.h>

#include <algorithm>
#include <memory>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/base/text_file.h"

namespace ballast::model {
namespace {

constexpr size_t kTokenBytesMax = 4096;  // gRPC takes 8 KiB of metadata a call

absl::Status BadAccess(absl::string_view message) {
  return Error(absl::StatusCode::kInvalidArgument, kBadConfig, message);
}

std::unique_ptr<X509, decltype(&X509_free)> FirstCertificate(const std::string& pem) {
  const std::unique_ptr<BIO, decltype(&BIO_free)> bio(BIO_new_mem_buf(pem.data(), static_cast<int>(pem.size())),
                                                      &BIO_free);
  return {PEM_read_bio_X509(bio.get(), nullptr, nullptr, nullptr), &X509_free};
}

int NoPassphrase(char*, int, int, void*) { return -1; }

// gRPC would take a pair that does not match, and fail at every connection.
absl::Status CheckPair(const Access& access, const AccessContent& content) {
  const auto certificate = FirstCertificate(content.certificate);
  const std::unique_ptr<BIO, decltype(&BIO_free)> bio(
      BIO_new_mem_buf(content.key.data(), static_cast<int>(content.key.size())), &BIO_free);
  const std::unique_ptr<EVP_PKEY, decltype(&EVP_PKEY_free)> key(
      PEM_read_bio_PrivateKey(bio.get(), nullptr, &NoPassphrase, nullptr), &EVP_PKEY_free);
  const bool match =
      certificate != nullptr && key != nullptr && X509_check_private_key(certificate.get(), key.get()) == 1;
  ERR_clear_error();
  if (certificate == nullptr) return BadAccess(absl::StrCat(access.certificate, ": expected a certificate as PEM"));
  if (key == nullptr)
    return BadAccess(absl::StrCat(access.key, ": expected a private key as PEM, without a passphrase"));
  if (match) return absl::OkStatus();
  return BadAccess(absl::StrCat(access.key, ": the key does not belong to ", access.certificate));
}

}  // namespace

absl::StatusOr<AccessContent> ReadAccess(const Access& access) {
  AccessContent content;
  if (!access.ca.empty()) {
    BALLAST_ASSIGN_OR_RETURN(content.ca, ReadTextFile(access.ca));
    const bool readable = FirstCertificate(content.ca) != nullptr;
    ERR_clear_error();
    if (!readable) return BadAccess(absl::StrCat(access.ca, ": expected certificates of CAs as PEM"));
  }
  if (!access.certificate.empty()) {
    BALLAST_ASSIGN_OR_RETURN(content.certificate, ReadTextFile(access.certificate));
    BALLAST_ASSIGN_OR_RETURN(content.key, ReadTextFile(access.key));
    BALLAST_RETURN_IF_ERROR(CheckPair(access, content));
  }
  if (!access.token_file.empty()) {
    BALLAST_ASSIGN_OR_RETURN(const std::string text, ReadTextFile(access.token_file));
    const absl::string_view token = absl::StripAsciiWhitespace(text);
    const bool fits = !token.empty() && token.size() <= kTokenBytesMax &&
                      std::all_of(token.begin(), token.end(), [](char c) { return absl::ascii_isgraph(c); });
    if (!fits) {
      return BadAccess(absl::StrCat(access.token_file, ": expected one token of 1 to ", kTokenBytesMax,
                                    " letters, digits and punctuation"));
    }
    content.authorization = absl::StrCat("Bearer ", token);
  }
  return content;
}

absl::Status CheckAccess(const Access& access, const Address& server) {
  if (access.certificate.empty() != access.key.empty()) {
    return BadAccess("certificate and key belong together, and one is missing; set both or neither");
  }
  if (!access.certificate.empty() && access.ca.empty()) {
    return BadAccess("a client's certificate needs TLS; expected `ca` too, the CAs of the servers");
  }
  if (access.token_file.empty() || !access.ca.empty() || IsLoopback(server)) return absl::OkStatus();
  return BadAccess(
      absl::StrCat("the token of ", access.token_file, " would travel to ", FormatAddress(server),
                   " in the clear, where others could read it; set `ca` for TLS, or use a loopback address"));
}

}  // namespace ballast::model
