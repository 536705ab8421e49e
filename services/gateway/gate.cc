#include "ballast/services/gateway/gate.h"

#include <grpcpp/security/auth_context.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/model/protocol.h"

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

// Of "ipv4:10.0.0.3:4711" without the port.
std::string HostOf(const std::string& peer) { return peer.substr(0, peer.rfind(':')); }

// Of a value that a stranger chose.
constexpr size_t kShownMax = 128;

std::optional<std::string> ValueOf(const grpc::CallbackServerContext& context, const char* key) {
  const auto entry = context.client_metadata().find(key);
  if (entry == context.client_metadata().end()) return std::nullopt;
  return absl::CEscape(absl::string_view(entry->second.data(), std::min(entry->second.size(), kShownMax)));
}

enum class Says { kNothing, kWhatItLikes, kVersion, kAll };

Says MustSay(Call call) {
  switch (call) {
    case Call::kFence:
    case Call::kOpen:
    case Call::kPush:
    case Call::kNorm:
    case Call::kSeal:
    case Call::kCommit:
    case Call::kPin:
    case Call::kExport:
      return Says::kAll;
    case Call::kUnpin:  // operators' too, who know a server's address
      return Says::kVersion;
    case Call::kGetJob:
    case Call::kPull:
      return Says::kWhatItLikes;
    default:  // operators' calls, and Identify, which answers such questions
      return Says::kNothing;
  }
}

}  // namespace

absl::Status Gate::CheckVersion(const std::optional<std::string>& version, Call call) const {
  const Says must = MustSay(call);
  if (must == Says::kNothing || (version.has_value() ? *version == absl::StrCat(version_) : must < Says::kVersion)) {
    return absl::OkStatus();
  }
  return model::Error(
      absl::StatusCode::kUnavailable, model::kVersionsDiffer,
      absl::StrCat("server ", name_, " speaks protocol version ", version_, ", and this call is from ",
                   version.has_value() ? absl::StrCat("version ", *version) : "version 4 or before, which do not say",
                   "; run the same version of Ballast on all servers and trainers. This group goes on once a server ",
                   "of its version runs here"));
}

absl::Status Gate::CheckTarget(const std::optional<std::string>& server, Call call) const {
  const Says must = MustSay(call);
  if (must == Says::kNothing || (server.has_value() ? *server == name_ : must != Says::kAll)) return absl::OkStatus();
  if (server.has_value()) {
    return model::Error(
        absl::StatusCode::kUnavailable, model::kOtherServer,
        absl::StrCat("this call is meant for server ", *server, ", but reached server ", name_,
                     " (an id and the number of its data directory). Either another server now has "
                     "this address, or this server's directory was replaced; start the right one here"));
  }
  return model::Error(absl::StatusCode::kInvalidArgument, model::kBadRequest,
                      absl::StrCat("expected the metadata '", model::kServerMetadata,
                                   "' with the server that the call is meant for, as Identify returns it, such as ",
                                   name_, "; the call has none"));
}

absl::StatusOr<Visitor> Gate::Know(const grpc::CallbackServerContext& context, Call call) const {
  Visitor visitor;
  visitor.peer = context.peer();
  if (guard_ == nullptr) {
    visitor.turn = HostOf(visitor.peer);
  } else {
    visitor.shown = ShownBy(context);
    BALLAST_ASSIGN_OR_RETURN(visitor.identity, guard_->Know(visitor.shown, {call, ""}));
    visitor.turn = visitor.identity.name().empty() ? HostOf(visitor.peer) : visitor.identity.name();
  }
  // Before the message is read, which another version may have written in another way.
  BALLAST_RETURN_IF_ERROR(CheckVersion(ValueOf(context, model::kVersionMetadata), call));
  visitor.target = ValueOf(context, model::kServerMetadata);
  return visitor;
}

