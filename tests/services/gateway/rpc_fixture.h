// A state server behind gRPC, with stubs for its services.
#pragma once

#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "absl/time/clock.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/model/protocol.h"
#include "ballast/services/gateway/rpc_server.h"
#include "ballast/services/gateway/status_codec.h"
#include "ballast/tests/services/trainer_group.h"
#include "ballast/v1/admin_service.grpc.pb.h"
#include "ballast/v1/state_service.grpc.pb.h"

namespace ballast::services {

// Connects to "host:port" and returns the socket; -1 if refused.
int ConnectTo(const std::string& address);
// Sends bytes of no known protocol on several connections. The caller prints the seed on failure.
void SendRandomBytes(const std::string& address, uint64_t seed);

// Makes a unary call with raw bytes. `method` is the full name. For messages without a generated class here, and for
// bytes that are no message at all.
grpc::Status RawCall(const std::shared_ptr<grpc::Channel>& channel, const std::string& method,
                     const std::string& request, std::string* response, const std::string& authorization = "");

inline grpc::ByteBuffer BytesOf(const std::string& bytes) {
  const grpc::Slice slice(bytes);
  return grpc::ByteBuffer(&slice, 1);
}

// Says which version and which server a call is for, as trainers do.
inline void NameTarget(const StateServer& server, grpc::ClientContext* context) {
  context->AddMetadata(model::kVersionMetadata, absl::StrCat(model::kProtocolVersion));
  context->AddMetadata(model::kServerMetadata, model::TargetOf(server.server_id(), server.disk()));
}

class RpcTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto rpc = RpcServer::Start({}, server_.get());
    ASSERT_TRUE(rpc.ok()) << rpc.status();
    rpc_ = *std::move(rpc);
    channel_ = grpc::CreateChannel(rpc_->address(), grpc::InsecureChannelCredentials());
    state_ = v1::StateService::NewStub(channel_);
    admin_ = v1::AdminService::NewStub(channel_);
  }

  // Makes a call with a deadline of a minute; the status carries the server's reason.
  template <typename Request, typename Response>
  absl::Status Call(grpc::Status (v1::StateService::Stub::*method)(grpc::ClientContext*, const Request&, Response*),
                    const Request& request, Response* response) {
    grpc::ClientContext context;
    context.set_deadline(absl::ToChronoTime(absl::Now() + absl::Minutes(1)));
    NameTarget(*server_.get(), &context);
    return FromGrpc((state_.get()->*method)(&context, request, response));
  }

  TestServer server_{"s"};
  std::unique_ptr<RpcServer> rpc_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::StateService::Stub> state_;
  std::unique_ptr<v1::AdminService::Stub> admin_;
};

}  // namespace ballast::services
