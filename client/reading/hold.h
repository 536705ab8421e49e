// A reader's hold on a version of a job: it stays readable on all servers until the reader lets go, or the lease ends.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include "absl/random/random.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "ballast/client/transport/router.h"
#include "ballast/proto/base/steady_time.h"
#include "ballast/v1/state_service.pb.h"

namespace ballast::client {

class Hold {
 public:
  // Borrows `router`. `lease`: how long servers keep the version for a reader that says nothing more.
  Hold(Router* router, std::string job, absl::Duration lease) : router_(router), job_(std::move(job)), lease_(lease) {}
  ~Hold() { LetGo(); }

  // Pins `version` on all servers. Errors: the servers', such as VERSION_GONE and BEHIND; then no server holds it.
  absl::StatusOr<v1::PinResponse> Take(int64_t version, absl::Time deadline);
  // How long a lease may have run before a new one is due.
  absl::Duration renew_after() const { return lease_ / 3; }
  // Asks for a new lease if one is due. Blocks for a second at most. An error: some server does not hold the version
  // any more.
  absl::Status RenewIfDue();
  void LetGo();
  int64_t version() const { return version_; }  // -1: none

 private:
  v1::PinRequest Request() const;
  absl::StatusOr<v1::PinResponse> Pin(absl::Time deadline);

  Router* const router_;
  const std::string job_;
  const absl::Duration lease_;
  absl::BitGen random_;
  int64_t version_ = -1;
  uint64_t holder_ = 0;
  model::SteadyTime renewed_;
};

}  // namespace ballast::client
