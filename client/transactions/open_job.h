// The job as this session has it open: servers, group, plan and version, and whether the session has ended.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "ballast/client/group/group.h"
#include "ballast/client/session_types.h"
#include "ballast/client/transfers/seat.h"
#include "ballast/client/transport/router.h"
#include "ballast/proto/base/status.h"

namespace ballast::client {

inline absl::Status Precondition(absl::string_view message) {
  return model::Error(absl::StatusCode::kFailedPrecondition, model::kBadRequest, message);
}

class OpenJob {
 public:
  // Borrows `collective`.
  OpenJob(const SessionOptions& options, std::vector<std::unique_ptr<Transport>> servers, Collective* collective);

  const SessionOptions& options() const { return options_; }
  Router* router() const { return router_.get(); }
  Group* group() { return &group_; }
  const Seat& seat() const { return seat_; }
  const v1::OpenRequest& open() const { return *open_; }
  // Tensors, ascending.
  const std::vector<uint32_t>& without_values() const { return without_values_; }
  const model::Layout& layout() const { return seat_.units->layout(); }
  uint32_t tensor_count() const { return static_cast<uint32_t>(layout().tensors().size()); }
  // True if placements say which rank has which tensors; then ranks may have different ones.
  bool places() const { return options_.split == Split::kPlaced; }
  bool lends_masters() const { return seat_.optimizer.master == kernels::MasterFormat::kLent; }

  // Takes over the plan implied by `open`.
  absl::Status Adopt(const std::shared_ptr<const v1::OpenRequest>& open);
  // The next step is a new attempt, or the other ranks' attempt.
  void NextAttempt() { ++seat_.attempt; }
  void CatchUp(uint64_t attempt) { seat_.attempt = std::max(seat_.attempt, attempt); }
  // A transaction is decided.
  void Advance(int64_t version);

  // Whether this is a forked child: threads, connections and loans then belong to the parent.
  bool forked() const;
  // OK, or the error that ended the session.
  const absl::Status& ended() const { return ended_; }
  void End(const absl::Status& why) { ended_ = why; }
  // Returns `status`, and remembers a status that ends the session.
  absl::Status Conclude(absl::Status status);
  // OK, or the reason why no call is possible: forked, ended.
  absl::Status Usable() const;
  // Usable, the job is initialised and `unit` exists.
  absl::Status CheckReadable(uint32_t unit) const;
  // CheckReadable, and all tensors of the unit have values.
  absl::Status CheckHasValues(uint32_t unit) const;

  // Cancels calls under way, so that nobody waits for servers any more.
  void Disconnect() { router_.reset(); }

 private:
  const SessionOptions options_;
  const uint64_t forks_;  // in this process's ancestry when the session was opened
  std::unique_ptr<Router> router_;
  Group group_;
  Seat seat_;
  std::shared_ptr<const v1::OpenRequest> open_;
  std::vector<uint32_t> without_values_;
  absl::Status ended_;
};

}  // namespace ballast::client
