// A state server on the wire, and a stub to speak to it.
#pragma once

#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "absl/time/clock.h"
#include "ballast/proto/model/status.h"
#include "ballast/services/rpc/rpc_server.h"
#include "ballast/services/rpc/status_codec.h"
#include "ballast/tests/services/trainer_group.h"
#include "ballast/v1/admin_service.grpc.pb.h"
#include "ballast/v1/state_service.grpc.pb.h"

namespace ballast::services {

// Connects to "host:port" and returns the socket; -1 if refused.
int ConnectTo(const std::string& address);
// Sends bytes that no protocol knows, on several connections. The seed is printed on failure by the caller.
void SendRandomBytes(const std::string& address, uint64_t seed);

// A unary call of bytes by its full name, for messages that have no generated class here or are no messages at all.
grpc::Status RawCall(const std::shared_ptr<grpc::Channel>& channel, const std::string& method,
                     const std::string& request, std::string* response);

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

  // One call, 30 s, the server's reason restored.
  template <typename Request, typename Response>
  absl::Status Call(grpc::Status (v1::StateService::Stub::*method)(grpc::ClientContext*, const Request&, Response*),
                    const Request& request, Response* response) {
    grpc::ClientContext context;
    context.set_deadline(absl::ToChronoTime(absl::Now() + absl::Seconds(30)));
    return FromGrpc((state_.get()->*method)(&context, request, response));
  }

  TestServer server_{"s"};
  std::unique_ptr<RpcServer> rpc_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::StateService::Stub> state_;
  std::unique_ptr<v1::AdminService::Stub> admin_;
};

}  // namespace ballast::services
