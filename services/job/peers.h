// The servers of a job as the newest fence named them, for people: ids and status pages. Nothing else depends on them.
#pragma once

#include <map>
#include <string>

#include "absl/status/status.h"
#include "ballast/v1/admin_service.pb.h"
#include "ballast/v1/state_service.pb.h"

namespace ballast::services {

// Threads: none; the job's lock serialises.
class Peers {
 public:
  // INVALID_ARGUMENT (BAD_REQUEST) for more servers than an epoch has members, an id that no server has, or a page that
  // is no host:port.
  static absl::Status Check(const v1::FenceRequest& request);

  // REQUIRES: Check(request) is OK.
  void Set(const v1::FenceRequest& request);
  // Adds all members of the job but `self`, with their pages where a fence told these.
  void Tell(const std::string& self, v1::JobStatus* status) const;

 private:
  std::map<std::string, std::string> pages_;  // by server id
};

}  // namespace ballast::services
