#include "ballast/services/gateway/push_message.h"

#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/io/zero_copy_stream_impl_lite.h>
#include <grpcpp/support/proto_buffer_reader.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "ballast/proto/base/status.h"
#include "ballast/services/gateway/methods.h"

namespace ballast::services {
namespace {

using google::protobuf::io::CodedInputStream;
using google::protobuf::io::CodedOutputStream;

constexpr uint64_t kHeaderBytesMax = 16 << 10;
// Less than that, or pieces shorter than that on average, are joined: a piece takes 16 bytes here and more at gRPC, and
// keeps its receive buffer (kReadBytesMax in rpc_server.cc).
constexpr uint64_t kJoinedBelow = 256 << 10, kPieceBytesMin = 4096;
constexpr uint32_t kPayloadTag = v1::PushRequest::kPayloadFieldNumber << 3 | 2;

// A tag or a length: five bytes at most, as protobuf reads them.
bool ReadShort(CodedInputStream* from, uint64_t max, uint32_t* value) {
  const int before = from->CurrentPosition();
  uint64_t read = 0;
  if (!from->ReadVarint64(&read) || read > max || from->CurrentPosition() - before > 5) return false;
  *value = static_cast<uint32_t>(read);
  return true;
}

// The next `length` bytes of `from`, in one piece of their own. False if there are fewer.
bool Join(CodedInputStream* from, uint64_t length, PushMessage* push) {
  size_t at = 0;
  push->joined.resize(length);
  for (const auto piece : push->payload) {
    std::memcpy(push->joined.data() + at, piece.data(), piece.size());
    at += piece.size();
  }
  if (!from->ReadRaw(push->joined.data() + at, static_cast<int>(length - at))) return false;
  push->payload.clear();
  if (length > 0)
    push->payload.push_back(absl::MakeConstSpan(reinterpret_cast<const std::byte*>(push->joined.data()), length));
  return true;
}

// The same where they are, if they are many in few pieces.
bool TakePieces(CodedInputStream* from, uint64_t length, PushMessage* push) {
  if (length < kJoinedBelow) return Join(from, length, push);
  for (uint64_t left = length; left > 0;) {
    if (push->payload.size() > length / kPieceBytesMin) return Join(from, length, push);
    const void* data = nullptr;
    int size = 0;
    if (!from->GetDirectBufferPointer(&data, &size)) return false;
    size = static_cast<int>(std::min<uint64_t>(size, left));
    push->payload.push_back({static_cast<const std::byte*>(data), static_cast<size_t>(size)});
    if (!from->Skip(size)) return false;
    left -= size;
  }
  return true;
}

// Copies the field of `tag`. False if there is none of that kind, or it is longer than a header may be.
bool CopyField(uint32_t tag, CodedInputStream* from, CodedOutputStream* to) {
  to->WriteTag(tag);
  switch (tag & 7) {
    case 0: {
      uint64_t value = 0;
      if (!from->ReadVarint64(&value)) return false;
      to->WriteVarint64(value);
      return true;
    }
    case 1: {
      uint64_t value = 0;
      if (!from->ReadLittleEndian64(&value)) return false;
      to->WriteLittleEndian64(value);
      return true;
    }
    case 2: {
      uint32_t length = 0;
      std::string value;
      if (!ReadShort(from, kHeaderBytesMax, &length)) return false;
      if (!from->ReadString(&value, static_cast<int>(length))) return false;
      to->WriteVarint32(length);
      to->WriteString(value);
      return true;
    }
    case 5: {
      uint32_t value = 0;
      if (!from->ReadLittleEndian32(&value)) return false;
      to->WriteLittleEndian32(value);
      return true;
    }
    default:
      return false;  // a group, which no proto3 message has
  }
}

// Parts `message->buffer` into the header's bytes and the payload.
bool Part(PushMessage* message, std::string* header, bool* too_much) {
  if (message->buffer.Length() == 0) return true;
  grpc::ProtoBufferReader reader(&message->buffer);
  if (!reader.status().ok()) return false;
  CodedInputStream from(&reader);
  google::protobuf::io::StringOutputStream sink(header);
  CodedOutputStream to(&sink);
  const uint64_t bytes = message->buffer.Length();
  bool payload = false;
  while (static_cast<uint64_t>(from.CurrentPosition()) < bytes) {
    uint32_t tag = 0, length = 0;
    if (!ReadShort(&from, UINT32_MAX, &tag) || tag < 8) return false;  // no field has the number 0
    *too_much = (tag == kPayloadTag && payload) || to.ByteCount() > static_cast<int>(kHeaderBytesMax);
    if (*too_much) return true;
    if (tag != kPayloadTag) {
      if (!CopyField(tag, &from, &to)) return false;
      continue;
    }
    payload = true;
    if (!ReadShort(&from, bytes, &length) || !TakePieces(&from, length, message)) return false;
  }
  return true;
}

}  // namespace

absl::StatusOr<std::shared_ptr<PushMessage>> ReadPush(grpc::ByteBuffer* message) {
  auto push = std::make_shared<PushMessage>();
  push->buffer.Swap(message);
  std::string header;
  bool too_much = false;
  const bool parted = Part(push.get(), &header, &too_much);
  if (parted && too_much) {
    return model::Error(absl::StatusCode::kInvalidArgument, model::kBadRequest,
                        "this push has more fields than a header and one payload");
  }
  if (!parted || !push->header.ParseFromString(header)) return Unparsed(v1::PushRequest::descriptor());
  if (push->payload.empty() || !push->joined.empty()) push->buffer.Clear();
  return push;
}

}  // namespace ballast::services
