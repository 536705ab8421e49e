// The memory that a transport shares with its server, and how the transport gets it.
#pragma once

#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "ballast/client/transport/shared_slots.h"

namespace ballast::client {

// Threads: any.
class Sharing {
 public:
  // Null: all bytes go over the wire. Drops memory that the server no longer shares.
  std::shared_ptr<SharedSlots> slots() ABSL_LOCKS_EXCLUDED(mu_);
  // True: the caller asks the server for an offer now, and End() follows. False: memory is shared, somebody asks
  // already, or (unless `at_once`) somebody asked a moment ago.
  bool Begin(bool at_once) ABSL_LOCKS_EXCLUDED(mu_);
  // The socket of the hand-over under way.
  void Watch(int socket) ABSL_LOCKS_EXCLUDED(mu_);
  // Call before the socket is closed. If `shared` is an error, all bytes go over the wire, and the transport asks again
  // later, after UNAVAILABLE sooner.
  void End(absl::StatusOr<std::shared_ptr<SharedSlots>> shared) ABSL_LOCKS_EXCLUDED(mu_);
  // Ends a hand-over under way.
  void Cancel() ABSL_LOCKS_EXCLUDED(mu_);

 private:
  std::shared_ptr<SharedSlots> Living() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  absl::Mutex mu_;
  std::shared_ptr<SharedSlots> slots_ ABSL_GUARDED_BY(mu_);
  bool under_way_ ABSL_GUARDED_BY(mu_) = false;
  bool cancelled_ ABSL_GUARDED_BY(mu_) = false;
  int socket_ ABSL_GUARDED_BY(mu_) = -1;
  absl::Time again_ ABSL_GUARDED_BY(mu_) = absl::InfinitePast();
};

}  // namespace ballast::client
