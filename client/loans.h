// How a session lends the trainer's memory to a server in its process. A part of Session: session.h says how to use the
// parts, on which threads, and which errors end a session.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "ballast/proto/base/lent_memory.h"

namespace ballast::client {

struct SessionCore;

class Loans {
 public:
  // (c) True with one rank, and one server in this process that keeps no working copies. Then no elements are copied:
  // the step reads gradients and initial values from the trainer's memory, and writes parameters there. The trainer
  // keeps the memory, with gradients and values unchanged, until AwaitApplied or Drop has returned, or the session is
  // gone.
  bool takes_loans() const;
  bool takes_gradients() const;  // whether loans may include gradients and values: not with durability `step`
  // Whether parameters are their own masters: see Lend.
  bool lends_masters() const;
  // Before Step, in place of Push. Pass an entry per TensorIndex: with the gradients of all tensors that have one, or
  // with no gradients. With durability `step` gradients go to a log, so they must be pushed (UNSUPPORTED). Parameters
  // of a tensor that is not updated stay as they are. If takes_gradients(), the loan includes values given to Write; do
  // not call Write until the loan ends. Before Initialise: pass the values of all tensors that need them. Then
  // Initialise does not call `fill`. In a job with MasterFormat::kLent parameters are their own masters, and only the
  // trainer reads and writes them. A loan of a gradient includes its parameter. Write, pulls and reads of masters are
  // UNIMPLEMENTED (UNSUPPORTED), and CommitState of masters takes only step counts. If a trainer ends a step's loan
  // during Step, the job is lost (STATE_LOST).
  absl::Status Lend(std::vector<model::LentTensor> tensors);
  // After Step, before AwaitApplied. Blocks until the unit's lent parameters are at version(). The loan continues.
  absl::Status AwaitUnit(uint32_t unit);
  // After Step. Blocks until lent parameters are at version(), then ends the loan. It also ends the loan on an error:
  // then some parameters may be at version(), or half updated. FAILED_PRECONDITION before Step: the loan continues.
  absl::Status AwaitApplied();

 protected:
  explicit Loans(SessionCore* core) : core_(core) {}
  ~Loans() = default;

 private:
  SessionCore* core_;
};

}  // namespace ballast::client
