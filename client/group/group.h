// During a call the ranks of a group exchange messages. Each rank contributes its part, or its error. An error of one
// rank becomes an error on all ranks, so that no rank waits for a part that never comes.
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

  // COLLECTIVE. Returns every rank's `mine` in rank order. If any rank passes an error, all ranks get the error of the
  // lowest rank that failed; the other ranks get it with "rank r: " before the message. `what` names the call in
  // messages about waiting. After an error of the collective itself (RANK_MISSING) the group is unusable.
  absl::StatusOr<std::vector<std::string>> Agree(const std::string& what, const absl::Status& status,
                                                 const std::string& mine);
  absl::Status Agree(const std::string& what, const absl::Status& status) { return Agree(what, status, "").status(); }

 private:
  absl::StatusOr<std::vector<std::string>> ExchangeAll(const std::string& mine);

  Collective* collective_;
  Router* router_;
};

}  // namespace ballast::client
