#include "ballast/services/rpc/gate.h"

#include <grpcpp/security/auth_context.h>

#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
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

void Gate::Open(const Visit& visit, const v1::OpenRequest& request, const CallLimit& limit,
                Reply<v1::OpenResponse> reply) const {
  if (guard_ == nullptr || Guard::QuotaOf(visit.identity) == nullptr)
    return state_->Open(request, limit, std::move(reply));
  v1::OpenRequest question = request;
  question.set_dry_run(true);
  state_->Open(question, limit,
               [this, visit, &request, limit, reply = std::move(reply)](absl::StatusOr<v1::OpenResponse> planned) {
                 if (!planned.ok()) return reply(planned.status());
                 const v1::GetServerStatusResponse status = state_->Status();
                 absl::StatusOr<Quotas::Lease> lease =
                     guard_->AskQuota(visit.identity, visit.shown, visit.asked.job, AskedBytes(*planned),
                                      {status.jobs().begin(), status.jobs().end()});
                 if (!lease.ok()) return reply(lease.status());
                 if (request.dry_run()) return reply(std::move(planned));
                 state_->Open(request, limit,
                              [lease = *std::move(lease), reply](absl::StatusOr<v1::OpenResponse> opened) {
                                reply(std::move(opened));
                              });
               });
}

}  // namespace ballast::services
