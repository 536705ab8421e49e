// Since when which of a job's servers do not answer, or are of no use to it.
#pragma once

#include <map>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "ballast/client/transport.h"

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
  void Note(const Transport* server, Call call, const absl::Status& status, absl::Time sent);

  // InfiniteFuture: it answers, or nobody has asked; also for a server that is not the job's.
  absl::Time Since(const Transport* server) const;
  // The least of all servers'.
  absl::Time first() const { return first_; }
  bool IsReplaceable(const Transport* server) const;

  // Servers without a look on its way, whose pause is over. Each is to be asked by a look now; then Asked.
  std::vector<Transport*> ToAsk(absl::Time now);
  void Asked(const Transport* server, absl::Time again);

 private:
  struct Server {
    bool replaceable = false;
    absl::Time heard;  // it answered then
    // Nobody can connect to it, or it did not answer a look; or others have its chunks, and it has stopped the job or
    // has nothing of it.
    absl::Time unreachable = absl::InfiniteFuture();
    // It did not answer a prompt call. A look does not refute this.
    absl::Time stuck = absl::InfiniteFuture();
    absl::Time ask_after = absl::InfinitePast();
  };

  std::map<const Transport*, Server> servers_;
  std::vector<Transport*> order_;
  absl::Time first_ = absl::InfiniteFuture();
};

}  // namespace ballast::client
