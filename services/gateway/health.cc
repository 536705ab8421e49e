#include "ballast/services/gateway/health.h"

#include <algorithm>
#include <iterator>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "ballast/proto/base/status.h"
#include "ballast/services/gateway/connections.h"
#include "ballast/services/gateway/methods.h"

namespace ballast::services {
namespace {

constexpr char kCheck[] = "/grpc.health.v1.Health/Check", kWatch[] = "/grpc.health.v1.Health/Watch";

// A message of some bytes comes with its call's headers; one that does not has no long wait for others' sake. A
// stranger's connection does not live longer.
constexpr absl::Duration kPatience = absl::Milliseconds(10);
constexpr ReadRules kRules = {.waiting_max = Health::kWaitingMax,
                              .in_turn_patience = kPatience,
                              .aside_patience = absl::Milliseconds(100),
                              .slow_for = Connections::kStrangerMax,
                              .hosts_take_turns = true};

bool IsKnown(const std::string& service) {
  return service.empty() || std::find(std::begin(kServices), std::end(kServices), service) != std::end(kServices);
}

grpc::ByteBuffer BytesOf(v1::HealthCheckResponse::Status status) {
  v1::HealthCheckResponse response;
  response.set_status(status);
  const grpc::Slice slice(response.SerializeAsString());
  return grpc::ByteBuffer(&slice, 1);
}

}  // namespace

Health::Health(Trimmer* trimmer) : trimmer_(trimmer), reads_(kRules) {}

bool Health::Has(const std::string& path) { return path == kCheck || path == kWatch; }

grpc::ServerGenericBidiReactor* Health::MakeCall(const grpc::CallbackServerContext& context, const std::string& path) {
  LookSoon();
  auto* const call = new CallReactor(&reads_, trimmer_);
  // Whoever calls, from whatever address, is one caller: of a stranger the address is all that is known, and some have
  // many. The server's own calls, which say whether it is ready, come within the process.
  const std::string peer = context.peer();
  const bool stranger = absl::StartsWith(peer, "ipv4:") || absl::StartsWith(peer, "ipv6:");
  call->ReadMessage(
      stranger ? "strangers" : "this process", peer, /*push=*/false,
      [this, call, host = peer.substr(0, peer.rfind(':')), watches = path == kWatch](grpc::ByteBuffer* message) {
        if (message->Length() > kFewBytesMax) {
          return call->Fail(model::Error(
              absl::StatusCode::kInvalidArgument, model::kBadRequest,
              absl::StrCat("a HealthCheckRequest has at most ", kFewBytesMax, " bytes, got ", message->Length())));
        }
        v1::HealthCheckRequest request;
        if (!ParseMessage(call, *message, &request)) return;
        const bool known = IsKnown(request.service());
        return watches ? BeginWatch(call, host, known) : Check(call, known);
      });
  return call;
}

bool Health::Look(absl::Time now) {
  const bool ended = ended_reads_.exchange(false);
  return reads_.Look(now) || ended;
}

void Health::LookSoon() {
  const absl::Time now = absl::Now();
  {
    absl::MutexLock lock(&mu_);
    if (looked_ + kPatience > now) return;
    looked_ = now;
  }
  if (reads_.Look(now)) ended_reads_ = true;
}

Health::Status Health::StatusOf(bool known) const {
  if (!known) return v1::HealthCheckResponse::STATUS_SERVICE_UNKNOWN;
  return serving_ ? v1::HealthCheckResponse::STATUS_SERVING : v1::HealthCheckResponse::STATUS_NOT_SERVING;
}

void Health::Check(CallReactor* call, bool known) const {
  if (!known) {
    return call->Fail(model::Error(absl::StatusCode::kNotFound, model::kUnsupported,
                                   "this server has no such service; it tells of itself by an empty name"));
  }
  mu_.ReaderLock();
  const Status status = StatusOf(known);
  mu_.ReaderUnlock();
  call->Answer(BytesOf(status));
}

void Health::BeginWatch(CallReactor* call, const std::string& host, bool known) {
  Status status = v1::HealthCheckResponse::STATUS_UNSPECIFIED;
  {
    absl::MutexLock lock(&mu_);
    const auto of_host = std::count_if(watches_.begin(), watches_.end(),
                                       [&host](const auto& entry) { return entry.second.host == host; });
    if (watches_.size() < kWatchesMax && static_cast<size_t>(of_host) < kWatchesOfHostMax) {
      watches_.emplace(call, Watch{known, host});
      status = StatusOf(known);
    }
  }
  if (status == v1::HealthCheckResponse::STATUS_UNSPECIFIED) {
    return call->Fail(model::Error(absl::StatusCode::kUnavailable, model::kBusy,
                                   absl::StrCat("at most ", kWatchesMax, " callers may watch health at a time, ",
                                                kWatchesOfHostMax, " of one host")));
  }
  if (!call->caller()->OnLeave([this, call] { BeLeft(call); })) BeLeft(call);
  call->Send(BytesOf(status), [this, call] { BeSent(call); });
}

void Health::BeSent(CallReactor* call) {
  {
    absl::MutexLock lock(&mu_);
    watches_.at(call).sending = false;
  }
  EndIfDue(call);
}

void Health::BeLeft(CallReactor* call) {
  {
    absl::MutexLock lock(&mu_);
    const auto at = watches_.find(call);
    if (at == watches_.end()) return;
    at->second.gone = true;
  }
  EndIfDue(call);
}

void Health::EndIfDue(CallReactor* call) {
  Status status = v1::HealthCheckResponse::STATUS_UNSPECIFIED;
  {
    absl::MutexLock lock(&mu_);
    const auto at = watches_.find(call);
    if (at == watches_.end() || at->second.sending || (serving_ && !at->second.gone)) return;
    status = StatusOf(at->second.known);
    watches_.erase(at);
  }
  call->Answer(BytesOf(status));
}

void Health::Stop() {
  std::vector<CallReactor*> calls;
  {
    absl::MutexLock lock(&mu_);
    serving_ = false;
    for (const auto& [call, watch] : watches_) calls.push_back(call);
  }
  for (CallReactor* const call : calls) EndIfDue(call);
}

}  // namespace ballast::services
