#include "ballast/client/transport/grpc_channels.h"

#include <grpc/grpc.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>
#include <grpcpp/support/channel_arguments.h>

#include <utility>

#include "absl/time/clock.h"
#include "ballast/proto/base/text_file.h"
#include "ballast/proto/model/protocol.h"

namespace ballast::client {
namespace {

// The largest slice (2^20 fp32 elements) and its header.
constexpr int kReceiveBytesMax = static_cast<int>(model::kMessageBytesMax) + (64 << 10);
constexpr absl::Duration kFilesInterval = absl::Seconds(1);

std::shared_ptr<grpc::ChannelCredentials> CredentialsOf(const model::AccessContent& access) {
  if (access.ca.empty()) return grpc::InsecureChannelCredentials();
  return grpc::SslCredentials({access.ca, access.key, access.certificate});
}

std::shared_ptr<grpc::Channel> MakeChannel(const std::string& address, const model::AccessContent& access, int number) {
  grpc::ChannelArguments arguments;
  // Channels of equal arguments would share one connection.
  arguments.SetInt("ballast.channel", number);
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  // A proxy of the environment is for downloads: by default gRPC would send it tokens and state, also for loopback.
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  arguments.SetMaxReceiveMessageSize(kReceiveBytesMax);
  arguments.SetMaxSendMessageSize(kReceiveBytesMax);
  arguments.SetCompressionAlgorithm(GRPC_COMPRESS_NONE);
  arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);  // client/transport/router is the one place that retries
  // Must not be below the interval that the server permits, or the server answers GOAWAY too_many_pings.
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, 20000);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 10000);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  // A server that comes back is found soon: each call that fails meanwhile waits for the next attempt.
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 50);
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 5000);  // despite its name: how long one attempt may take
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 200);
  // A server may come back at another address under its name, as a pod does; gRPC would ask again after half a minute.
  arguments.SetInt(GRPC_ARG_DNS_MIN_TIME_BETWEEN_RESOLUTIONS_MS, 1000);
  return grpc::CreateCustomChannel(address, CredentialsOf(access), arguments);
}

}  // namespace

Channels::Channels(const std::string& address, const model::AccessContent& access)
    : authorization_(access.authorization),
      control_(v1::StateService::NewStub(MakeChannel(address, access, 0))),
      data_(MakeChannel(address, access, 1)) {}

void Channels::Sign(grpc::ClientContext* context) const {
  if (!authorization_.empty()) context->AddMetadata("authorization", authorization_);
}

FreshChannels::FreshChannels(std::string address, model::Access access, const model::AccessContent& content)
    : address_(std::move(address)),
      access_(std::move(access)),
      now_(std::make_shared<const Channels>(address_, content)),
      stamp_(model::StampOf(access_.paths())),
      looked_(absl::Now()) {}

std::shared_ptr<const Channels> FreshChannels::Get() {
  absl::MutexLock lock(&mu_);
  const absl::Time now = absl::Now();
  if (stamp_.empty() || now - looked_ < kFilesInterval) return now_;
  looked_ = now;
  std::string stamp = model::StampOf(access_.paths());
  if (stamp == stamp_) return now_;
  const absl::StatusOr<model::AccessContent> content = model::ReadAccess(access_);
  if (!content.ok()) return now_;  // half written, perhaps
  stamp_ = std::move(stamp);
  retired_.push_back(std::move(now_));
  if (retired_.size() > kRetiredMax) retired_.pop_front();
  now_ = std::make_shared<const Channels>(address_, *content);
  return now_;
}

}  // namespace ballast::client
