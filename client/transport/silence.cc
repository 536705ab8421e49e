#include "ballast/client/transport/silence.h"

#include <algorithm>

#include "absl/time/clock.h"
#include "ballast/proto/base/status.h"

namespace ballast::client {

void Silence::Watch(const std::vector<Transport*>& servers, const std::vector<bool>& replaceable) {
  servers_.clear();
  order_ = servers;
  first_ = absl::InfiniteFuture();
  for (size_t i = 0; i < servers.size(); ++i) {
    Server& server = servers_[servers[i]];
    server.replaceable = i < replaceable.size() && replaceable[i];
    server.heard = absl::Now();
  }
}

void Silence::Note(const Transport* server, Call call, const absl::Status& status, absl::Time sent) {
  const auto found = servers_.find(server);
  if (found == servers_.end() || absl::IsCancelled(status)) return;
  Server& one = found->second;
  const absl::Time now = absl::Now();
  const bool unreachable = absl::IsUnavailable(status) && model::ReasonOf(status) != model::kBusy;
  const bool down = unreachable || (one.replaceable && model::IsWithoutJob(status));
  const bool hangs = absl::IsDeadlineExceeded(status);
  // A patient call was perhaps served until now. What was sent before the last answer says less than that answer.
  const absl::Time since = std::max(call == Call::kPatient ? now : sent, one.heard);
  if (down || (hangs && call == Call::kLook)) one.unreachable = std::min(one.unreachable, since);
  if (hangs && call == Call::kPrompt) one.stuck = std::min(one.stuck, sent);
  if (!down && !hangs) {
    one.heard = now;
    one.unreachable = absl::InfiniteFuture();
    if (call != Call::kLook) one.stuck = absl::InfiniteFuture();
  }
  first_ = absl::InfiniteFuture();
  for (const auto& [each, record] : servers_) first_ = std::min({first_, record.unreachable, record.stuck});
}

absl::Time Silence::Since(const Transport* server) const {
  const auto found = servers_.find(server);
  return found == servers_.end() ? absl::InfiniteFuture() : std::min(found->second.unreachable, found->second.stuck);
}

bool Silence::IsReplaceable(const Transport* server) const {
  const auto found = servers_.find(server);
  return found != servers_.end() && found->second.replaceable;
}

std::vector<Transport*> Silence::ToAsk(absl::Time now) {
  std::vector<Transport*> servers;
  for (Transport* const server : order_) {
    absl::Time& after = servers_[server].ask_after;
    if (now < after) continue;
    after = absl::InfiniteFuture();
    servers.push_back(server);
  }
  return servers;
}

void Silence::Asked(const Transport* server, absl::Time again) {
  const auto found = servers_.find(server);
  if (found != servers_.end()) found->second.ask_after = again;
}

}  // namespace ballast::client
