#include "ballast/services/gateway/security/certificates.h"

#include <arpa/inet.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/x509.h>
#include <openssl/x509v3.h>

#include <algorithm>
#include <filesystem>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/base/text_file.h"

namespace ballast::services {
namespace {

struct Free {
  void operator()(BIO* bio) const { BIO_free(bio); }
  void operator()(X509* certificate) const { X509_free(certificate); }
  void operator()(X509_CRL* crl) const { X509_CRL_free(crl); }
  void operator()(X509_STORE* store) const { X509_STORE_free(store); }
  void operator()(X509_STORE_CTX* context) const { X509_STORE_CTX_free(context); }
  void operator()(STACK_OF(X509) * list) const { sk_X509_pop_free(list, X509_free); }
  void operator()(GENERAL_NAMES* names) const { GENERAL_NAMES_free(names); }
  void operator()(EVP_PKEY* key) const { EVP_PKEY_free(key); }
  void operator()(char* text) const { OPENSSL_free(text); }
};
template <typename T>
using Owned = std::unique_ptr<T, Free>;
using Chain = std::vector<Owned<X509>>;

// A CRL directory holds a file per CA; more than these is no such directory.
constexpr int kCrlFilesMax = 256;

absl::Status Bad(const std::string& path, absl::string_view message) {
  return model::Error(absl::StatusCode::kInvalidArgument, model::kBadConfig, absl::StrCat(path, ": ", message));
}

Owned<BIO> Open(absl::string_view text) {
  return Owned<BIO>(BIO_new_mem_buf(text.data(), static_cast<int>(text.size())));
}

std::string NameOf(const X509_NAME* name) {
  const Owned<char> text(X509_NAME_oneline(name, nullptr, 0));
  return text == nullptr ? "?" : text.get();
}
std::string NameOf(const X509* certificate) { return NameOf(X509_get_subject_name(certificate)); }

absl::Time TimeOf(const ASN1_TIME* time) {
  tm parts = {};
  if (ASN1_TIME_to_tm(time, &parts) != 1) return absl::InfinitePast();
  return absl::FromTM(parts, absl::UTCTimeZone());
}

// What is wrong with the dates at `now`; empty: nothing.
std::string WrongDates(const ASN1_TIME* from, const ASN1_TIME* to, absl::Time now) {
  if (now >= TimeOf(from) && now <= TimeOf(to)) return "";
  return absl::StrCat("is valid from ", absl::FormatTime(TimeOf(from), absl::UTCTimeZone()), " to ",
                      absl::FormatTime(TimeOf(to), absl::UTCTimeZone()), ", and it is ",
                      absl::FormatTime(now, absl::UTCTimeZone()));
}
std::string WrongDates(const X509* certificate, absl::Time now) {
  return WrongDates(X509_get0_notBefore(certificate), X509_get0_notAfter(certificate), now);
}

std::string TextOf(BIO* bio) {
  char* bytes = nullptr;
  const long size = BIO_get_mem_data(bio, &bytes);
  return std::string(bytes, static_cast<size_t>(size));
}

template <typename T>
std::string Pem(int (*write)(BIO*, const T*), const T* value) {
  const Owned<BIO> bio(BIO_new(BIO_s_mem()));
  if (bio == nullptr || write(bio.get(), value) != 1) return "";
  return TextOf(bio.get());
}

// `ended`: nothing came behind the last certificate.
Chain ParseChain(absl::string_view text, bool* ended) {
  const Owned<BIO> bio = Open(text);
  Chain chain;
  ERR_clear_error();
  while (X509* certificate = PEM_read_bio_X509(bio.get(), nullptr, nullptr, nullptr)) chain.emplace_back(certificate);
  *ended = ERR_GET_REASON(ERR_peek_last_error()) == PEM_R_NO_START_LINE;
  ERR_clear_error();
  return chain;
}

absl::StatusOr<Chain> ReadChain(const std::string& path) {
  BALLAST_ASSIGN_OR_RETURN(const std::string text, model::ReadTextFile(path));
  bool ended = false;
  Chain chain = ParseChain(text, &ended);
  if (chain.empty() || !ended) {
    return Bad(path, absl::StrCat("expected certificates as PEM (-----BEGIN CERTIFICATE-----), got ", chain.size(),
                                  " of them", ended ? "" : ", then one that cannot be read"));
  }
  return chain;
}

// A key with a passphrase is refused instead of asking at a terminal.
int NoPassphrase(char*, int, int, void* asked) {
  *static_cast<bool*>(asked) = true;
  return -1;
}

absl::StatusOr<Owned<EVP_PKEY>> ReadKey(const std::string& path) {
  BALLAST_ASSIGN_OR_RETURN(const std::string text, model::ReadTextFile(path));
  bool asked = false;
  Owned<EVP_PKEY> key(PEM_read_bio_PrivateKey(Open(text).get(), nullptr, &NoPassphrase, &asked));
  ERR_clear_error();
  if (key != nullptr) return key;
  return Bad(path, asked ? "the key has a passphrase; expected a key without one, readable by the server alone"
                         : "expected a private key as PEM (-----BEGIN PRIVATE KEY-----)");
}

absl::Status CheckChain(const std::string& path, const Chain& chain, absl::Time now) {
  for (size_t i = 0; i < chain.size(); ++i) {
    X509* const certificate = chain[i].get();
    if (const std::string wrong = WrongDates(certificate, now); !wrong.empty()) {
      return Bad(path, absl::StrCat("certificate ", i + 1, " (", NameOf(certificate), ") ", wrong, "; renew it"));
    }
    if (i + 1 == chain.size()) break;
    X509* const issuer = chain[i + 1].get();
    if (X509_check_issued(issuer, certificate) != X509_V_OK ||
        X509_verify(certificate, X509_get0_pubkey(issuer)) != 1) {
      ERR_clear_error();
      return Bad(path,
                 absl::StrCat("certificate ", i + 1, " (", NameOf(certificate), ") is not issued by the next one (",
                              NameOf(issuer), "); expected the server's certificate, then each issuer in order"));
    }
  }
  if (X509_check_purpose(chain[0].get(), X509_PURPOSE_SSL_SERVER, 0) != 1) {
    return Bad(path, absl::StrCat("the first certificate (", NameOf(chain[0].get()),
                                  ") is not a server certificate; issue it with extendedKeyUsage serverAuth"));
  }
  return absl::OkStatus();
}

std::string ShowAddress(const ASN1_OCTET_STRING* bytes) {
  char text[INET6_ADDRSTRLEN] = {};
  const int family = bytes->length == 4 ? AF_INET : AF_INET6;
  if (bytes->length != 4 && bytes->length != 16) return "?";
  return ::inet_ntop(family, bytes->data, text, sizeof(text)) != nullptr ? text : "?";
}

// The hosts and addresses that a server's certificate is for.
std::vector<std::string> HostNamesOf(const X509* certificate) {
  std::vector<std::string> names;
  const Owned<GENERAL_NAMES> all(
      static_cast<GENERAL_NAMES*>(X509_get_ext_d2i(certificate, NID_subject_alt_name, nullptr, nullptr)));
  for (int i = 0; all != nullptr && i < sk_GENERAL_NAME_num(all.get()); ++i) {
    const GENERAL_NAME* const name = sk_GENERAL_NAME_value(all.get(), i);
    if (name->type == GEN_DNS) {
      names.emplace_back(reinterpret_cast<const char*>(ASN1_STRING_get0_data(name->d.dNSName)),
                         static_cast<size_t>(ASN1_STRING_length(name->d.dNSName)));
    } else if (name->type == GEN_IPADD) {
      names.push_back(ShowAddress(name->d.iPAddress));
    }
  }
  return names;
}

absl::Time Earliest(const Chain& chain) {
  absl::Time earliest = absl::InfiniteFuture();
  for (const Owned<X509>& certificate : chain) {
    earliest = std::min(earliest, TimeOf(X509_get0_notAfter(certificate.get())));
  }
  return earliest;
}

absl::Status ReadPair(const CertificatePaths& paths, absl::Time now, Certificates* to) {
  BALLAST_ASSIGN_OR_RETURN(const Chain chain, ReadChain(paths.certificate));
  BALLAST_ASSIGN_OR_RETURN(const Owned<EVP_PKEY> key, ReadKey(paths.key));
  if (X509_check_private_key(chain[0].get(), key.get()) != 1) {
    ERR_clear_error();
    return Bad(paths.key, absl::StrCat("the key does not belong to ", paths.certificate, " (", NameOf(chain[0].get()),
                                       "); write a key and a certificate that were issued together"));
  }
  BALLAST_RETURN_IF_ERROR(CheckChain(paths.certificate, chain, now));
  // Written from what was checked: the file may have changed since.
  const Owned<BIO> bio(BIO_new(BIO_s_mem()));
  if (PEM_write_bio_PrivateKey(bio.get(), key.get(), nullptr, nullptr, 0, nullptr, nullptr) != 1) {
    return Bad(paths.key, "the key cannot be written as PEM");
  }
  to->pair = TextOf(bio.get());
  for (const Owned<X509>& certificate : chain) to->pair += Pem<X509>(&PEM_write_bio_X509, certificate.get());
  to->certificate_not_after = Earliest(chain);
  to->names = HostNamesOf(chain[0].get());
  return absl::OkStatus();
}

// The CAs that are valid at `now`: a bundle may still hold one that has ended.
absl::StatusOr<Chain> ReadClientCas(const std::string& path, absl::Time now) {
  BALLAST_ASSIGN_OR_RETURN(Chain all, ReadChain(path));
  Chain valid;
  std::string wrong;
  for (Owned<X509>& ca : all) {
    if (X509_check_ca(ca.get()) == 0) {
      return Bad(path, absl::StrCat(NameOf(ca.get()), " is not a CA; expected CA certificates only"));
    }
    wrong = WrongDates(ca.get(), now);
    if (wrong.empty()) valid.push_back(std::move(ca));
  }
  if (valid.empty()) return Bad(path, absl::StrCat("no CA is valid now; the last one ", wrong));
  return valid;
}

absl::StatusOr<std::vector<Owned<X509_CRL>>> ReadCrls(const std::string& directory) {
  std::vector<std::string> files;
  std::error_code error;
  for (std::filesystem::directory_iterator entry(directory, error), end; !error && entry != end;
       entry.increment(error)) {
    if (entry->is_regular_file(error)) files.push_back(entry->path().string());
    if (files.size() > kCrlFilesMax) return Bad(directory, absl::StrCat("expected at most ", kCrlFilesMax, " files"));
  }
  if (error) return Bad(directory, absl::StrCat("cannot be read (", error.message(), ")"));
  std::sort(files.begin(), files.end());
  std::vector<Owned<X509_CRL>> crls;
  for (const std::string& file : files) {
    BALLAST_ASSIGN_OR_RETURN(const std::string text, model::ReadTextFile(file));
    const Owned<BIO> bio = Open(text);
    const size_t before = crls.size();
    while (X509_CRL* crl = PEM_read_bio_X509_CRL(bio.get(), nullptr, nullptr, nullptr)) crls.emplace_back(crl);
    ERR_clear_error();
    if (crls.size() == before) return Bad(file, "expected a list of revocations as PEM (-----BEGIN X509 CRL-----)");
  }
  return crls;
}

absl::Status AddCrls(const CertificatePaths& paths, const Chain& cas, absl::Time now, Certificates* to) {
  BALLAST_ASSIGN_OR_RETURN(const std::vector<Owned<X509_CRL>> crls, ReadCrls(paths.crl_directory));
  std::map<uint32_t, int> of_hash;
  for (const Owned<X509>& ca : cas) {
    int found = 0;
    for (const Owned<X509_CRL>& crl : crls) {
      // A list of another CA may stay in the directory: nobody of that CA is let in.
      if (X509_NAME_cmp(X509_CRL_get_issuer(crl.get()), X509_get_subject_name(ca.get())) != 0) continue;
      if (X509_CRL_verify(crl.get(), X509_get0_pubkey(ca.get())) != 1) {
        ERR_clear_error();
        continue;  // of another CA of the same name, as after a new key
      }
      const ASN1_TIME* const next = X509_CRL_get0_nextUpdate(crl.get());
      const std::string wrong = next == nullptr ? std::string("has no next update")
                                                : WrongDates(X509_CRL_get0_lastUpdate(crl.get()), next, now);
      if (!wrong.empty()) {
        return Bad(paths.crl_directory,
                   absl::StrCat("the list of revocations by ", NameOf(ca.get()), " ", wrong, "; put a new one there"));
      }
      to->crl_not_after = std::min(to->crl_not_after, TimeOf(next));
      const auto hash =
          static_cast<uint32_t>(X509_NAME_hash_ex(X509_get_subject_name(ca.get()), nullptr, nullptr, nullptr));
      to->crls[absl::StrFormat("%08x.r%d", hash, of_hash[hash]++)] = Pem<X509_CRL>(&PEM_write_bio_X509_CRL, crl.get());
      ++found;
    }
    if (found == 0) {
      return Bad(
          paths.crl_directory,
          absl::StrCat("no list of revocations by ", NameOf(ca.get()), " of ", paths.client_ca,
                       "; write one there (an empty one if nothing is revoked), or leave out tls.crl_directory"));
    }
  }
  return absl::OkStatus();
}

absl::Status Unwelcome(absl::string_view message) {
  return model::Error(absl::StatusCode::kUnauthenticated, model::kNoIdentity, message);
}

Denial DenialOf(int error) {
  switch (error) {
    case X509_V_ERR_CERT_HAS_EXPIRED:
      return Denial::kCertificateExpired;
    case X509_V_ERR_CERT_NOT_YET_VALID:
      return Denial::kCertificateEarly;
    case X509_V_ERR_CERT_REVOKED:
      return Denial::kCertificateRevoked;
    case X509_V_ERR_UNABLE_TO_GET_ISSUER_CERT:
    case X509_V_ERR_UNABLE_TO_GET_ISSUER_CERT_LOCALLY:
    case X509_V_ERR_UNABLE_TO_VERIFY_LEAF_SIGNATURE:
    case X509_V_ERR_DEPTH_ZERO_SELF_SIGNED_CERT:
    case X509_V_ERR_SELF_SIGNED_CERT_IN_CHAIN:
      return Denial::kUnknownCa;
    default:
      return Denial::kBadCertificate;
  }
}

// An intermediate CA, which the client sent itself, may have no list of revocations; a CA of the files has one.
int PassWithoutList(int ok, X509_STORE_CTX* context) {
  return X509_STORE_CTX_get_error(context) == X509_V_ERR_UNABLE_TO_GET_CRL ? 1 : ok;
}

// What verification says of `leaf`: X509_V_OK, or an error. `cas` become names for a message.
int Verify(const Certificates& files, X509* leaf, const Chain& chain, absl::Time now, std::vector<std::string>* cas) {
  bool ended = false;
  const Owned<X509_STORE> store(X509_STORE_new());
  for (const Owned<X509>& ca : ParseChain(files.client_ca, &ended)) {
    X509_STORE_add_cert(store.get(), ca.get());
    cas->push_back(NameOf(ca.get()));
  }
  for (const auto& [name, text] : files.crls) {
    const Owned<X509_CRL> crl(PEM_read_bio_X509_CRL(Open(text).get(), nullptr, nullptr, nullptr));
    if (crl != nullptr) X509_STORE_add_crl(store.get(), crl.get());
  }
  // A CA of the files may be an intermediate one: then nobody knows its issuer.
  unsigned long flags = X509_V_FLAG_PARTIAL_CHAIN | X509_V_FLAG_TRUSTED_FIRST;
  if (!files.crls.empty()) flags |= X509_V_FLAG_CRL_CHECK | X509_V_FLAG_CRL_CHECK_ALL;
  X509_STORE_set_flags(store.get(), flags);
  X509_STORE_set_verify_cb(store.get(), &PassWithoutList);
  const Owned<STACK_OF(X509)> others(sk_X509_new_null());
  for (const Owned<X509>& other : chain) {
    if (X509_up_ref(other.get()) == 1) sk_X509_push(others.get(), other.get());
  }
  const Owned<X509_STORE_CTX> context(X509_STORE_CTX_new());
  if (X509_STORE_CTX_init(context.get(), store.get(), leaf, others.get()) != 1) return X509_V_ERR_OUT_OF_MEM;
  X509_STORE_CTX_set_default(context.get(), "ssl_client");
  X509_STORE_CTX_set_time(context.get(), 0, absl::ToTimeT(now));
  const bool good = X509_verify_cert(context.get()) == 1;
  const int error = X509_STORE_CTX_get_error(context.get());
  ERR_clear_error();
  if (good) return X509_V_OK;
  return error == X509_V_OK ? X509_V_ERR_UNSPECIFIED : error;
}

}  // namespace

absl::Status CheckClient(const Certificates& files, absl::string_view certificate, absl::string_view chain,
                         absl::Time now, Denial* why) {
  bool ended = false;
  const Chain shown = ParseChain(certificate, &ended);
  if (shown.empty()) {
    *why = Denial::kNoCertificate;
    return Unwelcome("expected a client certificate, but the client sent none");
  }
  X509* const leaf = shown[0].get();
  std::vector<std::string> cas;
  const int error = Verify(files, leaf, ParseChain(chain, &ended), now, &cas);
  if (error == X509_V_OK) return absl::OkStatus();
  *why = DenialOf(error);
  const std::string dates = WrongDates(leaf, now);
  return Unwelcome(absl::StrCat("the client's certificate ", NameOf(leaf), ", issued by ",
                                NameOf(X509_get_issuer_name(leaf)),
                                ", is refused: ", X509_verify_cert_error_string(error), dates.empty() ? "" : "; it ",
                                dates, "; expected one from ", absl::StrJoin(cas, ", "), " (tls.client_ca)"));
}

std::string SubjectOf(absl::string_view pem) {
  bool ended = false;
  const Chain chain = ParseChain(pem, &ended);
  return chain.empty() ? "" : NameOf(chain[0].get());
}

absl::StatusOr<Certificates> ReadCertificates(const CertificatePaths& paths, absl::Time now) {
  Certificates read;
  BALLAST_RETURN_IF_ERROR(ReadPair(paths, now, &read));
  if (paths.client_ca.empty()) return read;
  BALLAST_ASSIGN_OR_RETURN(const Chain cas, ReadClientCas(paths.client_ca, now));
  for (const Owned<X509>& ca : cas) read.client_ca += Pem<X509>(&PEM_write_bio_X509, ca.get());
  read.client_ca_not_after = Earliest(cas);
  if (!paths.crl_directory.empty()) BALLAST_RETURN_IF_ERROR(AddCrls(paths, cas, now, &read));
  return read;
}

}  // namespace ballast::services
