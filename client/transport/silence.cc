#include "ballast/client/transport/silence.h"

#include <algorithm>

#include "ballast/proto/base/status.h"

namespace ballast::client {

void Silence::Watch(const std::vector<Transport*>& servers, const std::vector<bool>& replaceable) {
  servers_.clear();
  order_ = servers;
  first_ = model::SteadyTime::Never();
  for (size_t i = 0; i < servers.size(); ++i) {
    Server& server = servers_[servers[i]];
    server.replaceable = i < replaceable.size() && replaceable[i];
    server.heard = model::SteadyTime::Now();
  }
}

void Silence::Note(const Transport* server, Call call, const absl::Status& status, model::SteadyTime sent) {
  const auto found = servers_.find(server);
  if (found == servers_.end() || absl::IsCancelled(status)) return;
  Server& one = found->second;
  const model::SteadyTime now = model::SteadyTime::Now();
  const bool unreachable = absl::IsUnavailable(status) && model::ReasonOf(status) != model::kBusy;
  const bool down = unreachable || (one.replaceable && model::IsWithoutJob(status));
  const bool hangs = absl::IsDeadlineExceeded(status);
  // A patient call was perhaps served until now. What was sent before the last answer says less than that answer.
  const model::SteadyTime since = std::max(call == Call::kPatient ? now : sent, one.heard);
  if (down || (hangs && call == Call::kLook)) one.unreachable = std::min(one.unreachable, since);
  if (hangs && call == Call::kPrompt) one.stuck = std::min(one.stuck, sent);
  if (!down && !hangs) {
    one.heard = now;
    one.unreachable = model::SteadyTime::Never();
    if (call != Call::kLook) one.stuck = model::SteadyTime::Never();
  }
  first_ = model::SteadyTime::Never();
  for (const auto& [each, record] : servers_) first_ = std::min({first_, record.unreachable, record.stuck});
}

model::SteadyTime Silence::Since(const Transport* server) const {
  const auto found = servers_.find(server);
  return found == servers_.end() ? model::SteadyTime::Never()
                                 : std::min(found->second.unreachable, found->second.stuck);
}

bool Silence::IsReplaceable(const Transport* server) const {
  const auto found = servers_.find(server);
  return found != servers_.end() && found->second.replaceable;
}

std::vector<Transport*> Silence::ToAsk(model::SteadyTime now) {
  std::vector<Transport*> servers;
  for (Transport* const server : order_) {
    model::SteadyTime& after = servers_[server].ask_after;
    if (now < after) continue;
    after = model::SteadyTime::Never();
    servers.push_back(server);
  }
  return servers;
}

void Silence::Asked(const Transport* server, model::SteadyTime again) {
  const auto found = servers_.find(server);
  if (found != servers_.end()) found->second.ask_after = again;
}

}  // namespace ballast::client
