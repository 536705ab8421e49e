#include "ballast/client/group/agenda.h"

#include <algorithm>
#include <map>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "ballast/client/group/absentees.h"
#include "ballast/proto/base/status.h"

namespace ballast::client {
namespace {

// "1.5s,", "(16"
bool IsQuantity(absl::string_view word) {
  const auto is_mark = [](char c) { return absl::StrContains("(),.;:", c); };
  while (!word.empty() && is_mark(word.front())) word.remove_prefix(1);
  while (!word.empty() && is_mark(word.back())) word.remove_suffix(1);
  double number = 0;
  absl::Duration duration;
  return absl::SimpleAtod(word, &number) || absl::ParseDuration(word, &duration);
}

std::string CauseOf(const absl::Status& failed) {
  std::string cause = absl::StrCat(static_cast<int>(failed.code()), " ", model::ReasonOf(failed));
  for (const absl::string_view word : absl::StrSplit(failed.message(), ' ')) {
    if (!IsQuantity(word)) absl::StrAppend(&cause, " ", word);
  }
  return cause;
}

}  // namespace

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

bool FailureLines::IsDue(const absl::Status& failed, bool training_waits, model::SteadyTime now) {
  if (now - last_ < kWaitingInterval) return false;
  std::erase_if(told_, [&](const auto& one) { return now - one.second >= kSameInterval; });
  const bool is_new = told_.try_emplace(CauseOf(failed), now).second;
  if (!is_new && !training_waits) return false;
  last_ = now;
  return true;
}

}  // namespace ballast::client
