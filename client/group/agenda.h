// When rank 0's keeper tries to change the servers of a job, and when it says that it cannot.
#pragma once

#include <map>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "ballast/proto/base/steady_time.h"

namespace ballast::client {

// Threads: one. Has no clock: each call says what time it is.
class Agenda {
 public:
  // How long after a try the next may come, and when it is tried again whether there is room now for copies that could
  // not be made, or for what the wish wants.
  static constexpr absl::Duration kRetryInterval = absl::Milliseconds(500), kReconsiderInterval = absl::Seconds(60);
  // For all servers to say who they are and what they have, before a change claims anything, and the least for the
  // calls of the change. One that takes longer is given up and begun again, with twice the time: somebody may have
  // died, or the machines are busy.
  static constexpr absl::Duration kPatience = absl::Seconds(1), kPatienceMax = absl::Seconds(16);

  // Why the servers may have to change.
  struct Signs {
    bool acute = false;          // a member is silent, all copies are made, or a change is unfinished
    bool lacks_servers = false;  // copies are missing, or members
    std::string asked;           // the wish, and the servers that are registered
  };
  bool IsDue(const Signs& signs, model::SteadyTime now) const;
  // Other servers are silent now: what failed perhaps failed for want of a server's answers. On busy machines servers
  // fall silent and come back, so patience grows all the same.
  void TryAtOnce() { retry_ = model::SteadyTime(); }
  absl::Duration patience() const { return patience_; }
  // A try begins, and ends with one of these. `absent`: when the first server may be asked again that did not answer.
  void Begin(model::SteadyTime now);
  void Fail(model::SteadyTime now);
  struct Outcome {
    bool changed = false;  // the table is another one now
    bool refused = false;  // there was no room for what the wish wants
  };
  void End(const Outcome& outcome, const std::string& asked, model::SteadyTime absent, model::SteadyTime now);

 private:
  std::string considered_;  // Signs::asked for which there was nothing more to change
  bool refused_ = false;
  absl::Duration patience_ = kPatience;
  model::SteadyTime began_, retry_;
  model::SteadyTime reconsider_ = model::SteadyTime::Never(), absent_ = model::SteadyTime::Never();
};

// Changes that fail again and again: when to say so.
class FailureLines {
 public:
  // While training waits for the change, a line shows that something goes on. Else each cause is told once, and then
  // rarely: such as an etcd that has an older state than the job. Causes whose messages differ in numbers and durations
  // alone are one.
  static constexpr absl::Duration kWaitingInterval = absl::Seconds(2), kSameInterval = absl::Minutes(10);

  // Whether a line is due.
  bool IsDue(const absl::Status& failed, bool training_waits, model::SteadyTime now);
  // What fails from now on is news.
  void Succeed() { told_.clear(); }

 private:
  std::map<std::string, model::SteadyTime> told_;  // by cause
  model::SteadyTime last_;
};

}  // namespace ballast::client
