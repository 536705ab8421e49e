// Moments at which a test kills the process: their names, and the call to put at each moment.
//
// The environment variable FAILPOINT, "name:n", ends the process with SIGKILL at the n-th passing.
#pragma once

#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace ballast::storage {

// "create/", "fence/", "recovery/", "drop/", "lengthen/": passed when a job's log is made, when a group of trainers
// begins, when a server starts, when a job is dropped, when its log gets longer (or is made). "lease/", "loan/",
// "lent/": passed by a trainer whose server is in its process. All others are passed in every run.
inline constexpr absl::string_view kFailpoints[] = {
    // storage/log
    "create/reserved", "create/headless", "create/head", "log/appended", "log/submitted", "log/written", "log/sync",
    "log/synced", "log/marked", "log/head", "log/head_written", "log/cut", "log/freed", "recovery/scanned",
    "recovery/synced", "lengthen/reserved", "lengthen/written", "lengthen/synced",
    // chunks
    "extent/taken", "chunk/updated", "extent/labelled", "extent/written", "extent/sync", "extent/synced",
    "extent/recorded", "extent/freed", "recovery/chunk_restored", "recovery/moments_read",
    // services
    "create/catalogued", "create/space_taken", "fence/catalog_put", "fence/catalog_done", "fence/promise", "fence/open",
    "journal/slice", "journal/prepared", "journal/decision", "journal/rolled", "journal/durable", "step/updated",
    "step/flushed", "step/cut", "recovery/opened", "recovery/slices_loaded", "recovery/step_replayed",
    "recovery/replayed", "recovery/rolled", "lengthen/done", "drop/stopped", "drop/log_removed", "drop/log_forgotten",
    "drop/job_forgotten",
    // a trainer's memory: leases of working copies, loans, and gradients that are read where they were pushed from
    "lease/taken", "lease/returned", "lease/awaited", "loan/begun", "loan/ended", "lent/compared"};

// Whether only a trainer with its server in its process passes the point.
inline bool IsOfTrainersMemory(absl::string_view point) {
  return absl::StartsWith(point, "lease/") || absl::StartsWith(point, "loan/") || absl::StartsWith(point, "lent/");
}

// A name from kFailpoints; any other name does not compile.
class Failpoint {
 public:
  consteval Failpoint(const char* name) : name_(name) {  // NOLINT: so that a call reads as its name
    for (const absl::string_view known : kFailpoints) {
      if (known == name_) return;
    }
    throw "not one of kFailpoints";
  }
  constexpr absl::string_view name() const { return name_; }

 private:
  absl::string_view name_;
};

// Threads: any.
inline void Pass(Failpoint point) {
  static const char* const armed = std::getenv("FAILPOINT");
  if (armed == nullptr || !absl::StartsWith(armed, absl::StrCat(point.name(), ":"))) return;
  static const uint64_t wanted = [] {
    uint64_t n = 0;
    const absl::string_view text = armed;
    return absl::SimpleAtoi(text.substr(text.find(':') + 1), &n) ? n : 0;
  }();
  static std::atomic<uint64_t> passed{0};
  if (++passed == wanted) kill(getpid(), SIGKILL);
}

}  // namespace ballast::storage
