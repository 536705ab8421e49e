// PullResponse as it comes over the wire, read without a copy beside the necessary one.
#pragma once

#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/slice.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"

namespace ballast::client {

// The payload's field, length-delimited: the same in PushRequest and PullResponse.
inline constexpr uint8_t kPayloadTag = 15 << 3 | 2;

// Reads a PullResponse out of gRPC's slices, the payload straight to its place. Fields of later versions are refused:
// this is our own server's answer to a request that did not ask for them.
class PullReader {
 public:
  explicit PullReader(const grpc::ByteBuffer& buffer);

  // `to`: gets the payload. `shared`: holds the payload if the answer has none; empty: the answer must have it.
  absl::Status ReadInto(absl::Span<std::byte> to, absl::Span<const std::byte> shared = {});

 private:
  // `crc32c`: goes on with that of the copied bytes; null: nobody wants it.
  bool Next(void* to, uint64_t bytes, uint32_t* crc32c = nullptr);
  bool NextVarint(uint64_t* value);

  std::vector<grpc::Slice> slices_;
  size_t slice_ = 0;
  size_t offset_ = 0;
  bool ok_ = true;
};

}  // namespace ballast::client
