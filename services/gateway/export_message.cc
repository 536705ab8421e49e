#include "ballast/services/gateway/export_message.h"

#include <google/protobuf/io/coded_stream.h>

#include <array>
#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ballast/v1/state_service.pb.h"

namespace ballast::services {
namespace {

using google::protobuf::io::CodedOutputStream;

// How the encoding of Protocol Buffers writes a field's value: in the last three bits of its tag.
constexpr int kTypeBits = 3;
constexpr uint8_t kLengthDelimited = 2, kFourBytes = 5;

grpc::Slice ArraySliceOf(std::vector<std::byte> bytes) {
  auto* const kept = new std::vector<std::byte>(std::move(bytes));
  return grpc::Slice(
      kept->data(), kept->size(), [](void* vector) { delete static_cast<std::vector<std::byte>*>(vector); }, kept);
}

// All of an array but the bytes of its payload, which comes last: crc32c, then the payload's size.
grpc::Slice ArrayHeadOf(const storage::WholeState::Array& array) {
  using Array = v1::ExportResponse::Array;
  std::array<uint8_t, 16> inner;
  uint8_t* at = inner.data();
  *at++ = Array::kCrc32CFieldNumber << kTypeBits | kFourBytes;
  at = CodedOutputStream::WriteLittleEndian32ToArray(array.crc32c, at);
  *at++ = Array::kPayloadFieldNumber << kTypeBits | kLengthDelimited;
  at = CodedOutputStream::WriteVarint64ToArray(array.bytes.size(), at);
  const auto inner_bytes = static_cast<size_t>(at - inner.data());
  std::array<uint8_t, 32> head;
  at = head.data();
  *at++ = v1::ExportResponse::kArraysFieldNumber << kTypeBits | kLengthDelimited;
  at = CodedOutputStream::WriteVarint64ToArray(inner_bytes + array.bytes.size(), at);
  at = CodedOutputStream::WriteRawToArray(inner.data(), static_cast<int>(inner_bytes), at);
  return grpc::Slice(head.data(), static_cast<size_t>(at - head.data()));
}

}  // namespace

grpc::ByteBuffer EncodeExport(ExportedChunk chunk) {
  std::vector<grpc::Slice> slices = {grpc::Slice(chunk.head.SerializeAsString())};
  for (storage::WholeState::Array& array : chunk.state.arrays) {
    slices.push_back(ArrayHeadOf(array));
    if (!array.bytes.empty()) slices.push_back(ArraySliceOf(std::move(array.bytes)));
  }
  return grpc::ByteBuffer(slices.data(), slices.size());
}

}  // namespace ballast::services
