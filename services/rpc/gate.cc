#include "ballast/services/rpc/gate.h"

#include <grpcpp/security/auth_context.h>

#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "ballast/proto/model/status.h"

namespace ballast::services {
namespace {

std::string Text(const grpc::string_ref& text) { return std::string(text.data(), text.size()); }

// The first value of a property of the connection; empty: it has none.
std::string PropertyOf(const grpc::AuthContext& connection, const char* name) {
  const std::vector<grpc::string_ref> values = connection.FindPropertyValues(name);
  return values.empty() ? "" : Text(values.front());
}

CallerShown ShownBy(const grpc::CallbackServerContext& context) {
  CallerShown shown;
  shown.peer = context.peer();
  if (const auto connection = context.auth_context(); connection != nullptr) {
    shown.encrypted = PropertyOf(*connection, "transport_security_type") == "ssl";
    // gRPC verified the certificate in the handshake, or there is none.
    shown.has_certificate = !connection->FindPropertyValues("x509_pem_cert").empty();
    shown.certificate_name = PropertyOf(*connection, "peer_spiffe_id");
    if (shown.certificate_name.empty()) {
      shown.certificate_name = PropertyOf(*connection, "x509_subject_alternative_name");
      // A SPIFFE ID is the only URI of its certificate. Whoever may choose a host's name, or a second URI, could take
      // another's ID by this property.
      if (absl::StartsWithIgnoreCase(shown.certificate_name, "spiffe:")) shown.certificate_name.clear();
    }
  }
  const auto [begin, end] = context.client_metadata().equal_range("authorization");
  for (auto entry = begin; entry != end; ++entry) shown.authorization.push_back(Text(entry->second));
  return shown;
}

}  // namespace

std::optional<Visit> Gate::Admit(const grpc::CallbackServerContext& context, AskedCall asked,
                                 grpc::ServerUnaryReactor* reactor) const {
  Visit visit;
  visit.asked = std::move(asked);
  if (guard_ == nullptr) return visit;
  visit.shown = ShownBy(context);
  absl::StatusOr<Identity> identity = guard_->Admit(visit.shown, visit.asked);
  if (!identity.ok()) {
    reactor->Finish(ToGrpc(identity.status()));
    return std::nullopt;
  }
  visit.identity = *std::move(identity);
  return visit;
}

absl::StatusOr<Quotas::Lease> Gate::AskQuota(const Visit& visit, const TierUse& asked, uint64_t time) const {
  const v1::GetServerStatusResponse status = state_->Status();
  return guard_->AskQuota(visit.identity, visit.shown, visit.asked, asked,
                          {time, {status.jobs().begin(), status.jobs().end()}});
}

void Gate::Fence(const Visit& visit, const v1::FenceRequest& request, const CallLimit& limit,
                 Reply<v1::FenceResponse> reply) const {
  if (guard_ == nullptr || Guard::QuotaOf(visit.identity) == nullptr)
    return state_->Fence(request, limit, std::move(reply));
  absl::StatusOr<Quotas::Lease> lease;
  do {
    lease = AskQuota(visit, TierUse(), guard_->QuotaTime());
  } while (absl::IsAborted(lease.status()));
  if (!lease.ok()) return reply(lease.status());
  state_->Fence(request, limit,
                [lease = *std::move(lease), reply = std::move(reply)](absl::StatusOr<v1::FenceResponse> fenced) {
                  reply(std::move(fenced));
                });
}

void Gate::Open(const Visit& visit, const v1::OpenRequest& request, const CallLimit& limit,
                Reply<v1::OpenResponse> reply) const {
  if (guard_ == nullptr || Guard::QuotaOf(visit.identity) == nullptr)
    return state_->Open(request, limit, std::move(reply));
  v1::OpenRequest question = request;
  question.set_dry_run(true);
  const uint64_t time = guard_->QuotaTime();
  state_->Open(
      question, limit,
      [this, visit, &request, limit, time, reply = std::move(reply)](absl::StatusOr<v1::OpenResponse> planned) {
        if (!planned.ok()) return reply(planned.status());
        absl::StatusOr<Quotas::Lease> lease = AskQuota(visit, AskedBytes(*planned), time);
        if (absl::IsAborted(lease.status())) return Open(visit, request, limit, reply);
        if (!lease.ok()) return state_->RefuseOpen(request, lease.status(), reply);
        if (request.dry_run()) return reply(std::move(planned));
        state_->Open(request, limit, [lease = *std::move(lease), reply](absl::StatusOr<v1::OpenResponse> opened) {
          reply(std::move(opened));
        });
      });
}

}  // namespace ballast::services
