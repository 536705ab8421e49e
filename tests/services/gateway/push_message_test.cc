// A push's message in pieces: what protobuf reads, without a copy of the payload.
#include "ballast/services/gateway/push_message.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/escaping.h"
#include "ballast/proto/base/status.h"

namespace ballast::services {
namespace {

v1::PushRequest Request(size_t payload_bytes) {
  v1::PushRequest request;
  request.set_job("job");
  request.mutable_epoch()->set_counter(3);
  request.set_step(-1);  // ten bytes of varint
  request.set_rank(7);
  request.set_kind(v1::SLICE_KIND_GRADIENT);
  request.set_end(uint64_t{1} << 40);
  request.set_crc32c(0xabcdef01);
  for (size_t i = 0; i < payload_bytes; ++i) request.mutable_payload()->push_back(static_cast<char>(i * 31 >> 3));
  return request;
}

// `bytes` as gRPC gives them: in slices, each of which ends where `next` says. Borrows the bytes.
grpc::ByteBuffer Sliced(const std::string& bytes, const std::function<size_t()>& next) {
  std::vector<grpc::Slice> slices;
  for (size_t at = 0; at < bytes.size();) {
    const size_t size = std::min(next(), bytes.size() - at);
    slices.emplace_back(bytes.data() + at, size, grpc::Slice::STATIC_SLICE);
    at += size;
  }
  return grpc::ByteBuffer(slices.data(), slices.size());
}

std::string Joined(const PushMessage& push) {
  std::string joined;
  for (const auto piece : push.payload) joined.append(reinterpret_cast<const char*>(piece.data()), piece.size());
  return joined;
}

TEST(PushMessageTest, AHeaderAndAPayloadWhereverSlicesEnd) {
  const v1::PushRequest request = Request(100'000);
  const std::string bytes = request.SerializeAsString();
  v1::PushRequest header = request;
  header.clear_payload();
  for (const size_t size : {1, 2, 3, 7, 16375, 1 << 20}) {
    grpc::ByteBuffer buffer = Sliced(bytes, [&] { return size; });
    const auto push = ReadPush(&buffer);
    ASSERT_TRUE(push.ok()) << push.status();
    EXPECT_EQ((**push).header.SerializeAsString(), header.SerializeAsString()) << size;
    EXPECT_EQ(Joined(**push), request.payload()) << size;
    for (const auto piece : (**push).payload) {  // where it came
      EXPECT_GE(reinterpret_cast<const char*>(piece.data()), bytes.data());
      EXPECT_LE(reinterpret_cast<const char*>(piece.data() + piece.size()), bytes.data() + bytes.size());
    }
  }
}

TEST(PushMessageTest, NoBytesAreAnEmptyRequest) {
  grpc::ByteBuffer buffer;
  const auto push = ReadPush(&buffer);
  ASSERT_TRUE(push.ok()) << push.status();
  EXPECT_EQ((**push).header.ByteSizeLong(), 0u);
  EXPECT_TRUE((**push).payload.empty());
}

TEST(PushMessageTest, MoreThanAHeaderAndOnePayloadIsRefused) {
  v1::PushRequest long_header;
  long_header.set_job(std::string(20'000, 'j'));
  v1::PushRequest one;
  one.set_payload("x");
  std::string many_fields;
  for (int i = 0; i < 10'000; ++i) many_fields += std::string("\x28\x01", 2);  // rank = 1, again and again
  for (const std::string& bytes :
       {long_header.SerializeAsString(), one.SerializeAsString() + one.SerializeAsString(), many_fields}) {
    grpc::ByteBuffer buffer = Sliced(bytes, [] { return 4096; });
    const absl::Status status = ReadPush(&buffer).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_EQ(model::ReasonOf(status), model::kBadRequest) << status;
  }
}

// Changed, cut and lengthened bytes are read as protobuf reads them, or refused where protobuf refuses them too.
TEST(PushMessageTest, DamagedBytesAreReadAsProtobufReadsThem) {
  std::mt19937 random(11);
  const auto below = [&](size_t n) { return n == 0 ? 0 : random() % n; };
  const std::string whole = Request(300).SerializeAsString();
  int read = 0, refused = 0;
  for (int round = 0; round < 20'000; ++round) {
    std::string bytes = whole;
    for (size_t changes = below(3); changes > 0; --changes) bytes[below(60)] = static_cast<char>(random());
    if (below(3) == 0) bytes.resize(below(bytes.size()));
    if (below(3) == 0) bytes.insert(below(std::min<size_t>(60, bytes.size())), 1, static_cast<char>(random()));
    v1::PushRequest expected;
    const bool is_request = expected.ParseFromString(bytes);
    grpc::ByteBuffer buffer = Sliced(bytes, [&] { return 1 + below(40); });
    const auto push = ReadPush(&buffer);
    if (!push.ok()) {
      ++refused;
      // Or a group, or a second payload, which only we refuse.
      if (is_request) continue;
      EXPECT_EQ(model::ReasonOf(push.status()), model::kBadRequest);
      continue;
    }
    ++read;
    ASSERT_TRUE(is_request) << absl::BytesToHexString(bytes.substr(0, 90));
    EXPECT_EQ(Joined(**push), expected.payload()) << round;
    expected.clear_payload();
    EXPECT_EQ((**push).header.SerializeAsString(), expected.SerializeAsString()) << round;
  }
  EXPECT_GT(read, 2000);
  EXPECT_GT(refused, 2000);
}

}  // namespace
}  // namespace ballast::services
