// A transport found in a registry, at its end. The registry is an etcd of this test's own with one entry; what goes on
// with a real etcd is tests/e2e/discovery_test.py's.
#include "ballast/client/discovery/discovered_transport.h"

#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ballast/v1/registry.pb.h"

namespace ballast::client {
namespace {

constexpr char kAddress[] = "127.0.0.1:1";

// Answers every call with one entry, of server 'a'.
class OneEntry final : public grpc::CallbackGenericService {
 public:
  grpc::ServerGenericBidiReactor* CreateReactor(grpc::GenericCallbackServerContext* /*context*/) override {
    return new Answer();
  }

 private:
  class Answer final : public grpc::ServerGenericBidiReactor {
   public:
    Answer() { StartRead(&question_); }
    void OnReadDone(bool /*ok*/) override {
      v1::EtcdRangeResponse response;
      v1::EtcdKeyValue* const pair = response.add_kvs();
      pair->set_key("/test/servers/a");
      pair->set_value(absl::StrCat(R"({"server_id":"a","address":")", kAddress, R"("})"));
      const grpc::Slice bytes(response.SerializeAsString());
      answer_ = grpc::ByteBuffer(&bytes, 1);
      StartWriteAndFinish(&answer_, grpc::WriteOptions(), grpc::Status::OK);
    }
    void OnDone() override { delete this; }

   private:
    grpc::ByteBuffer question_, answer_;
  };
};

// Its calls end when it ends, as gRPC's do that are under way.
class LastCalls final : public Transport {
 public:
  explicit LastCalls(std::string name) : name_(std::move(name)) {}
  ~LastCalls() override {
    for (const auto& done : pulls_) done(absl::CancelledError("ended"));
  }
  std::string name() const override { return name_; }
  void Identify(const v1::IdentifyRequest&, absl::Time, Callback<v1::IdentifyResponse>) override {}
  void GetJob(const v1::GetJobRequest&, absl::Time, Callback<v1::GetJobResponse>) override {}
  void Fence(const v1::FenceRequest&, absl::Time, Callback<v1::FenceResponse>) override {}
  void Open(const v1::OpenRequest&, absl::Time, Callback<v1::OpenResponse>) override {}
  void Norm(const v1::NormRequest&, absl::Time, Callback<v1::NormResponse>) override {}
  void Seal(const v1::SealRequest&, absl::Time, Callback<v1::SealResponse>) override {}
  void Commit(const v1::CommitRequest&, absl::Time, Callback<v1::CommitResponse>) override {}
  void Pin(const v1::PinRequest&, absl::Time, Callback<v1::PinResponse>) override {}
  void Unpin(const v1::UnpinRequest&, absl::Time, Callback<v1::UnpinResponse>) override {}
  void Push(const v1::PushRequest&, absl::Span<const std::byte>, absl::Time, Callback<v1::PushResponse>) override {}
  void Pull(const v1::PullRequest&, absl::Span<std::byte>, absl::Time,
            std::function<void(absl::Status)> done) override {
    pulls_.push_back(std::move(done));
  }

 private:
  const std::string name_;
  std::vector<std::function<void(absl::Status)>> pulls_;
};

// The router names the server in the error of a call, whenever the call ends.
TEST(DiscoveredTransport, HasItsNameWhileItsLastCallsEnd) {
  OneEntry etcd;
  int port = 0;
  grpc::ServerBuilder builder;
  builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
  builder.RegisterCallbackGenericService(&etcd);
  const std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  ASSERT_NE(server, nullptr);
  const auto url = registry::ParseRegistryUrl(absl::StrCat("etcd://127.0.0.1:", port, "/test"));
  ASSERT_TRUE(url.ok()) << url.status();
  auto transports = DiscoverTransports(
      *url, [](const std::string& address) { return std::make_unique<LastCalls>("server at " + address); }, "",
      absl::Seconds(60), nullptr, registry::Servers::kMembers);
  ASSERT_TRUE(transports.ok()) << transports.status();
  ASSERT_EQ(transports->size(), 1u);
  Transport* const transport = transports->front().get();
  std::string name;
  absl::Status ended;
  transport->Pull({}, {}, absl::InfiniteFuture(), [&](const absl::Status& status) {
    ended = status;
    name = transport->name();
  });
  transports->clear();
  EXPECT_EQ(ended.code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(name, absl::StrCat("server at ", kAddress));
}

}  // namespace
}  // namespace ballast::client
