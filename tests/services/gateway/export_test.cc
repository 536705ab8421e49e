// A chunk on its way from server to server: the bytes on the wire, and the client with which servers ask.
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "ballast/kernels/kernels.h"
#include "ballast/services/counters/counters.h"
#include "ballast/services/gateway/chunk_client.h"
#include "ballast/services/gateway/export_message.h"
#include "ballast/tests/services/gateway/rpc_fixture.h"

namespace ballast::services {
namespace {

constexpr uint64_t kLife = 77;

TEST(ExportMessageTest, TheWireFormIsTheMessages) {
  ExportedChunk chunk;
  chunk.head.set_version(1000);
  chunk.head.set_changed(-1);
  chunk.head.set_elements(1 << 16);
  for (const int64_t version : {3, 500}) chunk.head.add_kept()->mutable_decision()->set_step(version);
  for (const size_t bytes : {size_t{0}, size_t{1}, size_t{127}, size_t{128}, size_t{5} << 20}) {
    std::vector<std::byte> array(bytes);
    for (size_t i = 0; i < bytes; ++i) array[i] = static_cast<std::byte>(i * 7 + bytes);
    const uint32_t crc32c = kernels::Crc32c(array);
    chunk.state.arrays.push_back({std::move(array), crc32c});
  }
  const storage::WholeState state = chunk.state;
  grpc::ByteBuffer bytes = EncodeExport(std::move(chunk));
  grpc::Slice slice;
  ASSERT_TRUE(bytes.DumpToSingleSlice(&slice).ok());
  v1::ExportResponse message;
  ASSERT_TRUE(message.ParseFromArray(slice.begin(), static_cast<int>(slice.size())));
  EXPECT_EQ(message.version(), 1000);
  EXPECT_EQ(message.changed(), -1);
  EXPECT_EQ(message.kept_size(), 2);
  EXPECT_EQ(message.elements(), 1u << 16);
  ASSERT_EQ(message.arrays_size(), 5);
  for (int i = 0; i < 5; ++i) {
    const auto& array = state.arrays[static_cast<size_t>(i)];
    EXPECT_EQ(message.arrays(i).crc32c(), array.crc32c);
    ASSERT_EQ(message.arrays(i).payload().size(), array.bytes.size());
    EXPECT_EQ(kernels::Crc32c(absl::MakeConstSpan(
                  reinterpret_cast<const std::byte*>(message.arrays(i).payload().data()), array.bytes.size())),
              array.crc32c);
  }
}

// Server "s" has a job with a table, two steps old.
class ExportTest : public RpcTest {
 protected:
  void SetUp() override {
    RpcTest::SetUp();
    v1::Table table;
    *table.add_members() = Member();
    table.set_replicas(1);
    table.set_life(kLife);
    table.add_shards()->add_holders(0);
    std::vector<v1::GetJobResponse> answers;
    ASSERT_EQ(group_.Fence(&answers), absl::OkStatus());
    model::Found found;
    found.base = -1;
    ASSERT_EQ(group_.OpenWith(table, {server_.get()}, found), absl::OkStatus());
    ASSERT_EQ(group_.Initialise(Ones), absl::OkStatus());
    const auto header = UpdateHeader(4);
    ASSERT_EQ(group_.PushAll(v1::SLICE_KIND_GRADIENT, AllTensors(4), Ones), absl::OkStatus());
    ASSERT_TRUE(group_.Finish(header).ok());
  }
  v1::Member Member() {
    v1::Member member;
    member.set_server_id(server_->server_id());
    member.set_disk(server_->disk());
    member.set_weight(1);
    member.set_address(rpc_->address());
    return member;
  }
  v1::ExportRequest RequestOf(uint64_t chunk, int64_t least = 1) {
    v1::ExportRequest request;
    request.set_job("job");
    request.set_life(kLife);
    request.set_spec_digest(model::SpecDigest(group_.spec()));
    request.set_chunk(chunk);
    request.set_least(least);
    return request;
  }
  absl::StatusOr<v1::ExportResponse> Fetch(const v1::ExportRequest& request, const v1::Member& from) {
    Answer<v1::ExportResponse> answer;
    client_.Fetch(request, from, absl::Now() + absl::Minutes(1), answer.reply());
    return answer.Wait();
  }
  void ExpectRefused(const absl::StatusOr<v1::ExportResponse>& answer, absl::StatusCode code, const char* reason) {
    EXPECT_EQ(answer.status().code(), code) << answer.status();
    EXPECT_EQ(model::ReasonOf(answer.status()), reason) << answer.status();
  }
  // An array of a chunk as pulls show it.
  std::vector<float> Pulled(uint64_t chunk, v1::Content content) {
    const model::Chunk& layout = group_.plan().layout().chunks()[chunk];
    v1::PullRequest request;
    request.set_job("job");
    request.set_version(1);
    request.set_content(content);
    request.set_unit(layout.unit);
    request.set_begin(layout.range.begin);
    request.set_end(layout.range.end);
    std::string bytes;
    EXPECT_TRUE(group_.Pull(server_.get(), request, absl::Now() + absl::Minutes(1), &bytes).Wait().ok());
    std::vector<float> values(bytes.size() / sizeof(float));
    std::memcpy(values.data(), bytes.data(), bytes.size());
    return values;
  }