absl::StatusOr<Visit> Gate::Admit(const Visitor& visitor, AskedCall asked) const {
  if (guard_ != nullptr) BALLAST_RETURN_IF_ERROR(guard_->Allow(visitor.identity, visitor.shown, asked));
  BALLAST_RETURN_IF_ERROR(CheckTarget(visitor.target, asked.call));
  return Visit{visitor.identity, std::move(asked), visitor.shown};
}

void Gate::AskQuota(const Visit& visit, const TierUse& asked, uint64_t time, Reply<Held> reply) const {
  state_->Look([this, visit, asked, time, reply = std::move(reply)](absl::StatusOr<v1::GetServerStatusResponse> seen) {
    if (!seen.ok()) return reply(seen.status());
    auto lease = guard_->AskQuota(visit.identity, visit.shown, visit.asked, asked,
                                  {time, {seen->jobs().begin(), seen->jobs().end()}});
    if (!lease.ok()) return reply(lease.status());
    reply(std::make_shared<Quotas::Lease>(*std::move(lease)));
  });
}

void Gate::TellFree(const Visit& visit, v1::OpenResponse planned, Reply<v1::OpenResponse> reply) const {
  state_->Look([visit, planned = std::move(planned),
                reply = std::move(reply)](absl::StatusOr<v1::GetServerStatusResponse> seen) mutable {
    if (!seen.ok()) return reply(seen.status());
    Guard::LimitFree(visit.identity, {seen->jobs().begin(), seen->jobs().end()}, &planned);
    reply(std::move(planned));
  });
}

void Gate::TryFence(const Visit& visit, const v1::FenceRequest& request, const CallLimit& limit, int tries,
                    Reply<v1::FenceResponse> reply) const {
  if (tries == 0) return reply(Guard::QuotaBusy(absl::StatusCode::kUnavailable));
  if (guard_ == nullptr || Guard::QuotaOf(visit.identity) == nullptr)
    return state_->Fence(request, limit, std::move(reply));
  AskQuota(visit, TierUse(), guard_->QuotaTime(),
           [this, visit, asked = &request, limit, tries, reply = std::move(reply)](absl::StatusOr<Held> lease) {
             if (absl::IsAborted(lease.status())) return TryFence(visit, *asked, limit, tries - 1, reply);
             if (!lease.ok()) return reply(lease.status());
             state_->Fence(*asked, limit, [lease = *std::move(lease), reply](absl::StatusOr<v1::FenceResponse> fenced) {
               reply(std::move(fenced));
             });
           });
}

void Gate::TryOpen(const Visit& visit, v1::OpenRequest* request, const CallLimit& limit, int tries,
                   Reply<v1::OpenResponse> reply) const {
  if (tries == 0) return reply(Guard::QuotaBusy(absl::StatusCode::kUnavailable));
  if (guard_ == nullptr || Guard::QuotaOf(visit.identity) == nullptr)
    return state_->Open(*request, limit, std::move(reply));
  // The question is the request itself: a copy would take as much memory again.
  const bool only_asks = request->dry_run();
  request->set_dry_run(true);
  const uint64_t time = guard_->QuotaTime();
  state_->Open(*request, limit,
               [this, visit, request, only_asks, limit, tries, time,
                reply = std::move(reply)](absl::StatusOr<v1::OpenResponse> planned) {
                 request->set_dry_run(only_asks);
                 if (!planned.ok()) return reply(planned.status());
                 const TierUse asked = AskedBytes(*planned);
                 AskQuota(visit, asked, time,
                          [this, visit, request, only_asks, limit, tries, reply,
                           planned = std::move(planned)](absl::StatusOr<Held> lease) {
                            if (absl::IsAborted(lease.status()))
                              return TryOpen(visit, request, limit, tries - 1, reply);
                            if (!lease.ok()) return state_->RefuseOpen(*request, lease.status(), reply);
                            if (only_asks) return TellFree(visit, *planned, reply);
                            state_->Open(*request, limit,
                                         [lease = *std::move(lease), reply](absl::StatusOr<v1::OpenResponse> opened) {
                                           reply(std::move(opened));
                                         });
                          });
               });
}

}  // namespace ballast::services
