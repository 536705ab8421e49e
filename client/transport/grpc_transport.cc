#include "ballast/client/grpc_transport.h"

#include <grpc/grpc.h>
#include <grpcpp/client_context.h>
#include <grpcpp/support/byte_buffer.h>
#include <malloc.h>

#include <algorithm>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "ballast/client/discovery/discovered_transport.h"
#include "ballast/client/transport/grpc_calls.h"
#include "ballast/client/transport/grpc_channels.h"
#include "ballast/client/transport/grpc_pull_reader.h"
#include "ballast/client/transport/shared_slots.h"
#include "ballast/client/transport/sharing.h"
#include "ballast/kernels/kernels.h"
#include "ballast/proto/base/access.h"
#include "ballast/proto/base/address.h"
#include "ballast/proto/base/mutexes.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/base/threads.h"
#include "ballast/proto/base/tls_probe.h"
#include "ballast/proto/model/protocol.h"
#include "ballast/proto/registry/registry_url.h"
#include "ballast/proto/registry/roster.h"
#include "ballast/v1/state_service.grpc.pb.h"

namespace ballast::client {
namespace {

constexpr char kPushMethod[] = "/ballast.v1.StateService/Push";
constexpr char kDropMethod[] = "/ballast.v1.AdminService/DropJob";
constexpr char kPullMethod[] = "/ballast.v1.StateService/Pull";

class GrpcTransport final : public Transport {
 public:
  GrpcTransport(const std::string& address, const model::Access& access, const model::AccessContent& content)
      : address_(address), access_(access), channels_(address, access, content) {}
  ~GrpcTransport() override {
    sharing_.Cancel();
    calls_.CancelAndWait();
  }

  std::string name() const override { return address_; }
  void MeanFor(const std::string& target) override {
    absl::MutexLock lock(&target_mutex_);
    target_ = target;
  }
  void Cancel() override {
    sharing_.Cancel();
    calls_.Cancel();
  }

  // If the request says so, also begins to share memory where the server is on this host, and calls back once that is
  // settled.
  void Identify(const v1::IdentifyRequest& request, absl::Time deadline, Callback<v1::IdentifyResponse> done) override {
    done = WithTlsFault(deadline, std::move(done));
    if (request.shares_memory() && sharing_.Begin(/*at_once=*/true)) {
      return IdentifyAndShare(request, deadline, std::move(done));
    }
    Unary(&Async::Identify, request, deadline, std::move(done));
  }
  void GetJob(const v1::GetJobRequest& request, absl::Time deadline, Callback<v1::GetJobResponse> done) override {
    Unary(&Async::GetJob, request, deadline, std::move(done));
  }
  void Fence(const v1::FenceRequest& request, absl::Time deadline, Callback<v1::FenceResponse> done) override {
    Unary(&Async::Fence, request, deadline, std::move(done));
  }
  void Open(const v1::OpenRequest& request, absl::Time deadline, Callback<v1::OpenResponse> done) override {
    Unary(&Async::Open, request, deadline, std::move(done));
  }
  void Norm(const v1::NormRequest& request, absl::Time deadline, Callback<v1::NormResponse> done) override {
    Unary(&Async::Norm, request, deadline, std::move(done));
  }
  void Seal(const v1::SealRequest& request, absl::Time deadline, Callback<v1::SealResponse> done) override {
    Unary(&Async::Seal, request, deadline, std::move(done));
  }
  void Commit(const v1::CommitRequest& request, absl::Time deadline, Callback<v1::CommitResponse> done) override {
    Unary(&Async::Commit, request, deadline, std::move(done));
  }
  void Pin(const v1::PinRequest& request, absl::Time deadline, Callback<v1::PinResponse> done) override {
    Unary(&Async::Pin, request, deadline, std::move(done));
  }
  void Unpin(const v1::UnpinRequest& request, absl::Time deadline, Callback<v1::UnpinResponse> done) override {
    Unary(&Async::Unpin, request, deadline, std::move(done));
  }

