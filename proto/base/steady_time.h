// A moment by a clock that nobody sets, for how long something has lasted. absl::Now jumps where an operator or NTP
// sets the machine's clock: by it, a server that missed one call would have been silent for an hour.
#pragma once

#include <chrono>

#include "absl/time/time.h"

namespace ballast::model {

class SteadyTime {
 public:
  constexpr SteadyTime() = default;  // longer ago than any other
  static SteadyTime Now() { return SteadyTime(absl::FromChrono(std::chrono::steady_clock::now().time_since_epoch())); }
  static constexpr SteadyTime Never() { return SteadyTime(absl::InfiniteDuration()); }  // later than any other

  friend absl::Duration operator-(SteadyTime one, SteadyTime before) { return one.at_ - before.at_; }
  friend SteadyTime operator+(SteadyTime one, absl::Duration more) { return SteadyTime(one.at_ + more); }
  friend SteadyTime operator-(SteadyTime one, absl::Duration less) { return SteadyTime(one.at_ - less); }
  friend bool operator==(SteadyTime a, SteadyTime b) { return a.at_ == b.at_; }
  friend bool operator<(SteadyTime a, SteadyTime b) { return a.at_ < b.at_; }
  friend bool operator>(SteadyTime a, SteadyTime b) { return b < a; }
  friend bool operator<=(SteadyTime a, SteadyTime b) { return !(b < a); }
  friend bool operator>=(SteadyTime a, SteadyTime b) { return !(a < b); }

 private:
  explicit constexpr SteadyTime(absl::Duration at) : at_(at) {}
  absl::Duration at_ = -absl::InfiniteDuration();  // since some moment
};

}  // namespace ballast::model
