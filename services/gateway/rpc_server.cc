#include "ballast/services/gateway/rpc_server.h"

#include <google/protobuf/stubs/logging.h>
#include <grpc/grpc.h>
#include <grpc/support/log.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/resource_quota.h>
#include <grpcpp/security/tls_certificate_provider.h>
#include <grpcpp/security/tls_credentials_options.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "ballast/proto/base/address.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/model/layout.h"
#include "ballast/proto/model/protocol.h"
#include "ballast/services/counters/process_counters.h"
#include "ballast/services/gateway/admin_service.h"
#include "ballast/services/gateway/call_service.h"
#include "ballast/services/gateway/connections.h"
#include "ballast/services/gateway/grpc_threads.h"
#include "ballast/services/gateway/shared_memory.h"
#include "ballast/services/gateway/state_service.h"
#include "ballast/services/gateway/trimmer.h"

namespace ballast::services {
namespace {

// The largest message is a job's Open; a slice is smaller. Room for the frame around it.
constexpr int kReceiveBytesMax = static_cast<int>(model::kMessageBytesMax + (64 << 10));
// Clients ping every 20 s, also between steps when no call is open; a stricter server would send them GOAWAY.
constexpr int kPingIntervalMinMs = 10'000;
// A trainer that a debugger stops for less than two of these keeps its connection.
constexpr int kKeepaliveMs = 60'000;
// Of a connection without a call; the longest steps take minutes, and the next call connects anew.
constexpr int kIdleMs = 30 * 60'000;
constexpr int kHandshakeMs = 20'000;
// A client has 64 MiB in flight: as many calls at a time, with ranges of 4 KiB. A lower limit could keep a seal behind
// the pulls that wait for it.
constexpr int kStreamsPerConnectionMax = 16384;
// Bound of gRPC's memory for incoming messages and calls under way: 128 MiB of waiting pushes, as much of other waiting
// requests, and 768 MiB for messages just coming in: 192 slices of 4 MiB. Beyond the bound gRPC reads no further, then
// cancels calls.
constexpr size_t kGrpcBytesMax = size_t{1} << 30;
// A payload that waits keeps the buffers that it was received in: two of them besides its own bytes.
constexpr int kReadBytesMax = 256 << 10;

constexpr absl::Duration kTrimInterval = absl::Seconds(1);

// Beside a GPU, for answers on their way: sixteen of the largest, more than a link needs to be busy.
constexpr uint64_t kAnswerBytes = uint64_t{64} << 20;

// A call may wait for this long without a deadline, and ends with its connection's grace at the latest.
constexpr absl::Duration kAgeGraceMax = absl::Minutes(10);

// Looks at clients' certificates in place of gRPC, which would tell nobody why it refuses one. Threads: any.
class ClientVerifier final : public grpc::experimental::ExternalCertificateVerifier {
 public:
  explicit ClientVerifier(Guard* guard) : guard_(guard) {}
  bool Verify(grpc::experimental::TlsCustomVerificationCheckRequest* request, std::function<void(grpc::Status)>,
              grpc::Status* sync_status) override {
    const auto text = [](grpc::string_ref shown) { return absl::string_view(shown.data(), shown.size()); };
    const absl::Status met = guard_->MeetClient(text(request->peer_cert()), text(request->peer_cert_full_chain()));
    if (!met.ok()) *sync_status = grpc::Status(grpc::StatusCode::UNAUTHENTICATED, std::string(met.message()));
    return true;
  }
  void Cancel(grpc::experimental::TlsCustomVerificationCheckRequest*) override {}

