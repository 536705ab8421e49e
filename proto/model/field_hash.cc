#include "ballast/proto/model/field_hash.h"

#include <openssl/evp.h>

#include <bit>

namespace ballast::model {

FieldHash::FieldHash() : context_(EVP_MD_CTX_new(), &EVP_MD_CTX_free) {
  EVP_DigestInit_ex(context_.get(), EVP_sha256(), nullptr);
}

FieldHash::FieldHash(const FieldHash& other) : context_(EVP_MD_CTX_new(), &EVP_MD_CTX_free) {
  EVP_MD_CTX_copy_ex(context_.get(), other.context_.get());
}

FieldHash& FieldHash::operator=(const FieldHash& other) { return *this = FieldHash(other); }

void FieldHash::Add(uint64_t value) {
  uint8_t bytes[8];
  for (int i = 0; i < 8; ++i) bytes[i] = static_cast<uint8_t>(value >> (8 * i));
  EVP_DigestUpdate(context_.get(), bytes, sizeof(bytes));
}

void FieldHash::Add(double value) { Add(std::bit_cast<uint64_t>(value)); }

void FieldHash::Add(absl::string_view value) {
  Add(static_cast<uint64_t>(value.size()));
  EVP_DigestUpdate(context_.get(), value.data(), value.size());
}

std::string FieldHash::Finish() {
  std::string digest(32, '\0');
  EVP_DigestFinal_ex(context_.get(), reinterpret_cast<uint8_t*>(digest.data()), nullptr);
  return digest;
}

}  // namespace ballast::model
