#include "ballast/services/gateway/chunk_client.h"

#include <grpc/grpc.h>
#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "ballast/proto/base/address.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/base/text_file.h"
#include "ballast/proto/model/protocol.h"
#include "ballast/services/gateway/status_codec.h"
#include "ballast/v1/state_service.grpc.pb.h"

namespace ballast::services {
namespace {

// The largest state: 2^20 elements with three moments as fp32.
constexpr int kExportBytesMax = static_cast<int>(model::kMessageBytesMax + (64 << 10));
constexpr absl::Duration kFilesInterval = absl::Seconds(1);

std::shared_ptr<grpc::Channel> MakeChannel(const std::string& address, const model::AccessContent& access) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);  // as trainers' channels, or a proxy would get the token
  arguments.SetMaxReceiveMessageSize(kExportBytesMax);
  arguments.SetCompressionAlgorithm(GRPC_COMPRESS_NONE);
  arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);  // services/job/filling asks again
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, 20000);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 10000);
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 50);
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 5000);  // despite its name: how long one attempt may take
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 1000);
  arguments.SetInt(GRPC_ARG_DNS_MIN_TIME_BETWEEN_RESOLUTIONS_MS, 1000);
  const auto credentials = access.ca.empty() ? grpc::InsecureChannelCredentials()
                                             : grpc::SslCredentials({access.ca, access.key, access.certificate});
  return grpc::CreateCustomChannel(address, credentials, arguments);
}

}  // namespace

struct ChunkClient::Connection {
  Connection(const std::string& address, const model::AccessContent& access)
      : authorization(access.authorization), stub(v1::StateService::NewStub(MakeChannel(address, access))) {}
  const std::string authorization;
  const std::unique_ptr<v1::StateService::Stub> stub;
  absl::Time used = absl::InfinitePast();
};

struct ChunkClient::Call {
  std::shared_ptr<Connection> connection;
  grpc::ClientContext context;
  v1::ExportRequest request;
  v1::ExportResponse response;
  Reply<v1::ExportResponse> reply;
};

ChunkClient::ChunkClient(model::Access access) : access_(std::move(access)) {}

ChunkClient::~ChunkClient() {
  absl::MutexLock lock(&mu_);
  for (Call* const call : calls_) call->context.TryCancel();
  const auto over = [this] {
    mu_.AssertHeld();
    return calls_.empty() && ending_ == 0;
  };
  mu_.Await(absl::Condition(&over));
}

void ChunkClient::Retire(std::shared_ptr<Connection> connection) {
  retired_.push_back(std::move(connection));
  if (retired_.size() > kRetiredMax) retired_.pop_front();
}

void ChunkClient::LookAtFiles(absl::Time now) {
  if (now - looked_ < kFilesInterval) return;
  looked_ = now;
  std::string stamp = model::StampOf(access_.paths());
  if (std::exchange(stamp_, stamp) == stamp) return;
  for (auto& [address, connection] : connections_) Retire(std::move(connection));
  connections_.clear();
}

absl::StatusOr<std::shared_ptr<ChunkClient::Connection>> ChunkClient::ConnectionTo(const std::string& address) {
  const absl::StatusOr<model::Address> server = model::ParseAddress(address, model::AddressUse::kConnect);
  if (!server.ok()) return model::Annotate(server.status(), "the job's table has no address of the server");
  BALLAST_RETURN_IF_ERROR(model::CheckAccess(access_, *server));
  const absl::Time now = absl::Now();
  absl::MutexLock lock(&mu_);
  LookAtFiles(now);
  std::shared_ptr<Connection>& known = connections_[address];
  if (known == nullptr) {
    absl::StatusOr<model::AccessContent> content = model::ReadAccess(access_);
    if (!content.ok()) {
      connections_.erase(address);
      return content.status();
    }
    known = std::make_shared<Connection>(address, *content);
  }
  known->used = now;
  std::shared_ptr<Connection> connection = known;
  if (connections_.size() > kConnectionsMax) {
    const auto oldest = std::min_element(connections_.begin(), connections_.end(),
                                         [](const auto& a, const auto& b) { return a.second->used < b.second->used; });
    Retire(std::move(oldest->second));
    connections_.erase(oldest);
  }
  return connection;
}

void ChunkClient::Fetch(const v1::ExportRequest& request, const v1::Member& from, absl::Time deadline,
                        Reply<v1::ExportResponse> reply) {
  absl::StatusOr<std::shared_ptr<Connection>> connection = ConnectionTo(from.address());
  if (!connection.ok()) return reply(connection.status());
  auto* const call = new Call{.connection = *std::move(connection), .request = request, .reply = std::move(reply)};
  call->context.set_deadline(absl::ToChronoTime(deadline));
  call->context.AddMetadata(model::kVersionMetadata, absl::StrCat(model::kProtocolVersion));
  call->context.AddMetadata(model::kServerMetadata, model::TargetOf(from.server_id(), from.disk()));
  if (!call->connection->authorization.empty()) {
    call->context.AddMetadata("authorization", call->connection->authorization);
  }
  {
    absl::MutexLock lock(&mu_);
    calls_.insert(call);
  }
  call->connection->stub->async()->Export(&call->context, &call->request, &call->response,
                                          [this, call](const grpc::Status& status) { End(call, FromGrpc(status)); });
}

void ChunkClient::End(Call* call, const absl::Status& status) {
  {
    absl::MutexLock lock(&mu_);
    calls_.erase(call);
    ++ending_;
  }
  if (status.ok()) {
    call->reply(std::move(call->response));
  } else {
    call->reply(status);
  }
  delete call;  // while the destructor waits, which has the connection
  absl::MutexLock lock(&mu_);
  --ending_;
}

}  // namespace ballast::services
