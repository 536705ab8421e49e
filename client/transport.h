// How a client reaches one state server. Two implementations under one contract test: gRPC (client/grpc_transport) and
// in-process (services/gateway).
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "ballast/proto/base/lent_memory.h"
#include "ballast/proto/base/status.h"
#include "ballast/v1/admin_service.pb.h"
#include "ballast/v1/state_service.pb.h"

namespace ballast::registry {
class Registry;
}  // namespace ballast::registry

namespace ballast::client {

template <typename Response>
using Callback = std::function<void(absl::StatusOr<Response>)>;

// Every call is asynchronous: it returns at once and calls back exactly once, on a thread of the transport or on the
// caller's, with the answer or an error with the server's reason (model::ReasonOf). Callbacks must not block.
// `deadline` bounds the whole call. DEADLINE_EXCEEDED and UNAVAILABLE mean that the outcome is unknown: send the same
// request again. Requests are copied before the call returns. A transport never retries: only client/transport/router
// does. Threads: any. The destructor waits for outstanding callbacks.
class Transport {
 public:
  virtual ~Transport() = default;
  // For messages: "host:port" or "embedded".
  virtual std::string name() const = 0;
  // From now on calls name the server that they are meant for (model::TargetOf); any other server refuses them
  // (UNAVAILABLE, OTHER_SERVER). A transport that can reach only one server does nothing here.
  virtual void MeanFor(const std::string& /*target*/) {}
  // The registry that named the server; its keys say which servers a job has. A session leaves out such a server if its
  // job has no chunks there. Null if a user named the server.
  virtual registry::Registry* registry() const { return nullptr; }
  // The server by which the registry made this transport (model::TargetOf). Empty if a user named the server.
  virtual std::string registered_as() const { return ""; }
  // A transport to another server of the same registry, which is at `server.address` now. It is registered_as `server`.
  // UNIMPLEMENTED (UNSUPPORTED) if a user named the servers; otherwise errors of the connection's access.
  virtual absl::StatusOr<std::unique_ptr<Transport>> Another(const v1::Member& /*server*/) {
    return model::Error(absl::StatusCode::kUnimplemented, model::kUnsupported,
                        "server " + name() + " was not named by a registry");
  }

  // With `shares_memory`, a transport whose slices could go through shared memory makes this memory now, and not at the
  // first slice.
  virtual void Identify(const v1::IdentifyRequest&, absl::Time deadline, Callback<v1::IdentifyResponse>) = 0;
  virtual void GetJob(const v1::GetJobRequest&, absl::Time deadline, Callback<v1::GetJobResponse>) = 0;
  virtual void Fence(const v1::FenceRequest&, absl::Time deadline, Callback<v1::FenceResponse>) = 0;
  virtual void Open(const v1::OpenRequest&, absl::Time deadline, Callback<v1::OpenResponse>) = 0;
  virtual void Norm(const v1::NormRequest&, absl::Time deadline, Callback<v1::NormResponse>) = 0;
  virtual void Seal(const v1::SealRequest&, absl::Time deadline, Callback<v1::SealResponse>) = 0;
  virtual void Commit(const v1::CommitRequest&, absl::Time deadline, Callback<v1::CommitResponse>) = 0;
  virtual void Pin(const v1::PinRequest&, absl::Time deadline, Callback<v1::PinResponse>) = 0;
  virtual void Unpin(const v1::UnpinRequest&, absl::Time deadline, Callback<v1::UnpinResponse>) = 0;
  // Deletes a job. An operator's call: most trainers have no right to it.
  virtual void DropJob(const v1::DropJobRequest&, absl::Time /*deadline*/, Callback<v1::DropJobResponse> done) {
    done(model::Error(absl::StatusCode::kUnimplemented, model::kUnsupported,
                      "server " + name() + " takes no operator's calls by this connection"));
  }
  // `payload` is borrowed until the callback. header.payload is empty. Without header.crc32c the transport computes it
  // of the bytes that this call sends, and the server checks it. Within a process it may stay absent: then a slice that
  // is pushed again in its attempt counts as the same bytes.
  virtual void Push(const v1::PushRequest& header, absl::Span<const std::byte> payload, absl::Time deadline,
                    Callback<v1::PushResponse>) = 0;
  // As Push, of a gradient that the trainer lends: a server in this process may go on reading it after the callback,
  // for as long as it holds `lent`. Any other transport pushes a copy.
  virtual void PushLent(const v1::PushRequest& header, absl::Span<const std::byte> payload,
                        std::shared_ptr<model::LentGradients> /*lent*/, absl::Time deadline,
                        Callback<v1::PushResponse> done) {
    Push(header, payload, deadline, std::move(done));
  }
  // On OK, has written exactly `to.size()` bytes into `to` (borrowed until the callback); bytes from a wire are checked
  // against the server's CRC32C. On an error `to` may hold anything.
  virtual void Pull(const v1::PullRequest&, absl::Span<std::byte> to, absl::Time deadline,
                    std::function<void(absl::Status)>) = 0;

  // As Pull, but the answer says where a server in this process has the bytes. It is empty if the bytes have to be
  // copied. The chunk's next update waits for the lease, which must end before the transport.
  virtual void Lease(const v1::PullRequest&, absl::Time /*deadline*/, Callback<model::LeasedBytes> done) {
    done(model::LeasedBytes{});
  }

  // Runs work that ends in a push or a pull, as `ends_in` says: at once, or on a thread of the transport if the call
  // itself copies the bytes. On that thread pulls go before pushes, because a caller waits for a pull. All work ends
  // before the destructor returns.
  enum class Moves { kPull, kPush };
  virtual void Schedule(Moves /*ends_in*/, std::function<void()> work) { work(); }

  // Whether the registry says that the server recovers its jobs, and so will answer later.
  virtual bool recovers() const { return false; }

  // Soon ends, with CANCELLED, the calls under way that wait for another process.
  virtual void Cancel() {}

  // True if this transport takes lent memory in place of pushes and pulls. Only a server in this process does
  // (StateServer::Lend), and only if it keeps no working copies. The loan must end before the transport.
  virtual bool TakesLoans() const { return false; }
  // Blocks while norms are computed.
  virtual absl::StatusOr<std::unique_ptr<model::Loan>> Lend(const model::LoanRequest&) { return NoLoans(); }
  // Calls back when all of the server's chunks, or all chunks of `unit`, show `version`.
  virtual void AwaitApplied(const std::string& /*job*/, int64_t /*version*/, std::optional<uint32_t> /*unit*/,
                            absl::Time /*deadline*/, std::function<void(absl::Status)> done) {
    done(NoLoans());
  }

 private:
  absl::Status NoLoans() const {
    return model::Error(absl::StatusCode::kUnimplemented, model::kUnsupported,
                        "server " + name() + " does not use the trainer's memory");
  }
};

}  // namespace ballast::client
