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

// Bytes as gRPC gives them: in slices, each as long as `next` says. Between them are headers of frames, or gRPC would
// merge them.
class Sliced {
 public:
  Sliced(const std::string& bytes, const std::function<size_t()>& next) : memory_(2 * bytes.size() + 1, 'h') {
    std::vector<grpc::Slice> slices;
    size_t to = 0;
    for (size_t at = 0; at < bytes.size();) {
      const size_t size = std::min(next(), bytes.size() - at);
      bytes.copy(memory_.data() + to, size, at);
      slices.emplace_back(memory_.data() + to, size, grpc::Slice::STATIC_SLICE);
      at += size, to += size + 1;
    }
    buffer_ = grpc::ByteBuffer(slices.data(), slices.size());
  }
  absl::StatusOr<std::shared_ptr<PushMessage>> Read() { return ReadPush(&buffer_); }
  bool Has(absl::Span<const std::byte> piece) const {
    const char* const data = reinterpret_cast<const char*>(piece.data());
    return data >= memory_.data() && data + piece.size() <= memory_.data() + memory_.size();
  }

 private:
  std::string memory_;
  grpc::ByteBuffer buffer_;
};

std::string Joined(const PushMessage& push) {
  std::string joined;
  for (const auto piece : push.payload) joined.append(reinterpret_cast<const char*>(piece.data()), piece.size());
  return joined;
}

TEST(PushMessageTest, AHeaderAndAPayloadWhereverSlicesEnd) {
  const v1::PushRequest request = Request(500'001);
  const std::string bytes = request.SerializeAsString();
  v1::PushRequest header = request;
  header.clear_payload();
  for (const size_t size : {1, 2, 3, 7, 2000, 16375, 1 << 20}) {
    Sliced sliced(bytes, [&] { return size; });
    const auto push = sliced.Read();
    ASSERT_TRUE(push.ok()) << push.status();
    EXPECT_EQ((**push).header.SerializeAsString(), header.SerializeAsString()) << size;
    EXPECT_EQ(Joined(**push), request.payload()) << size;
    // Where it came; but tiny pieces are joined.
    const bool stays = size > 4096;
    EXPECT_EQ((**push).payload.size(), !stays ? 1u : size > bytes.size() ? 1u : 500'001 / size + 1) << size;
    for (const auto piece : (**push).payload) EXPECT_EQ(sliced.Has(piece), stays) << size;
    EXPECT_EQ((**push).buffer.Length() > 0, stays) << size;
  }
}

TEST(PushMessageTest, SmallPayloadsAndNoneKeepNothingOfGrpcs) {
  for (const size_t bytes : {0, 1, 100'000, 262'143}) {
    const v1::PushRequest request = Request(bytes);
    Sliced sliced(request.SerializeAsString(), [] { return 16375; });
    const auto push = sliced.Read();
    ASSERT_TRUE(push.ok()) << push.status();
    EXPECT_EQ(Joined(**push), request.payload());
    EXPECT_EQ((**push).payload.size(), bytes == 0 ? 0u : 1u);
    EXPECT_EQ((**push).buffer.Length(), 0u);
  }
}

TEST(PushMessageTest, NoBytesAreAnEmptyRequest) {
  const auto push = Sliced("", [] { return 1; }).Read();
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
    const absl::Status status = Sliced(bytes, [] { return 4096; }).Read().status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_EQ(model::ReasonOf(status), model::kBadRequest) << status;
  }
}

// Changed, cut and lengthened bytes are read as protobuf reads them, or refused where protobuf refuses them too.
TEST(PushMessageTest, DamagedBytesAreReadAsProtobufReadsThem) {
  std::mt19937 random(11);
  const auto below = [&](size_t n) { return n == 0 ? 0 : random() % n; };
  const std::string small = Request(300).SerializeAsString(), large = Request(300'000).SerializeAsString();
  int read = 0, refused = 0, refused_alone = 0;
  for (int round = 0; round < 20'000; ++round) {
    const bool is_large = round % 50 == 0;
    std::string bytes = is_large ? large : small;
    for (size_t changes = below(3); changes > 0; --changes) bytes[below(60)] = static_cast<char>(random());
    if (below(3) == 0) bytes.resize(below(bytes.size()));
    if (below(3) == 0) bytes.insert(below(std::min<size_t>(60, bytes.size())), 1, static_cast<char>(random()));
    v1::PushRequest expected;
    const bool is_request = expected.ParseFromString(bytes);
    Sliced sliced(bytes, [&] { return 1 + below(is_large ? 30'000 : 40); });
    const auto push = sliced.Read();
    if (!push.ok()) {
      ++refused;
      refused_alone += is_request ? 1 : 0;  // a group, or a second payload
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
  EXPECT_LT(refused_alone, 400);
}

}  // namespace
}  // namespace ballast::services
