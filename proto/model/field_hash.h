// SHA-256 over typed fields, not over their serialised bytes: so both sides get the same with any release of protobuf.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/strings/string_view.h"

struct evp_md_ctx_st;  // OpenSSL's EVP_MD_CTX

namespace ballast::model {

// Copies share nothing. Every field has a fixed width or a length before it, so no two field lists hash the same bytes.
class FieldHash {
 public:
  FieldHash();
  // Continues after the fields that `other` has hashed so far. Threads: any number may copy the same object.
  FieldHash(const FieldHash& other);
  FieldHash& operator=(const FieldHash& other);
  FieldHash(FieldHash&&) = default;
  FieldHash& operator=(FieldHash&&) = default;
  ~FieldHash() = default;
  void Add(uint64_t value);
  void Add(double value);  // its bits
  void Add(absl::string_view value);
  std::string Finish();  // 32 bytes

 private:
  std::unique_ptr<evp_md_ctx_st, void (*)(evp_md_ctx_st*)> context_;
};

}  // namespace ballast::model
