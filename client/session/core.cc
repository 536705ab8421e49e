#include "ballast/client/session/core.h"

#include <algorithm>
#include <utility>

#include "absl/time/clock.h"
#include "ballast/client/group/joining.h"
#include "ballast/client/transport/call_all.h"

namespace ballast::client {
namespace {

// How long an ending session waits for servers to take the last decision. Without the wait no step is lost (the next
// fence settles it), but a clean end leaves nothing to settle.
constexpr absl::Duration kFarewell = absl::Seconds(10);

}  // namespace

SessionCore::SessionCore(const SessionOptions& options, std::vector<std::unique_ptr<Transport>> servers,
                         Collective* collective)
    : job(options, std::move(servers), collective),
      gradients(&job.seat()),
      values(&job.seat()),
      parameters(&job.seat(), job.group()),
      transactions(&job, &gradients, &values, &parameters),
      norms(&job, &gradients, &transactions),
      lending(&job, &values, &transactions) {}

// The router goes first: it cancels calls under way, so that no further member waits for servers.
SessionCore::~SessionCore() {
  // The last step's update may wait for one, and the commits for that update.
  parameters.leases().EndAll();
  if (job.ended().ok()) {
    (void)transactions.AwaitCommits(absl::Now() + std::min(kFarewell, job.options().step_timeout));
  }
  lending.End();
  keeper.reset();
  job.Disconnect();
}

absl::Status SessionCore::Adopt(const std::shared_ptr<const v1::OpenRequest>& open) {
  BALLAST_RETURN_IF_ERROR(job.Adopt(open));
  gradients.Resize();
  norms.Forget();
  return absl::OkStatus();
}

absl::Status SessionCore::StartKeeper() {
  if (job.group()->rank() != 0 || !job.router()->routes()->may_change()) return absl::OkStatus();
  keeper = std::make_unique<Keeper>(job.options(), job.router());
  return keeper->made();
}

absl::Status SessionCore::AskAll() {
  v1::GetJobRequest ask;
  ask.set_job(job.seat().job);
  ask.set_without_open(true);
  return CallAll<v1::GetJobRequest, v1::GetJobResponse>(job.router(), &Transport::GetJob, "GetJob", ask,
                                                        job.seat().Deadline())
      .status();
}

absl::Status SessionCore::Extend(const std::vector<TensorSpec>& added, absl::Status mine) {
  // The servers may drop working copies, and would wait.
  if (!parameters.leases().empty()) mine.Update(Precondition("give all leases back before Register"));
  parameters.Forget();
  if (keeper != nullptr) (void)AskAll();  // so that a server that is silent is left out first
  const Keeper::Pause pause(keeper.get());
  auto open = Opening(job.router(), job.group(), job.options().split)
                  .Extend(job.router()->routes()->open(), job.seat().version, added, mine, job.options().step_timeout);
  if (absl::IsAborted(open.status())) job.End(open.status());
  if (!open.ok()) return job.Conclude(open.status());
  return Adopt(*open);
}

absl::StatusOr<StepReport> SessionCore::CommitValues(const std::string& what, absl::Status mine, v1::StepHeader header,
                                                     const std::string& blob, const Values::Source& source,
                                                     absl::FunctionRef<std::vector<model::LentTensor>()> lent) {
  const bool lends = mine.ok() && lending.of_values();
  if (lends) mine = lending.Lend(lent());
  auto report = transactions.Transact(what, std::move(mine), std::move(header), blob, source);
  if (!lends) return report;
  const absl::Status applied = report.ok() ? lending.AwaitApplied() : Drop();
  return report.ok() && !applied.ok() ? applied : report;
}

absl::Status SessionCore::Drop() {
  lending.End();
  BALLAST_RETURN_IF_ERROR(job.Usable());
  gradients.TakeBack();
  gradients.Forget();
  job.NextAttempt();
  return absl::OkStatus();
}

}  // namespace ballast::client
