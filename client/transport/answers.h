// Answers of several servers to one request, as they come.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace ballast::client {

// Threads: any. Held by shared_ptr: answers may come after its user has gone on.
template <typename Response>
class Answers {
 public:
  // By server. Empty where a server has not answered.
  using All = std::vector<std::optional<absl::StatusOr<Response>>>;

  explicit Answers(uint32_t servers) : answers_(servers) {}

  void Add(uint32_t server, absl::StatusOr<Response> answer) {
    absl::MutexLock lock(&mutex_);
    answers_[server] = std::move(answer);
  }
  // Blocks until all have answered, or until `until`.
  All Await(absl::Time until) { return Await({}, absl::InfiniteDuration(), until); }
  // As Await, but once all that are `needed` have answered, the others have `grace` left. Shorter: the rest is not
  // needed.
  All Await(const std::vector<bool>& needed, absl::Duration grace, absl::Time until) {
    const auto those = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      for (size_t i = 0; i < std::min(needed.size(), answers_.size()); ++i) {
        if (needed[i] && !answers_[i].has_value()) return false;
      }
      return true;
    };
    const auto all = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      return std::all_of(answers_.begin(), answers_.end(), [](const auto& answer) { return answer.has_value(); });
    };
    absl::MutexLock lock(&mutex_);
    mutex_.AwaitWithDeadline(absl::Condition(&those), until);
    mutex_.AwaitWithDeadline(absl::Condition(&all), std::min(until, absl::Now() + grace));
    return answers_;
  }

 private:
  absl::Mutex mutex_;
  All answers_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ballast::client
