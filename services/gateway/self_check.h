// Whether the server can do what /readyz says: a thread asks, once a second, what every trainer needs.
#pragma once

#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "ballast/services/gateway/rpc_server.h"
#include "ballast/services/server/state_server.h"

namespace ballast::services {

// Threads: any. Borrows both.
class SelfCheck {
 public:
  // A busy machine answers late; only a server that is stuck takes as long as this.
  static constexpr absl::Duration kPatience = absl::Seconds(10);

  static absl::StatusOr<std::unique_ptr<SelfCheck>> Start(RpcServer* rpc, StateServer* state,
                                                          absl::Duration patience = kPatience);
  ~SelfCheck();

  // The fault found; empty: none. A check that does not end is a fault as well.
  std::string Fault() const;

 private:
  SelfCheck(RpcServer* rpc, StateServer* state, absl::Duration patience)
      : rpc_(rpc), state_(state), patience_(patience) {}
  void Run();
  void Ask(const char* what, const std::function<absl::Status()>& question);

  RpcServer* const rpc_;
  StateServer* const state_;
  const absl::Duration patience_;
  mutable absl::Mutex mu_;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::string fault_ ABSL_GUARDED_BY(mu_), next_fault_ ABSL_GUARDED_BY(mu_);
  const char* asking_ ABSL_GUARDED_BY(mu_) = "";
  absl::Time since_ ABSL_GUARDED_BY(mu_) = absl::InfiniteFuture();  // of the question under way
  std::thread thread_;
};

}  // namespace ballast::services
