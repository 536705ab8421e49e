// The payload of a push as it came.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "absl/types/span.h"

namespace ballast::services {

// Borrowed bytes: in one piece from memory that the trainer shares, in pieces of some KiB where gRPC received them.
// Pieces have any length and alignment.
class PushedBytes {
 public:
  using Pieces = std::vector<absl::Span<const std::byte>>;
  PushedBytes(absl::Span<const std::byte> whole) : PushedBytes(Pieces{whole}) {}  // NOLINT(google-explicit-constructor)
  explicit PushedBytes(Pieces pieces) : pieces_(std::move(pieces)) {
    for (const auto piece : pieces_) size_ += piece.size();
  }
  const Pieces& pieces() const { return pieces_; }
  uint64_t size() const { return size_; }

 private:
  Pieces pieces_;
  uint64_t size_ = 0;
};

}  // namespace ballast::services
