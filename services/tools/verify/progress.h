// Reports the progress of long work, line by line.
#pragma once

#include <string>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "ballast/services/tools/verify/finding.h"

namespace ballast::services {

// Threads: one.
class Progress {
 public:
  explicit Progress(SayProgress say) : say_(std::move(say)) {}

  // Work on `what` has done `done` of `total` bytes.
  void At(absl::string_view what, uint64_t done, uint64_t total) {
    const absl::Time now = absl::Now();
    if (say_ == nullptr || now - said_ < absl::Seconds(2)) return;
    said_ = now;
    say_(absl::StrCat(what, ": ", done >> 20, " of ", total >> 20, " MiB"));
  }

 private:
  const SayProgress say_;
  absl::Time said_ = absl::Now();
};

}  // namespace ballast::services
