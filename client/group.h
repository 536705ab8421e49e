// What the ranks of one group tell each other between two calls: their parts, and their errors, so that one rank's
// trouble is an error on all of them and never a wait for something that does not come.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "ballast/client/collective/collective.h"
#include "ballast/client/router.h"

namespace ballast::client {

class Group {
 public:
  // Borrows both.
  Group(Collective* collective, Router* router) : collective_(collective), router_(router) {}

  int rank() const { return collective_->rank(); }
  int world_size() const { return collective_->world_size(); }
  Collective* collective() const { return collective_; }

  // COLLECTIVE. Every rank's `mine`, in rank order; or, if any rank comes with an error, the lowest such rank's error,
  // on all ranks alike (other ranks' errors are put before it by "rank r: "). `what` names the call for whoever waits.
  // Errors: also the collective's own (RANK_MISSING), after which the group is unusable.
  absl::StatusOr<std::vector<std::string>> Agree(const std::string& what, const absl::Status& status,
                                                 const std::string& mine);
  absl::Status Agree(const std::string& what, const absl::Status& status) { return Agree(what, status, "").status(); }

 private:
  absl::StatusOr<std::vector<std::string>> ExchangeAll(const std::string& mine);

  Collective* collective_;
  Router* router_;
};

}  // namespace ballast::client
