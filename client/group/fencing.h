// The fence with which a group takes a job over: the number of its epoch, and the promises of all servers (rules 9 and
// 10 of services/step/README.md).
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "ballast/client/transport/answers.h"
#include "ballast/client/transport/router.h"

namespace ballast::client {

// Chooses an epoch above every promise that the servers have made. One fence raises a promise by at most
// kEpochsSkippedMax (proto/model/verdict.h). If somebody fenced only some servers, another may be far behind: this
// class then fences that server several times, each time as far as allowed.
class Fencing {
 public:
  // Borrows `router`. `promised`: the counter of each server's promise, in the router's order. `peers`: all servers;
  // each fence names them to its server.
  Fencing(Router* router, std::string job, std::vector<uint64_t> promised, std::vector<v1::Peer> peers);
  // The promises in the answers to GetJob.
  static std::vector<uint64_t> Promised(absl::Span<const v1::GetJobResponse> answers);

  const v1::Epoch& epoch() const { return epoch_; }
  // Uses a later epoch instead.
  void Raise(const v1::Epoch& epoch) { epoch_ = epoch; }
  // OpenRequest.group of the Open that will follow: who is refused then knows whether the epoch is its own group's.
  void Name(std::string group) { group_ = std::move(group); }
  // Fences all servers with epoch(). Errors: the servers'. FAILED_PRECONDITION (BAD_REQUEST) if the promises lie too
  // far apart; then no server was fenced.
  absl::StatusOr<std::vector<v1::GetJobResponse>> Fence(bool expect_empty, absl::Time deadline);
  // As Fence, and returns at once: servers may be missing.
  absl::StatusOr<std::shared_ptr<Answers<v1::FenceResponse>>> Ask(bool expect_empty, absl::Time deadline);

 private:
  absl::StatusOr<v1::FenceRequest> Begin(bool expect_empty, absl::Time deadline);
  absl::Status CheckApart() const;
  // Fences that the server needs before the fence with epoch().
  uint64_t StepsBefore(uint32_t server) const;
  absl::Status CatchUp(uint32_t server, v1::FenceRequest request, absl::Time deadline);
  std::string What() const;

  Router* const router_;
  const std::string job_;
  const std::vector<uint64_t> promised_;
  const std::vector<v1::Peer> peers_;
  v1::Epoch epoch_;
  std::string group_;
};

}  // namespace ballast::client
