#include "ballast/services/monitoring/waits.h"

#include <optional>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"

namespace ballast::services {
namespace {

std::string Seconds(double seconds) { return absl::StrFormat("%.0f s", seconds); }

// "rank 3 has", "ranks 3 and 5 have", "ranks 0, 1, 2 and 13 more have".
std::string Ranks(const v1::StepInFlight& step) {
  if (step.unsealed_ranks_size() == 0) return "some rank has";
  if (step.unsealed_count() == 1) return absl::StrCat("rank ", step.unsealed_ranks(0), " has");
  std::vector<uint32_t> named(step.unsealed_ranks().begin(), step.unsealed_ranks().end());
  std::string last;
  if (step.unsealed_count() > named.size()) {
    last = absl::StrCat(step.unsealed_count() - named.size(), " more");
  } else {
    last = absl::StrCat(named.back());
    named.pop_back();
  }
  return absl::StrCat("ranks ", absl::StrJoin(named, ", "), " and ", last, " have");
}

// The wait of the step in flight: the latest of its milestones tells what comes next.
std::optional<std::string> ShowStep(const v1::StepInFlight& step) {
  const auto waits = [](bool has, double seconds) { return has && seconds >= kWaitSecondsMin; };
  if (step.has_seconds_since_prepared()) {
    if (!waits(true, step.seconds_since_prepared())) return std::nullopt;
    return absl::StrCat("rank 0 has not decided step ", step.step(), ", prepared here, for ",
                        Seconds(step.seconds_since_prepared()));
  }
  if (step.has_seconds_since_complete()) {
    if (!waits(true, step.seconds_since_complete())) return std::nullopt;
    return absl::StrCat("the log's disk has not synced step ", step.step(), " for ",
                        Seconds(step.seconds_since_complete()));
  }
  if (step.has_seconds_since_first_seal()) {
    if (!waits(true, step.seconds_since_first_seal())) return std::nullopt;
    if (step.unsealed_count() == 0) {
      return absl::StrCat("slices of step ", step.step(), ", which all ranks have sealed, have been missing for ",
                          Seconds(step.seconds_since_first_seal()));
    }
    return absl::StrCat(Ranks(step), " not sealed step ", step.step(), " for ",
                        Seconds(step.seconds_since_first_seal()));
  }
  if (!waits(step.has_seconds_since_first_slice(), step.seconds_since_first_slice())) return std::nullopt;
  return absl::StrCat("no rank has sealed step ", step.step(), ", whose slices have come for ",
                      Seconds(step.seconds_since_first_slice()));
}

}  // namespace

std::vector<std::string> ShowWaits(const v1::JobStatus& job) {
  std::vector<std::string> waits;
  if (!job.has_in_flight()) return waits;
  const v1::StepInFlight& step = job.in_flight();
  if (std::optional<std::string> wait = ShowStep(step); wait.has_value()) waits.push_back(*std::move(wait));
  if (step.has_seconds_of_update() && step.seconds_of_update() >= kWaitSecondsMin) {
    waits.push_back(absl::StrCat("pulls of version ", step.step() - 1, " wait for its update, decided ",
                                 Seconds(step.seconds_of_update()), " ago"));
  }
  return waits;
}

}  // namespace ballast::services
