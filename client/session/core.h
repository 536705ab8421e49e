// The core that the parts of a session share. Each field owns its state.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "ballast/client/group/keeper.h"
#include "ballast/client/session_types.h"
#include "ballast/client/transactions/lending.h"
#include "ballast/client/transactions/norms.h"
#include "ballast/client/transactions/open_job.h"
#include "ballast/client/transactions/transactions.h"
#include "ballast/client/transfers/gradients.h"
#include "ballast/client/transfers/parameters.h"
#include "ballast/client/transfers/values.h"

namespace ballast::client {

struct SessionCore {
  SessionCore(const SessionOptions& options, std::vector<std::unique_ptr<Transport>> servers, Collective* collective);
  ~SessionCore();

  // After the first Adopt. RESOURCE_EXHAUSTED (LIMIT).
  absl::Status StartKeeper();
  absl::Status Adopt(const std::shared_ptr<const v1::OpenRequest>& open);
  // COLLECTIVE. Goes on in a new epoch of the job, with `added` tensors. `mine`: an error of this rank.
  absl::Status Extend(const std::vector<TensorSpec>& added, absl::Status mine);
  // COLLECTIVE. A transaction of values alone: from `source`, or `lent`, by tensor, where values can be lent.
  absl::StatusOr<StepReport> CommitValues(const std::string& what, absl::Status mine, v1::StepHeader header,
                                          const std::string& blob, const Values::Source& source,
                                          absl::FunctionRef<std::vector<model::LentTensor>()> lent);
  // Waits until all servers of the job answer.
  absl::Status AskAll();
  // Steps::Drop.
  absl::Status Drop();

  OpenJob job;
  Gradients gradients;
  Values values;
  Parameters parameters;
  Transactions transactions;
  Norms norms;
  Lending lending;
  std::unique_ptr<Keeper> keeper;  // on rank 0 of a job whose servers may change
};

}  // namespace ballast::client