  void DropJob(const v1::DropJobRequest& request, absl::Time deadline, Callback<v1::DropJobResponse> done) override {
    DataCall(kDropMethod, request, deadline,
             [done = std::move(done)](const grpc::Status& status, const grpc::ByteBuffer&) {
               if (status.ok()) return done(v1::DropJobResponse());
               done(FromGrpc(status));
             });
  }
  void Push(const v1::PushRequest& header, absl::Span<const std::byte> payload, absl::Time deadline,
            Callback<v1::PushResponse> done) override {
    if (auto slot = TakeSlot(payload.size())) {
      return PushShared(header, payload, std::move(slot), deadline, std::move(done));
    }
    auto* call = new PushCall;
    call->calls = &calls_;
    call->done = std::move(done);
    v1::PushRequest sent = header;
    SetChecksum(&sent, [payload] { return kernels::Crc32c(payload); });
    call->request = EncodePush(sent, payload, call);
    Begin(&*call->context, deadline)
        ->data()
        ->UnaryCall(&*call->context, kPushMethod, grpc::StubOptions(), &call->request, &call->response,
                    [call](const grpc::Status& status) { call->CalledBack(status); });
  }

  void Pull(const v1::PullRequest& request, absl::Span<std::byte> to, absl::Time deadline,
            std::function<void(absl::Status)> done) override {
    if (auto slot = TakeSlot(to.size())) {
      v1::PullRequest sent = request;
      *sent.mutable_shared() = slot->place();
      return SlotCall(kPullMethod, sent, std::move(slot), deadline, std::move(done),
                      [to](const grpc::ByteBuffer& response, absl::Span<const std::byte> shared) {
                        return PullReader(response).ReadInto(to, shared);
                      });
    }
    DataCall(kPullMethod, request, deadline,
             [to, done = std::move(done)](const grpc::Status& status, const grpc::ByteBuffer& response) {
               absl::Status result = FromGrpc(status);
               if (result.ok()) result = PullReader(response).ReadInto(to);
               done(std::move(result));
             });
  }

 private:
  using Async = v1::StateService::StubInterface::async_interface;

  // Of what this try sends: the owner of borrowed memory may change it and then drop the step. With an earlier checksum
  // the push would be refused and sent again, and Drop would wait for it.
  template <typename Compute>
  static void SetChecksum(v1::PushRequest* sent, const Compute& compute) {
    if (sent->crc32c() == 0) sent->set_crc32c(compute());
  }

  using Slot = std::shared_ptr<SharedSlots::Slot>;

  // Null: the slice goes over the wire. Memory that was lost is replaced in the background.
  Slot TakeSlot(uint64_t bytes) {
    if (bytes < SharedSlots::kSliceBytesMin) return nullptr;
    if (const std::shared_ptr<SharedSlots> slots = sharing_.slots()) return slots->Take(bytes);
    if (sharing_.Begin(/*at_once=*/false)) {
      IdentifyAndShare({}, absl::Now() + model::kHandOverMax, [](const absl::StatusOr<v1::IdentifyResponse>&) {});
    }
    return nullptr;
  }

  // REQUIRES: sharing_.Begin().
  void IdentifyAndShare(v1::IdentifyRequest request, absl::Time deadline, Callback<v1::IdentifyResponse> done) {
    request.set_shares_memory(true);
    Unary<v1::IdentifyRequest, v1::IdentifyResponse>(
        &Async::Identify, request, deadline,
        [this, deadline, done = std::move(done)](absl::StatusOr<v1::IdentifyResponse> answer) {
          if (!answer.ok()) {
            sharing_.End(answer.status());
            return done(std::move(answer));
          }
          v1::MemoryOffer offer;
          offer.Swap(answer->mutable_memory());
          answer->clear_memory();  // nobody else's
          absl::StatusOr<model::Descriptor> socket = SharedSlots::Connect(offer);
          if (!socket.ok()) {
            sharing_.End(socket.status());
            return done(std::move(answer));
          }
          HandOver(*std::move(socket), offer, std::min(deadline, absl::Now() + model::kHandOverMax),
                   [done, answer = std::move(answer)] { done(answer); });
        });
  }

  // On a thread of its own: callbacks must not wait, and the server's answers have to be waited for.
  void HandOver(model::Descriptor socket, const v1::MemoryOffer& offer, absl::Time deadline,
                const std::function<void()>& done) {
    auto held = std::make_shared<model::Descriptor>(std::move(socket));
    calls_.Enter();
    absl::StatusOr<std::thread> thread = model::MakeThread([this, held, offer, deadline, done] {
      sharing_.Watch(held->get());
      auto slots = SharedSlots::HandOver(held.get(), offer, deadline);
      sharing_.End(std::move(slots));
      done();
      calls_.Leave();
    });
    if (thread.ok()) return thread->detach();
    sharing_.End(thread.status());
    done();
    calls_.Leave();
  }

