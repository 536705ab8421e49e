#include "ballast/client/group/absentees.h"

#include <algorithm>
#include <set>

#include "absl/strings/str_cat.h"
#include "ballast/proto/model/protocol.h"

namespace ballast::client {

std::string Absentees::KeyOf(const v1::Member& server) {
  return absl::StrCat(model::TargetOf(server.server_id(), server.disk()), " ", server.address());
}

bool Absentees::Rests(const v1::Member& server, model::SteadyTime now) const {
  const auto found = absent_.find(KeyOf(server));
  return found != absent_.end() && now < found->second.until;
}

absl::Duration Absentees::RestOf(const v1::Member& server) const {
  const auto found = absent_.find(KeyOf(server));
  return found == absent_.end() ? absl::ZeroDuration() : found->second.rest;
}

bool Absentees::Failed(const v1::Member& server, bool wished, model::SteadyTime now) {
  Absent& absent = absent_[KeyOf(server)];
  absent.rest = wished ? kRestMin : std::clamp(2 * absent.rest, kRestMin, kRestMax);
  absent.until = now + absent.rest;
  if (now - absent.told < kTellInterval) return false;
  absent.told = now;
  return true;
}

void Absentees::KeepOnly(const std::vector<v1::Member>& servers) {
  std::set<std::string> kept;
  for (const v1::Member& server : servers) kept.insert(KeyOf(server));
  std::erase_if(absent_, [&](const auto& absent) { return !kept.contains(absent.first); });
}

void Absentees::EndRests() {
  for (auto& [server, absent] : absent_) absent.until = model::SteadyTime();
}

model::SteadyTime Absentees::next() const {
  model::SteadyTime next = model::SteadyTime::Never();
  for (const auto& [server, absent] : absent_) next = std::min(next, absent.until);
  return next;
}

}  // namespace ballast::client
