// The memory of a message once it is parsed, counted from its bytes alone.
#pragma once

#include <google/protobuf/descriptor.h>
#include <grpcpp/support/byte_buffer.h>

#include <cstdint>
#include <optional>

namespace ballast::services {

// Bytes of heap that parsing `bytes` as a message of `type` takes at most, and the bytes themselves; stops counting
// beyond `max`. None if `bytes` are no message, which must not be parsed: a field may claim bytes behind its message,
// and parsing would take them.
std::optional<uint64_t> ParsedBytes(const google::protobuf::Descriptor* type, const grpc::ByteBuffer& bytes,
                                    uint64_t max);

}  // namespace ballast::services