  void PushShared(const v1::PushRequest& header, absl::Span<const std::byte> payload, Slot slot, absl::Time deadline,
                  Callback<v1::PushResponse> done) {
    const uint32_t copied = kernels::CopyCrc32c(payload, slot->bytes().data());
    v1::PushRequest sent = header;
    SetChecksum(&sent, [copied] { return copied; });
    *sent.mutable_shared() = slot->place();
    SlotCall(
        kPushMethod, sent, std::move(slot), deadline,
        [done = std::move(done)](const absl::Status& status) {
          if (status.ok()) return done(v1::PushResponse());
          done(status);
        },
        [](const grpc::ByteBuffer&, absl::Span<const std::byte>) { return absl::OkStatus(); });
  }

  // A call whose payload is in `slot`. `read`: called on OK, with the answer and the slot's bytes.
  template <typename Request, typename Read>
  void SlotCall(const char* method, const Request& request, Slot slot, absl::Time deadline,
                std::function<void(absl::Status)> done, Read read) {
    DataCall(method, request, deadline,
             [slot = std::move(slot), done = std::move(done), read](const grpc::Status& status,
                                                                    const grpc::ByteBuffer& response) mutable {
               absl::Status result = FromGrpc(status);
               if (result.ok()) result = read(response, slot->bytes());
               // An error by gRPC itself does not tell whether the server still works on the call, and so on the slot.
               if (!status.ok() && status.error_details().empty()) slot->Abandon();
               if (model::ReasonOf(result) == model::kMemoryGone) slot->EndAll();
               slot.reset();
               done(std::move(result));
             });
  }

  // A call with raw messages. `ended`: called once.
  template <typename Request>
  void DataCall(const char* method, const Request& request, absl::Time deadline,
                std::function<void(const grpc::Status&, const grpc::ByteBuffer& response)> ended) {
    struct RawCall {
      grpc::ClientContext context;
      grpc::ByteBuffer request;
      grpc::ByteBuffer response;
      std::function<void(const grpc::Status&, const grpc::ByteBuffer&)> ended;
    };
    auto* call = new RawCall;
    call->ended = std::move(ended);
    const grpc::Slice slice(request.SerializeAsString());
    call->request = grpc::ByteBuffer(&slice, 1);
    Begin(&call->context, deadline)
        ->data()
        ->UnaryCall(&call->context, method, grpc::StubOptions(), &call->request, &call->response,
                    [this, call](const grpc::Status& status) {
                      call->ended(calls_.Erase(&call->context, status), call->response);
                      delete call;
                      calls_.Leave();
                    });
  }

  // Must come last before a call goes to gRPC: the callback begins with Erase, and so sees everything written before
  // Begin.
  std::shared_ptr<const Channels> Begin(grpc::ClientContext* context, absl::Time deadline) {
    std::shared_ptr<const Channels> channels = channels_.Get();
    channels->Sign(context);
    context->AddMetadata(model::kVersionMetadata, absl::StrCat(model::kProtocolVersion));
    {
      absl::MutexLock lock(&target_mutex_);
      if (!target_.empty()) context->AddMetadata(model::kServerMetadata, target_);
    }
    if (deadline != absl::InfiniteFuture()) context->set_deadline(absl::ToChronoTime(deadline));
    calls_.Enter();
    calls_.Insert(context);
    return channels;
  }

  template <typename Request, typename Response>
  void Unary(void (Async::*method)(grpc::ClientContext*, const Request*, Response*, std::function<void(grpc::Status)>),
             const Request& request, absl::Time deadline, Callback<Response> done) {
    struct UnaryCall {
      grpc::ClientContext context;
      Request request;
      Response response;
      Callback<Response> done;
    };
    auto* call = new UnaryCall;
    call->request = request;
    call->done = std::move(done);
    const std::shared_ptr<const Channels> channels = Begin(&call->context, deadline);
    (channels->control()->async()->*method)(&call->context, &call->request, &call->response,
                                            [this, call](const grpc::Status& status) {
                                              const grpc::Status ended = calls_.Erase(&call->context, status);
                                              if (ended.ok()) {
                                                call->done(std::move(call->response));
                                              } else {
                                                call->done(FromGrpc(ended));
                                              }
                                              delete call;
                                              calls_.Leave();
                                            });
  }