 private:
  Guard* const guard_;
};

std::shared_ptr<grpc::ServerCredentials> MakeCredentials(Guard* guard) {
  const ServedCertificates* const served = guard == nullptr ? nullptr : guard->certificates();
  if (served == nullptr) return grpc::InsecureServerCredentials();
  constexpr unsigned kLookIntervalSeconds = 1;  // gRPC takes no shorter one
  grpc::experimental::TlsServerCredentialsOptions options(
      std::make_shared<grpc::experimental::FileWatcherCertificateProvider>(
          served->pair_path(), served->pair_path(), served->client_ca_path(), kLookIntervalSeconds));
  options.watch_identity_key_cert_pairs();
  options.set_check_call_host(false);
  if (served->paths().client_ca.empty()) {
    options.set_cert_request_type(GRPC_SSL_DONT_REQUEST_CLIENT_CERTIFICATE);
  } else {
    options.watch_root_certs();  // whose names the handshake tells the client
    // A token may stand for a certificate; without tokens nobody gets past the handshake. That the client has the
    // certificate's key is OpenSSL's to check, all else the verifier's.
    options.set_cert_request_type(GRPC_SSL_REQUEST_CLIENT_CERTIFICATE_BUT_DONT_VERIFY);
    options.set_certificate_verifier(grpc::experimental::ExternalCertificateVerifier::Create<ClientVerifier>(guard));
  }
  return grpc::experimental::TlsServerCredentials(options);
}

// Neither a new certificate nor a revocation ends a connection, so each ends of age: then its client shows itself anew.
void AddConnectionAge(absl::Duration age, grpc::ServerBuilder* builder) {
  builder->AddChannelArgument(GRPC_ARG_MAX_CONNECTION_AGE_MS, static_cast<int>(absl::ToInt64Milliseconds(age)));
  builder->AddChannelArgument(GRPC_ARG_MAX_CONNECTION_AGE_GRACE_MS,
                              static_cast<int>(absl::ToInt64Milliseconds(std::min(age, kAgeGraceMax))));
}

absl::StatusOr<std::unique_ptr<SharedMemory>> ShareMemory(const RpcServerOptions& options, const StateServer& state) {
  if (options.shared_memory_bytes > 0) {
    return SharedMemory::Start(options.shared_memory_bytes, state.counters().shared_memory);
  }
  return absl::FailedPreconditionError("shared memory is turned off");
}

// Each takes gRPC about 20 KiB.
constexpr uint64_t kManyConnections = 256;

}  // namespace

struct RpcServer::Impl {
  Impl(std::unique_ptr<Connections> taken, StateServer* state, const RpcServerOptions& options,
       std::shared_ptr<storage::Slabs> answers, absl::StatusOr<std::unique_ptr<SharedMemory>> shared_memory)
      : connections(std::move(taken)),
        state(state),
        gate(options.guard, state, options.protocol_version),
        shared(std::move(shared_memory)),
        state_service(state, &gate, &room, std::move(answers), shared.ok() ? shared->get() : nullptr),
        admin_service(state, &gate, &room),
        calls(&gate, &reads, &trimmer, &methods, &room, connections.get(), &health,
              options.reflection ? &reflection : nullptr) {
    state_service.AddTo(&methods);
    admin_service.AddTo(&methods);
  }

  void TakeCare();

  const std::unique_ptr<Connections> connections;
  StateServer* const state;
  const Gate gate;
  const absl::StatusOr<std::unique_ptr<SharedMemory>> shared;
  Reads reads;
  ParseRoom room;
  StateServiceImpl state_service;
  AdminServiceImpl admin_service;
  Methods methods;
  Reflection reflection{&gate};
  Health health{&trimmer};
  Trimmer trimmer{[this] { connections->Wake(); }};  // outlives the calls, not the reads whose turns it ends
  CallService calls;
  absl::Time trimmed = absl::Now();  // TakeCare's
  std::string address;
  absl::Mutex mu;
  std::unique_ptr<grpc::Server> server;
  std::shared_ptr<grpc::Channel> self;  // leads into the server without the network
  bool stopped ABSL_GUARDED_BY(mu) = false;
  // TakeCare's, since it last gave memory back: connections, and whether messages did not come whole.
  uint64_t most_open = 0;
  bool ended_reads = false;
};

void RpcServer::Impl::TakeCare() {
  const absl::Time now = absl::Now();
  ended_reads |= reads.Look(now);
  ended_reads |= health.Look(now);
  trimmer.Run();
  // The large messages of a job's start, and many connections, leave more memory behind than a server otherwise needs.
  if (now - trimmed < kTrimInterval) return;
  trimmed = now;
  const uint64_t open = OfProcess().connections;
  most_open = std::max(most_open, open);
  const bool fewer = open + kManyConnections < most_open;
  if (fewer) most_open = open;
  const bool returned = room.TakeReturned();
  if (std::exchange(ended_reads, false) || returned || fewer) trimmer.Trim(nullptr);
}

absl::StatusOr<std::unique_ptr<RpcServer>> RpcServer::Start(const RpcServerOptions& options, StateServer* state) {
  BALLAST_ASSIGN_OR_RETURN(model::Address address, model::ParseAddress(options.listen, model::AddressUse::kListen));
  auto answers = std::make_shared<storage::Slabs>();
  BALLAST_ASSIGN_OR_RETURN(storage::Arena memory, state->MapAnswers(kAnswerBytes));
  answers->Add(std::move(memory));
  auto connections = Connections::Listen(address, options.connections_max);
  if (!connections.ok()) {
    return model::Error(absl::StatusCode::kFailedPrecondition, model::kBadConfig,
                        absl::StrCat("cannot listen on '", options.listen,
                                     "': the port is in use, or this machine does not have the address; choose another "
                                     "`listen` (",
                                     connections.status().message(), ")"));
  }
  BALLAST_RETURN_IF_ERROR(CheckRoomForGrpc());
  auto impl =
      std::make_unique<Impl>(*std::move(connections), state, options, std::move(answers), ShareMemory(options, *state));
  grpc::ServerBuilder builder;
  auto acceptor = builder.experimental().AddExternalConnectionAcceptor(
      grpc::ServerBuilder::experimental_type::ExternalConnectionType::FROM_FD, MakeCredentials(options.guard));
  if (options.guard != nullptr && options.guard->certificates() != nullptr) {
    AddConnectionAge(options.guard->options().connection_age, &builder);
  }
  builder.SetMaxReceiveMessageSize(kReceiveBytesMax);
  builder.SetResourceQuota(grpc::ResourceQuota("ballast").Resize(kGrpcBytesMax));
  builder.AddChannelArgument(GRPC_ARG_TCP_MAX_READ_CHUNK_SIZE, kReadBytesMax);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, kStreamsPerConnectionMax);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, kPingIntervalMinMs);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  // A host that is gone without a word would keep its connection, and its waiting calls, for hours.
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, kKeepaliveMs);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, kKeepaliveMs);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONNECTION_IDLE_MS, kIdleMs);
  builder.AddChannelArgument(GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS, kHandshakeMs);
  // A few compressed bytes could become a thousand times as many, and no client of ours compresses.
  builder.AddChannelArgument(GRPC_ARG_ENABLE_PER_MESSAGE_DECOMPRESSION, 0);
  builder.RegisterCallbackGenericService(&impl->calls);
  impl->server = builder.BuildAndStart();
  if (impl->server == nullptr) return absl::InternalError("gRPC did not create a server");
  BALLAST_RETURN_IF_ERROR(MakeThreadsOfGrpc());
  impl->address = model::FormatAddress(impl->connections->address());
  impl->self = impl->server->InProcessChannel(grpc::ChannelArguments());
  std::function<void(const std::string&)> refuse_plain;
  if (options.guard != nullptr && options.guard->certificates() != nullptr) {
    refuse_plain = [guard = options.guard](const std::string& peer) { guard->RefusePlain(peer); };
  }
  BALLAST_RETURN_IF_ERROR(impl->connections->Start(
      std::move(acceptor), [raw = impl.get()] { raw->TakeCare(); }, std::move(refuse_plain)));
  return std::unique_ptr<RpcServer>(new RpcServer(std::move(impl)));
}