  TrainerGroup group_{{server_.get()}, MakeSpec("job", SmallModel()), 1};
  ChunkClient client_{model::Access()};
};

TEST_F(ExportTest, AServerCopiesEachChunkBitForBit) {
  const size_t chunks = group_.plan().layout().chunks().size();
  ASSERT_GT(chunks, 2u);
  uint64_t bytes = 0;
  for (uint64_t chunk = 0; chunk < chunks; ++chunk) {
    const absl::StatusOr<v1::ExportResponse> answer = Fetch(RequestOf(chunk), Member());
    ASSERT_TRUE(answer.ok()) << answer.status();
    EXPECT_EQ(answer->version(), 1);
    EXPECT_EQ(answer->changed(), 1);
    EXPECT_EQ(answer->elements(), group_.plan().layout().chunks()[chunk].range.size());
    ASSERT_EQ(answer->arrays_size(), 3);
    for (int array = 0; array < 3; ++array) {
      const std::string& payload = answer->arrays(array).payload();
      const auto span = absl::MakeConstSpan(reinterpret_cast<const std::byte*>(payload.data()), payload.size());
      EXPECT_EQ(kernels::Crc32c(span), answer->arrays(array).crc32c());
      const std::vector<float> values = Pulled(chunk, static_cast<v1::Content>(v1::CONTENT_MASTER + array));
      ASSERT_GE(payload.size(), values.size() * sizeof(float));
      EXPECT_EQ(std::memcmp(payload.data(), values.data(), values.size() * sizeof(float)), 0)
          << "chunk " << chunk << ", array " << array;
      bytes += payload.size();
    }
  }
  EXPECT_EQ(server_->Figures().jobs.at("job")->exported_bytes, bytes);
}

// The whole way: a server joins, asks by gRPC, and has the holder's bits while steps go on.
TEST_F(ExportTest, AServerThatJoinsFillsFromTheHolder) {
  TestServer joins("t");
  joins.options().chunk_source = &client_;
  joins.Restart();
  v1::Table table;
  *table.add_members() = Member();
  v1::Member* const member = table.add_members();
  member->set_server_id(joins->server_id());
  member->set_disk(joins->disk());
  member->set_weight(1);
  member->set_address("127.0.0.1:1");
  table.set_replicas(2);
  table.set_life(kLife);
  v1::Shard* const shard = table.add_shards();
  shard->add_holders(0);
  shard->add_fillers(1);
  TrainerGroup next({server_.get(), joins.get()}, MakeSpec("job", SmallModel()), 1, /*epoch_counter=*/2);
  std::vector<v1::GetJobResponse> answers;
  ASSERT_EQ(next.Fence(&answers), absl::OkStatus());
  model::Found found;
  found.base = 1;
  found.decision = answers[0].decision();
  found.tensor_steps.assign(answers[0].tensor_steps().begin(), answers[0].tensor_steps().end());
  ASSERT_EQ(next.OpenWith(table, {server_.get(), joins.get()}, found), absl::OkStatus());
  const auto lacks = [&] { return joins->Status().jobs(0).unfilled_chunks(); };
  const absl::Time end = absl::Now() + absl::Minutes(1);
  while (lacks() > 0 && absl::Now() < end) {
    ASSERT_EQ(next.PushAll(v1::SLICE_KIND_GRADIENT, AllTensors(4), Ones), absl::OkStatus());
    ASSERT_TRUE(next.Finish(UpdateHeader(4)).ok());
  }
  ASSERT_EQ(lacks(), 0u);
  ASSERT_EQ(next.PushAll(v1::SLICE_KIND_GRADIENT, AllTensors(4), Ones), absl::OkStatus());
  ASSERT_TRUE(next.Finish(UpdateHeader(4)).ok());
  for (const model::Chunk& chunk : next.plan().layout().chunks()) {
    for (const v1::Content content :
         {v1::CONTENT_WORKING, v1::CONTENT_MASTER, v1::CONTENT_MOMENT1, v1::CONTENT_MOMENT2}) {
      v1::PullRequest request;
      request.set_job("job");
      request.set_version(next.step() - 1);
      request.set_content(content);
      request.set_unit(chunk.unit);
      request.set_begin(chunk.range.begin);
      request.set_end(chunk.range.end);
      std::string held, copied;
      ASSERT_TRUE(next.Pull(server_.get(), request, absl::Now() + absl::Minutes(1), &held).Wait().ok());
      ASSERT_TRUE(next.Pull(joins.get(), request, absl::Now() + absl::Minutes(1), &copied).Wait().ok());
      EXPECT_TRUE(held == copied) << "chunk " << chunk.index << ", content " << content;
    }
  }
  // Copies that came too late were sent for nothing.
  const uint64_t imported = joins->Figures().jobs.at("job")->imported_bytes;
  EXPECT_GT(imported, 0u);
  EXPECT_GE(server_->Figures().jobs.at("job")->exported_bytes, imported);
}

TEST_F(ExportTest, AnotherServerAndAnotherJobAreRefusedByName) {
  ExpectRefused(Fetch(RequestOf(99), Member()), absl::StatusCode::kInvalidArgument, model::kBadRequest);
  v1::ExportRequest request = RequestOf(0);
  request.set_life(78);
  ExpectRefused(Fetch(request, Member()), absl::StatusCode::kNotFound, model::kUnknownJob);
  request = RequestOf(0);
  request.set_job("another");
  ExpectRefused(Fetch(request, Member()), absl::StatusCode::kNotFound, model::kUnknownJob);
  v1::Member other = Member();
  other.set_server_id("t");
  ExpectRefused(Fetch(RequestOf(0), other), absl::StatusCode::kUnavailable, model::kOtherServer);
  other = Member();
  other.set_disk(other.disk() + 1);
  ExpectRefused(Fetch(RequestOf(0), other), absl::StatusCode::kUnavailable, model::kOtherServer);
  other = Member();
  other.set_address("");
  EXPECT_TRUE(absl::IsInvalidArgument(Fetch(RequestOf(0), other).status()));
}

TEST_F(ExportTest, AJobWithoutATableExportsNothing) {
  TrainerGroup plain({server_.get()}, MakeSpec("plain", SmallModel()), 1);
  ASSERT_EQ(plain.Start(), absl::OkStatus());
  v1::ExportRequest request = RequestOf(0, -1);
  request.set_job("plain");
  request.set_life(0);
  request.set_spec_digest(model::SpecDigest(plain.spec()));
  ExpectRefused(Fetch(request, Member()), absl::StatusCode::kNotFound, model::kUnknownJob);
}

TEST_F(ExportTest, TheClientsEndAnswersCallsUnderWay) {
  Answer<v1::ExportResponse> answer;
  {
    ChunkClient client{model::Access()};
    client.Fetch(RequestOf(0, 100), Member(), absl::Now() + absl::Hours(1), answer.reply());
  }
  ASSERT_TRUE(answer.arrived());
  EXPECT_TRUE(absl::IsCancelled(answer.Wait().status())) << answer.Wait().status();
}

TEST_F(ExportTest, AServerThatDoesNotAnswerIsUnavailable) {
  v1::Member gone = Member();
  rpc_.reset();
  EXPECT_TRUE(absl::IsUnavailable(Fetch(RequestOf(0), gone).status()));
}

}  // namespace
}  // namespace ballast::services