  // Wraps `done`: if gRPC reached nobody, a handshake of our own looks for a fault of certificates, at most once in a
  // while. Waiting would not mend such a fault, so its answer is final.
  Callback<v1::IdentifyResponse> WithTlsFault(absl::Time deadline, Callback<v1::IdentifyResponse> done) {
    return [this, deadline, done = std::move(done)](absl::StatusOr<v1::IdentifyResponse> answer) {
      if (model::ReasonOf(answer.status()) != model::kServerDown || !MayProbe()) return done(std::move(answer));
      calls_.Enter();
      const auto probe = [this, deadline, done, answer] {
        const absl::Status fault = ProbeTls(std::min(deadline, absl::Now() + kProbeMax));
        done(fault.ok() ? answer : absl::StatusOr<v1::IdentifyResponse>(fault));
        calls_.Leave();
      };
      absl::StatusOr<std::thread> thread = model::MakeThread(probe);  // callbacks must not wait
      if (thread.ok()) return thread->detach();
      done(std::move(answer));
      calls_.Leave();
    };
  }

  bool MayProbe() {
    absl::MutexLock lock(&probe_mutex_);
    if (absl::Now() - probed_ < kProbeInterval) return false;
    probed_ = absl::Now();
    return true;
  }

  absl::Status ProbeTls(absl::Time deadline) const {
    const absl::StatusOr<model::Address> server = model::ParseAddress(address_, model::AddressUse::kConnect);
    const absl::StatusOr<model::AccessContent> content = model::ReadAccess(access_);
    if (!server.ok() || !content.ok()) return absl::OkStatus();
    return model::ProbeTls(*server, *content, deadline);
  }

  static constexpr absl::Duration kProbeInterval = absl::Seconds(1), kProbeMax = absl::Seconds(2);

  const std::string address_;
  const model::Access access_;
  absl::Mutex probe_mutex_;
  absl::Time probed_ ABSL_GUARDED_BY(probe_mutex_) = absl::InfinitePast();
  CallSet calls_;
  FreshChannels channels_;
  Sharing sharing_;
  absl::Mutex target_mutex_;
  std::string target_ ABSL_GUARDED_BY(target_mutex_);  // empty: not known yet
};

std::unique_ptr<Transport> MakeTransport(const std::string& address, const model::Access& access,
                                         const model::AccessContent& content) {
  // gRPC stays up for the life of the process: its shutdown, at the last channel's end, joins a thread that may sit in
  // a poll of ten seconds (1.51).
  static const bool started = (grpc_init(), true);
  (void)started;
  return std::make_unique<GrpcTransport>(address, access, content);
}

// Refuses to show a token to a server that `address` reaches in the clear.
absl::StatusOr<std::unique_ptr<Transport>> Connect(const std::string& address, const model::Access& access) {
  BALLAST_ASSIGN_OR_RETURN(const model::Address server, model::ParseAddress(address, model::AddressUse::kConnect));
  BALLAST_RETURN_IF_ERROR(model::CheckAccess(access, server));
  BALLAST_ASSIGN_OR_RETURN(const model::AccessContent content, model::ReadAccess(access));
  return MakeTransport(address, access, content);
}

}  // namespace

std::unique_ptr<Transport> MakeGrpcTransport(const std::string& address) { return MakeTransport(address, {}, {}); }

absl::StatusOr<std::vector<std::unique_ptr<Transport>>> MakeGrpcTransports(
    const std::vector<std::string>& servers, const std::string& job, const model::Access& access,
    absl::Duration timeout, const std::function<bool()>& interrupted, Spares spares) {
  BALLAST_ASSIGN_OR_RETURN(const std::vector<registry::RegistryUrl> urls, registry::RegistryUrlIn(servers));
  if (!urls.empty()) {
    const auto connect = [access](const std::string& address) { return Connect(address, access); };
    const auto which = spares == Spares::kConnect ? registry::Servers::kSpares : registry::Servers::kMembers;
    return DiscoverTransports(urls.front(), connect, job, timeout, interrupted, which);
  }
  std::vector<std::unique_ptr<Transport>> transports;
  for (const std::string& address : servers) {
    BALLAST_ASSIGN_OR_RETURN(auto transport, Connect(address, access));
    transports.push_back(std::move(transport));
  }
  return transports;
}

void TuneProgram() {
  model::StopDeadlockSearch();
  // Setting only one of the two is worse than neither: a mmap threshold alone makes every large block a fresh mapping.
  mallopt(M_TRIM_THRESHOLD, 1 << 30);
  mallopt(M_MMAP_THRESHOLD, 32 << 20);
  mallopt(M_TOP_PAD, 64 << 20);
}

}  // namespace ballast::client
