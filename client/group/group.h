// Exchanges between the ranks of one group during a call: their parts and their errors. An error of one rank becomes an
// error on all ranks, so that no rank waits for a part that never comes.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "ballast/client/collective/collective.h"
#include "ballast/client/transport/router.h"

namespace ballast::client {

class Group {
 public:
  // Borrows both arguments.
  Group(Collective* collective, Router* router) : collective_(collective), router_(router) {}

  int rank() const { return collective_->rank(); }
  int world_size() const { return collective_->world_size(); }
  Collective* collective() const { return collective_; }

  // COLLECTIVE. Returns every rank's `mine` in rank order. If any rank comes with an error, all ranks get the error of
  // the lowest rank that failed ("rank r: " precedes the message when r is another rank). `what` names the call in
  // messages about waiting. Errors: also the collective's own (RANK_MISSING), after which the group is unusable.
  absl::StatusOr<std::vector<std::string>> Agree(const std::string& what, const absl::Status& status,
                                                 const std::string& mine);
  absl::Status Agree(const std::string& what, const absl::Status& status) { return Agree(what, status, "").status(); }

 private:
  absl::StatusOr<std::vector<std::string>> ExchangeAll(const std::string& mine);

  Collective* collective_;
  Router* router_;
};

}  // namespace ballast::client
