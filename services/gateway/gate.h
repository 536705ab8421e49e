// The one way into the services: no call's message is read before its caller is known, and no call reaches the server
// unless its caller may.
#pragma once

#include <grpcpp/grpcpp.h>

#include <optional>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "ballast/proto/model/protocol.h"
#include "ballast/services/gateway/security/guard.h"
#include "ballast/services/server/state_server.h"
#include "ballast/services/threads/caller.h"
#include "ballast/services/threads/reply.h"

namespace ballast::services {

// A caller, known before the call's message is read.
struct Visitor {
  Identity identity;
  CallerShown shown;                  // filled where there is a guard
  std::string peer;                   // as gRPC spells it
  std::string turn;                   // whose reads take turns with this one's: the identity's, else the host's
  std::optional<std::string> target;  // the server that the call is meant for, if it says so
};

// A call that was let in.
struct Visit {
  Identity identity;
  AskedCall asked;
  CallerShown shown;
};

// Threads: any.
class Gate {
 public:
  // `guard`: null lets everybody do everything. `version`: the protocol version of this server.
  Gate(Guard* guard, StateServer* state, uint32_t version)
      : guard_(guard), state_(state), name_(model::TargetOf(state->server_id(), state->disk())), version_(version) {}

  // The caller, if such calls are allowed for any job at all; else the refusal.
  absl::StatusOr<Visitor> Know(const grpc::CallbackServerContext& context, Call call) const;
  // The visit, if the caller may make the call that its message asks for; else the refusal.
  absl::StatusOr<Visit> Admit(const Visitor& visitor, AskedCall asked) const;

  // `reply`, which tells the audit log first.
  template <typename Response>
  Reply<Response> Audited(const Visit& visit, Reply<Response> reply) const {
    if (guard_ == nullptr || !Guard::IsAudited(visit.asked.call)) return reply;
    return [guard = guard_, visit, reply = std::move(reply)](absl::StatusOr<Response> answer) {
      guard->Audit(visit.identity, visit.shown, visit.asked, answer.status());
      reply(std::move(answer));
    };
  }

  // StateServer::Fence, within the identity's quota of jobs. `request` lives until the reply. UNAVAILABLE (BUSY) if
  // the quota cannot be asked because calls of its jobs end all the time.
  void Fence(const Visit& visit, const v1::FenceRequest& request, const CallLimit& limit,
             Reply<v1::FenceResponse> reply) const {
    TryFence(visit, request, limit, Guard::kQuotaTries, std::move(reply));
  }
  // StateServer::Open, within the identity's quota. `request` lives until the reply, and is the call's alone. Errors as
  // of Fence.
  void Open(const Visit& visit, v1::OpenRequest* request, const CallLimit& limit, Reply<v1::OpenResponse> reply) const {
    TryOpen(visit, request, limit, Guard::kQuotaTries, std::move(reply));
  }

 private:
  // UNAVAILABLE (VERSIONS_DIFFER; OTHER_SERVER), with both sides, for a call of another version, and for another
  // server: the trainer sends the call again, and goes on once the right server is back. INVALID_ARGUMENT (BAD_REQUEST)
  // for a call that changes something and does not say for whom. Arguments: as the call's metadata tells.
  absl::Status CheckVersion(const std::optional<std::string>& version, Call call) const;
  absl::Status CheckTarget(const std::optional<std::string>& server, Call call) const;

  void TryFence(const Visit& visit, const v1::FenceRequest& request, const CallLimit& limit, int tries,
                Reply<v1::FenceResponse> reply) const;
  void TryOpen(const Visit& visit, v1::OpenRequest* request, const CallLimit& limit, int tries,
               Reply<v1::OpenResponse> reply) const;

  // REQUIRES: the identity has a quota. `time`: before `asked` was planned.
  using Held = std::shared_ptr<Quotas::Lease>;
  void AskQuota(const Visit& visit, const TierUse& asked, uint64_t time, Reply<Held> reply) const;
  // The answer to a dry run that the quota allows.
  void TellFree(const Visit& visit, v1::OpenResponse planned, Reply<v1::OpenResponse> reply) const;

  Guard* const guard_;
  StateServer* const state_;
  const std::string name_;
  const uint32_t version_;
};

}  // namespace ballast::services
