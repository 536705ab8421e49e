// The one way into the services: each call gets its reactor here, and reaches the server only if its caller may.
#pragma once

#include <grpcpp/grpcpp.h>

#include <memory>
#include <optional>
#include <utility>

#include "ballast/services/rpc/call_reactor.h"
#include "ballast/services/security/guard.h"
#include "ballast/services/server/state_server.h"

namespace ballast::services {

// A call that was let in.
struct Visit {
  Identity identity;
  AskedCall asked;
  CallerShown shown;  // filled where there is a guard
};

// Threads: any.
class Gate {
 public:
  // `guard`: null lets everybody do everything.
  Gate(Guard* guard, StateServer* state) : guard_(guard), state_(state) {}

  // The call's visit; else finishes `reactor` with the refusal.
  std::optional<Visit> Admit(const grpc::CallbackServerContext& context, AskedCall asked,
                             grpc::ServerUnaryReactor* reactor) const;

  // A call that is answered at once: run(visit, reply).
  template <typename Response, typename Run>
  grpc::ServerUnaryReactor* Quick(grpc::CallbackServerContext* context, AskedCall asked, Response* response,
                                  const Run& run) const {
    grpc::ServerUnaryReactor* const reactor = context->DefaultReactor();
    if (const auto visit = Admit(*context, std::move(asked), reactor)) {
      run(*visit, Audited(*visit, FinishWith(reactor, response)));
    }
    return reactor;
  }
  // A call that may wait: run(visit, limit, reply).
  template <typename Response, typename Run>
  grpc::ServerUnaryReactor* Waiting(grpc::CallbackServerContext* context, AskedCall asked, Response* response,
                                    const Run& run) const {
    auto* const reactor = new CallReactor;
    if (const auto visit = Admit(*context, std::move(asked), reactor)) {
      run(*visit, CallLimit(DeadlineOf(*context), reactor->caller()), Audited(*visit, FinishWith(reactor, response)));
    }
    return reactor;
  }

  // StateServer::Fence, within the identity's quota of jobs.
  void Fence(const Visit& visit, const v1::FenceRequest& request, const CallLimit& limit,
             Reply<v1::FenceResponse> reply) const;
  // StateServer::Open, within the identity's quota. `request` lives until the reply.
  void Open(const Visit& visit, const v1::OpenRequest& request, const CallLimit& limit,
            Reply<v1::OpenResponse> reply) const;

 private:
  template <typename Response>
  Reply<Response> Audited(const Visit& visit, Reply<Response> reply) const {
    if (guard_ == nullptr || !Guard::IsAudited(visit.asked.call)) return reply;
    return [guard = guard_, visit, reply = std::move(reply)](absl::StatusOr<Response> answer) {
      guard->Audit(visit.identity, visit.shown, visit.asked, answer.status());
      reply(std::move(answer));
    };
  }

  // REQUIRES: the identity has a quota. `time`: before `asked` was planned.
  absl::StatusOr<Quotas::Lease> AskQuota(const Visit& visit, const TierUse& asked, uint64_t time) const;

  Guard* const guard_;
  StateServer* const state_;
};

}  // namespace ballast::services