RpcServer::RpcServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
RpcServer::~RpcServer() { Stop(absl::ZeroDuration()); }

const std::string& RpcServer::address() const { return impl_->address; }
const absl::Status& RpcServer::shared_memory_status() const { return impl_->shared.status(); }

absl::Status RpcServer::Try(absl::Duration patience) {
  BALLAST_RETURN_IF_ERROR(impl_->connections->Try(patience));
  grpc::GenericStub stub(impl_->self);
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + patience));
  const grpc::Slice nothing;
  const grpc::ByteBuffer request(&nothing, 1);
  grpc::ByteBuffer answer;
  absl::Notification done;
  grpc::Status status;
  stub.UnaryCall(&context, "/grpc.health.v1.Health/Check", grpc::StubOptions(), &request, &answer,
                 [&](grpc::Status ended) {
                   status = std::move(ended);
                   done.Notify();
                 });
  done.WaitForNotification();  // until the deadline
  if (status.ok()) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat("the server's call to itself ended with ", status.error_message()));
}

void RpcServer::TakeLogs() {
  ::gpr_set_log_function([](gpr_log_func_args* line) {
    const auto level = line->severity == GPR_LOG_SEVERITY_ERROR  ? spdlog::level::err
                       : line->severity == GPR_LOG_SEVERITY_INFO ? spdlog::level::info
                                                                 : spdlog::level::debug;
    spdlog::log(level, "gRPC: {}", line->message);
  });
  // Errors here are about messages that others sent, as many as they like; each call's answer says what was wrong.
  google::protobuf::SetLogHandler([](google::protobuf::LogLevel level, const char*, int, const std::string& text) {
    spdlog::log(level == google::protobuf::LOGLEVEL_FATAL ? spdlog::level::err : spdlog::level::debug, "protobuf: {}",
                text);
  });
}

void RpcServer::Stop(absl::Duration grace) {
  absl::MutexLock lock(&impl_->mu);
  if (std::exchange(impl_->stopped, true)) return;
  impl_->health.Stop();
  // Waiting requests answer UNAVAILABLE, since nothing will wake them any more, and the shutdown below can end.
  impl_->state->Stop();
  impl_->connections->Stop();
  impl_->trimmer.Stop();
  impl_->server->Shutdown(absl::ToChronoTime(absl::Now() + grace));
  impl_->server->Wait();
}

}  // namespace ballast::services
