// Since when which of a job's servers do not answer, or are of no use to it.
#pragma once

#include <map>
#include <vector>

#include "absl/status/status.h"
#include "ballast/client/transport.h"
#include "ballast/proto/base/steady_time.h"

namespace ballast::client {

// Threads: one at a time.
class Silence {
 public:
  // What a call's end says of its server.
  enum class Call {
    kPatient,  // may wait at a server that lives
    kPrompt,   // a server that lives answers within a moment, whatever it does
    kLook,     // as prompt, and answered even by a server whose disk hangs
  };

  // Forgets what was noted, and goes by these servers, which all answered a moment ago. `replaceable`: of each, whether
  // others have all of its chunks; shorter: false.
  void Watch(const std::vector<Transport*>& servers, const std::vector<bool>& replaceable);
  // A call that began at `sent` ended with `status`.
  void Note(const Transport* server, Call call, const absl::Status& status, model::SteadyTime sent);

  // Never: it answers, or nobody has asked; also for a server that is not the job's.
  model::SteadyTime Since(const Transport* server) const;
  // The least of all servers'.
  model::SteadyTime first() const { return first_; }
  bool IsReplaceable(const Transport* server) const;

  // Servers without a look on its way, whose pause is over. Each is to be asked by a look now; then Asked.
  std::vector<Transport*> ToAsk(model::SteadyTime now);
  void Asked(const Transport* server, model::SteadyTime again);

 private:
  struct Server {
    bool replaceable = false;
    model::SteadyTime heard;  // it answered then
    // Nobody can connect to it, or it did not answer a look; or others have its chunks, and it has stopped the job or
    // has nothing of it.
    model::SteadyTime unreachable = model::SteadyTime::Never();
    // It did not answer a prompt call. A look does not refute this.
    model::SteadyTime stuck = model::SteadyTime::Never();
    model::SteadyTime ask_after;
  };

  std::map<const Transport*, Server> servers_;
  std::vector<Transport*> order_;
  model::SteadyTime first_ = model::SteadyTime::Never();
};

}  // namespace ballast::client
