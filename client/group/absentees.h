// Servers that are registered and did not answer, so that a change of a job's servers was made without them. etcd lists
// a dead server until its lease has run out, and one that trainers do not reach for as long as it lives.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "ballast/proto/base/steady_time.h"
#include "ballast/v1/state_service.pb.h"

namespace ballast::client {

// A server is known by id, disk and address. Threads: one at a time.
class Absentees {
 public:
  static constexpr absl::Duration kRestMin = absl::Seconds(3), kRestMax = absl::Seconds(48);
  // Between two lines about one server.
  static constexpr absl::Duration kTellInterval = absl::Seconds(60);

  // The server is not to be asked now.
  bool Rests(const v1::Member& server, model::SteadyTime now) const;
  // How long the server's last rest was; zero: it has answered since, or was never asked in vain.
  absl::Duration RestOf(const v1::Member& server) const;
  // It did not answer, and rests from now on, each time for twice as long. One that an operator wished for rests for
  // kRestMin every time. Returns whether a line is due.
  bool Failed(const v1::Member& server, bool wished, model::SteadyTime now);
  void Answered(const v1::Member& server) { absent_.erase(KeyOf(server)); }
  // Forgets all others.
  void KeepOnly(const std::vector<v1::Member>& servers);
  // The wish has changed, or a server has started: all may be asked at once.
  void EndRests();
  // When the first may be asked again. Never: nobody is absent.
  model::SteadyTime next() const;

 private:
  struct Absent {
    absl::Duration rest = absl::ZeroDuration();
    model::SteadyTime until;
    model::SteadyTime told;
  };
  static std::string KeyOf(const v1::Member& server);

  std::map<std::string, Absent> absent_;
};

}  // namespace ballast::client
