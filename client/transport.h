// How a client reaches one state server. Two implementations under one contract test: gRPC (client/grpc_transport) and
// in-process (services/embedded).
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "ballast/proto/model/lent_memory.h"
#include "ballast/proto/model/status.h"
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
  // Further calls name the server that they are meant for, as model::TargetOf: any other refuses them (UNAVAILABLE,
  // OTHER_SERVER). Does nothing where there is no other.
  virtual void MeanFor(const std::string& /*target*/) {}
  // The registry in which the server was found, and whose keys say where jobs lie: a job that has no chunks there does
  // without the server. Null: a user named it.
  virtual registry::Registry* registry() const { return nullptr; }

  virtual void Identify(const v1::IdentifyRequest&, absl::Time deadline, Callback<v1::IdentifyResponse>) = 0;
  virtual void GetJob(const v1::GetJobRequest&, absl::Time deadline, Callback<v1::GetJobResponse>) = 0;
  virtual void Fence(const v1::FenceRequest&, absl::Time deadline, Callback<v1::FenceResponse>) = 0;
  virtual void Open(const v1::OpenRequest&, absl::Time deadline, Callback<v1::OpenResponse>) = 0;
  virtual void Norm(const v1::NormRequest&, absl::Time deadline, Callback<v1::NormResponse>) = 0;
  virtual void Seal(const v1::SealRequest&, absl::Time deadline, Callback<v1::SealResponse>) = 0;
  virtual void Commit(const v1::CommitRequest&, absl::Time deadline, Callback<v1::CommitResponse>) = 0;
  virtual void Pin(const v1::PinRequest&, absl::Time deadline, Callback<v1::PinResponse>) = 0;
  virtual void Unpin(const v1::UnpinRequest&, absl::Time deadline, Callback<v1::UnpinResponse>) = 0;
  // `payload` is borrowed until the callback. header.payload is empty; header.crc32c is the payload's.
  virtual void Push(const v1::PushRequest& header, absl::Span<const std::byte> payload, absl::Time deadline,
                    Callback<v1::PushResponse>) = 0;
  // On OK, has written exactly `to.size()` bytes into `to` (borrowed until the callback); bytes from a wire are checked
  // against the server's CRC32C. On an error `to` may hold anything.
  virtual void Pull(const v1::PullRequest&, absl::Span<std::byte> to, absl::Time deadline,
                    std::function<void(absl::Status)>) = 0;

  // Runs work that ends in Push or Pull: at once, or on a thread of the transport's own where the call itself moves the
  // bytes. All work ends before the destructor does.
  virtual void Schedule(std::function<void()> work) { work(); }

  // Ends calls under way soon, with CANCELLED. Applies only to calls that wait for another process.
  virtual void Cancel() {}

  // Lent memory, in place of pushes and pulls. Only a server in this process takes loans (StateServer::Lend), and only
  // if it keeps no working copies. The loan must end before the transport does.
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
