#include "ballast/tests/services/gateway/security/authority.h"

#include <gtest/gtest.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/x509v3.h>

#include <fstream>

namespace ballast::services {
namespace {

long NextSerial() {
  static long serial = 1000;
  return ++serial;
}

std::shared_ptr<EVP_PKEY> MakeKey() { return {EVP_EC_gen("P-256"), &EVP_PKEY_free}; }

std::string TextIn(BIO* bio) {
  char* bytes = nullptr;
  const long size = BIO_get_mem_data(bio, &bytes);
  std::string text(bytes, static_cast<size_t>(size));
  BIO_free(bio);
  return text;
}

template <typename T>
std::string PemOf(int (*write)(BIO*, const T*), const T* value) {
  BIO* const bio = BIO_new(BIO_s_mem());
  EXPECT_EQ(write(bio, value), 1);
  return TextIn(bio);
}

std::string PemOfKey(EVP_PKEY* key) {
  BIO* const bio = BIO_new(BIO_s_mem());
  EXPECT_EQ(PEM_write_bio_PrivateKey(bio, key, nullptr, nullptr, 0, nullptr, nullptr), 1);
  return TextIn(bio);
}

void Extend(X509* certificate, X509* issuer, int nid, const std::string& value) {
  X509V3_CTX context;
  X509V3_set_ctx(&context, issuer, certificate, nullptr, nullptr, 0);
  X509_EXTENSION* const extension = X509V3_EXT_conf_nid(nullptr, &context, nid, value.c_str());
  ASSERT_NE(extension, nullptr) << value;
  X509_add_ext(certificate, extension, -1);
  X509_EXTENSION_free(extension);
}

std::shared_ptr<X509> MakeCertificate(const std::string& name, EVP_PKEY* key, absl::Time from, absl::Time to,
                                      const X509* issuer) {
  std::shared_ptr<X509> certificate(X509_new(), &X509_free);
  X509_set_version(certificate.get(), 2);
  ASN1_INTEGER_set(X509_get_serialNumber(certificate.get()), NextSerial());
  ASN1_TIME_set(X509_getm_notBefore(certificate.get()), absl::ToTimeT(from));
  ASN1_TIME_set(X509_getm_notAfter(certificate.get()), absl::ToTimeT(to));
  X509_NAME_add_entry_by_txt(X509_get_subject_name(certificate.get()), "CN", MBSTRING_UTF8,
                             reinterpret_cast<const unsigned char*>(name.c_str()), -1, -1, 0);
  X509_set_issuer_name(certificate.get(), X509_get_subject_name(issuer == nullptr ? certificate.get() : issuer));
  X509_set_pubkey(certificate.get(), key);
  return certificate;
}

}  // namespace

Authority::Authority(const std::string& name, absl::Time not_after, const Authority* issuer)
    : key_(MakeKey()),
      certificate_(MakeCertificate(name, key_.get(), absl::Now() - absl::Hours(100), not_after,
                                   issuer != nullptr ? issuer->certificate_.get() : nullptr)) {
  Extend(certificate_.get(), certificate_.get(), NID_basic_constraints, "critical,CA:TRUE");
  Extend(certificate_.get(), certificate_.get(), NID_key_usage, "critical,keyCertSign,cRLSign");
  Extend(certificate_.get(), certificate_.get(), NID_subject_key_identifier, "hash");
  X509_sign(certificate_.get(), (issuer != nullptr ? issuer->key_ : key_).get(), EVP_sha256());
  certificate_pem_ = PemOf<X509>(&PEM_write_bio_X509, certificate_.get());
}

IssuedPair Authority::Issue(const std::string& name, const IssueOptions& options) {
  const std::shared_ptr<EVP_PKEY> key = MakeKey();
  const auto certificate = MakeCertificate(name, key.get(), options.not_before, options.not_after, certificate_.get());
  if (!options.alternative_names.empty()) {
    Extend(certificate.get(), certificate_.get(), NID_subject_alt_name, options.alternative_names);
  }
  Extend(certificate.get(), certificate_.get(), NID_ext_key_usage,
         options.server ? "serverAuth,clientAuth" : "clientAuth");
  Extend(certificate.get(), certificate_.get(), NID_authority_key_identifier, "keyid");
  X509_sign(certificate.get(), key_.get(), EVP_sha256());
  return {PemOf<X509>(&PEM_write_bio_X509, certificate.get()), PemOfKey(key.get()),
          ASN1_INTEGER_get(X509_get0_serialNumber(certificate.get()))};
}

IssuedPair Authority::IssueServer(const std::string& name) {
  return Issue(name, {.alternative_names = "DNS:localhost,IP:127.0.0.1"});
}

IssuedPair Authority::IssueClient(const std::string& spiffe_id) {
  return Issue("client", {.alternative_names = "URI:" + spiffe_id, .server = false});
}

std::string Authority::Revocations(const std::vector<long>& serials, absl::Time next) const {
  X509_CRL* const crl = X509_CRL_new();
  X509_CRL_set_version(crl, 1);
  X509_CRL_set_issuer_name(crl, X509_get_subject_name(certificate_.get()));
  ASN1_TIME* const time = ASN1_TIME_set(nullptr, absl::ToTimeT(absl::Now() - absl::Hours(2)));
  X509_CRL_set1_lastUpdate(crl, time);
  ASN1_TIME_set(time, absl::ToTimeT(next));
  X509_CRL_set1_nextUpdate(crl, time);
  ASN1_TIME_set(time, absl::ToTimeT(absl::Now() - absl::Hours(2)));
  for (const long serial : serials) {
    X509_REVOKED* const revoked = X509_REVOKED_new();
    ASN1_INTEGER* const number = ASN1_INTEGER_new();
    ASN1_INTEGER_set(number, serial);
    X509_REVOKED_set_serialNumber(revoked, number);
    X509_REVOKED_set_revocationDate(revoked, time);
    X509_CRL_add0_revoked(crl, revoked);
    ASN1_INTEGER_free(number);
  }
  ASN1_TIME_free(time);
  X509_CRL_sort(crl);
  X509_CRL_sign(crl, key_.get(), EVP_sha256());
  std::string pem = PemOf<X509_CRL>(&PEM_write_bio_X509_CRL, crl);
  X509_CRL_free(crl);
  return pem;
}

void WriteText(const std::string& path, const std::string& text) {
  // Exchanged as a whole, as careful writers do.
  std::ofstream(path + ".new", std::ios::binary | std::ios::trunc) << text;
  ASSERT_EQ(std::rename((path + ".new").c_str(), path.c_str()), 0);
}

}  // namespace ballast::services
