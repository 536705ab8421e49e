// A trainer's connection to the state servers: one rank of one group that trains one job. This header opens a Session
// and says where tensors lie; steps.h, reads.h, loans.h and versions.h have its other calls.
//
// Two ways of use, which may be mixed by unit:
//  (a) Parameters live on the servers only (ZeRO-3/Infinity): Prefetch(unit) ahead of use, Acquire(unit) all-gathers
//      the unit, dropping the lease frees it.
//  (b) The trainer keeps its parameters (ZeRO-1/2/Offload): Push per unit as backward produces gradients, Step, then
//      StartPull for the updated ranges. tensors.h does so for whole models.
//
// Pushed gradients are provisional until Step(). Before it, you may ask for norms, choose a scale, or Drop(). If no
// rank pushes a tensor, a step changes neither its state nor its step count. Servers keep state even for a tensor that
// no rank ever pushes, unless TensorSpec::frozen says that they keep only its value.
//
// Threads: one thread at a time per session. Calls marked COLLECTIVE must be made by all ranks in the same order.
// Errors: carry a reason (model::ReasonOf). STALE_EPOCH, RANK_MISSING and DATA_LOSS end the session: exit, and start
// the group again with resume = auto. No decided step is lost. Fork: after Open, calls in a forked child return
// FAILED_PRECONDITION, because gRPC does not support forks.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "ballast/client/collective/collective.h"
#include "ballast/client/loans.h"
#include "ballast/client/reads.h"
#include "ballast/client/session_types.h"
#include "ballast/client/steps.h"
#include "ballast/client/transport.h"
#include "ballast/client/versions.h"
#include "ballast/kernels/optimizer.h"

namespace ballast::client {

class Session : public Steps, public Reads, public Loans, public Versions {
 public:
  // COLLECTIVE. Fences the job with a new epoch, settles what an earlier group left undecided, and opens the job for
  // this group. The world size may differ from the earlier group's. `tensors`: the same on all ranks, or with
  // Split::kPlaced those that this rank has a part of. On resume, all ranks together must name the job's tensors;
  // Register adds new ones. Owns the transports (one per server, the same order on all ranks); borrows `collective`.
  // Errors: JOB_EXISTS (names never, auto, must), JOB_MISSING, BAD_SPEC (names the tensor that differs), BUDGET,
  // SERVER_DOWN, RANK_MISSING, STATE_LOST.
  static absl::StatusOr<std::unique_ptr<Session>> Open(const SessionOptions& options,
                                                       const std::vector<TensorSpec>& tensors,
                                                       std::vector<std::unique_ptr<Transport>> servers,
                                                       Collective* collective);
  // Opens a session over a gRPC transport per "host:port", with SessionOptions::access.
  static absl::StatusOr<std::unique_ptr<Session>> Connect(const SessionOptions& options,
                                                          const std::vector<TensorSpec>& tensors,
                                                          const std::vector<std::string>& servers,
                                                          Collective* collective);
  ~Session();

  // The last decided step. -1: the job is new, and Initialise comes first.
  int64_t version() const;
  // OK, or the error that ended the session, which every call returns from then on.
  const absl::Status& ended() const;
  // How often Drop was called since the last decided step. Ranks whose counts differ cannot make the next step.
  uint64_t attempt() const;
  // Whether some tensors have no values yet: the job is new, or tensors were registered and not initialised before a
  // restart. Initialise must come before the next step.
  bool needs_values() const;
  bool needs_values(uint32_t tensor) const;
  int rank() const;
  int world_size() const;
  // The job's optimizer.
  const kernels::OptimizerSpec& optimizer() const;

  // Where tensors lie. A tensor's index is its place in the list passed to Lend.
  uint32_t unit_count() const;
  absl::StatusOr<uint32_t> FindUnit(absl::string_view name) const;
  uint64_t unit_elements(uint32_t unit) const;
  struct Location {
    uint32_t unit = 0;
    uint64_t begin = 0;
    uint64_t end = 0;
  };
  absl::StatusOr<Location> Locate(absl::string_view tensor) const;  // name or alias
  absl::StatusOr<uint32_t> TensorIndex(absl::string_view tensor) const;
  uint32_t tensor_count() const;
  // How the job keeps the tensor; TensorSpec::frozen of a resuming Open does not change it. NOT_FOUND (UNKNOWN_TENSOR).
  absl::StatusOr<v1::Frozen> FrozenAs(absl::string_view tensor) const;
  // Names of the job's live tensors, in the order of registration.
  std::vector<std::string> tensor_names() const;
  // The whole tensor's shape, by TensorIndex. Valid until Register.
  const std::vector<uint64_t>& ShapeOf(uint32_t tensor) const;
  // This rank's ranges of a unit, by offset. RangesOf returns any rank's.
  const std::vector<UnitRange>& owned(uint32_t unit) const;
  const std::vector<UnitRange>& RangesOf(int rank, uint32_t unit) const;
  uint64_t owned_elements(uint32_t unit) const;
  // The part of a tensor, by TensorIndex, that this rank has; null if it has none. With Split::kEven, the whole tensor.
  // Valid until Register.
  const model::Box* Held(uint32_t tensor) const;
  // The places of a box of a tensor in the order of the tensor's elements.
  std::vector<model::BoxRun> RunsOf(uint32_t tensor, const model::Box& box) const;
  Split split() const;
  uint64_t inflight_bytes_max() const;

  // COLLECTIVE, between steps, with no push pending. Adds tensors by a fence: new units, or further tensors of known
  // units. With Split::kPlaced a rank may pass an empty list. A tensor registered under an old name replaces the old
  // tensor. Initialise must give values before the next step.
  absl::Status Register(const std::vector<TensorSpec>& tensors);

  SessionStats stats() const;

 private:
  explicit Session(std::unique_ptr<SessionCore> core);
  std::unique_ptr<SessionCore> core_;
};

}  // namespace ballast::client
