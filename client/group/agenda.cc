#include "ballast/client/group/agenda.h"

#include <algorithm>

#include "ballast/client/group/absentees.h"

namespace ballast::client {

bool Agenda::IsDue(const Signs& signs, model::SteadyTime now) const {
  if (now < retry_) return false;
  return signs.acute || signs.asked != considered_ || now >= absent_ ||
         (now >= reconsider_ && (refused_ || signs.lacks_servers));
}

void Agenda::Begin(model::SteadyTime now) {
  began_ = now;
  retry_ = now + kRetryInterval;
}

void Agenda::Fail(model::SteadyTime now) {
  patience_ = std::min(2 * patience_, kPatienceMax);
  if (began_ >= absent_) absent_ = now + Absentees::kRestMin;
}

void Agenda::End(const Outcome& outcome, const std::string& asked, model::SteadyTime absent, model::SteadyTime now) {
  patience_ = kPatience;
  considered_ = outcome.changed ? "" : asked;  // a change may be what a later wish waits for
  refused_ = outcome.refused;
  absent_ = absent;
  reconsider_ = now + kReconsiderInterval;
}

bool FailureLines::IsDue(const std::string& cause, bool training_waits, model::SteadyTime now) {
  const absl::Duration pause = cause == cause_ && !training_waits ? kSameInterval : kWaitingInterval;
  if (now - told_ < pause) return false;
  cause_ = cause;
  told_ = now;
  return true;
}

}  // namespace ballast::client
