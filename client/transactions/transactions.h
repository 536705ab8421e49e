// Runs a session's transactions: ranks agree, push, seal and decide.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "absl/time/clock.h"
#include "ballast/client/transactions/agreement.h"
#include "ballast/client/transactions/open_job.h"
#include "ballast/client/transfers/gradients.h"
#include "ballast/client/transfers/parameters.h"
#include "ballast/client/transfers/transaction.h"
#include "ballast/client/transfers/values.h"

namespace ballast::client {

class Transactions {
 public:
  // Borrows all.
  Transactions(OpenJob* job, Gradients* gradients, Values* values, const Parameters* parameters)
      : job_(job), gradients_(gradients), values_(values), parameters_(parameters), transaction_(&job->seat()) {}

  // COLLECTIVE. Exchanges `header` (with this rank's own presence) and blob. Makes sure that the servers have
  // everything that the agreed presence needs, values included if `source` is given. `mine`: this rank's error; if any
  // rank has one, all ranks return it.
  absl::StatusOr<Agreement> Settle(const std::string& what, absl::Status mine, v1::StepHeader header,
                                   const std::string& blob, const Values::Source* source);
  // COLLECTIVE. One transaction.
  absl::StatusOr<StepReport> Transact(const std::string& what, absl::Status mine, v1::StepHeader header,
                                      const std::string& blob, const Values::Source& source);
  // COLLECTIVE. The rest of a transaction, from the seal on. `blob`: this rank's blob of `agreed`.
  absl::StatusOr<StepReport> Conduct(const Agreement& agreed, const std::string& blob, const Values::Source& source);

  // This rank's last blob: transactions without a blob of their own seal it again.
  const std::string& sealed_blob() const { return sealed_blob_; }
  void Resume(const std::string& blob) { sealed_blob_ = blob; }

  // Returns whether all servers took the last decision before `deadline`.
  bool AwaitCommits(absl::Time deadline) { return transaction_.AwaitCommits(deadline); }
  void CommitAgain() { transaction_.CommitAgain(); }

  // Counts the time since `start` as spent on pushes.
  void CountPush(absl::Time start) { push_seconds_ += absl::ToDoubleSeconds(absl::Now() - start); }
  double push_seconds() const {
    return push_seconds_ + absl::ToDoubleSeconds(job_->router()->push_admissions().waited());
  }
  double seal_seconds() const { return seal_seconds_; }

 private:
  v1::SealRequest Offer(const std::string& what, v1::StepHeader header, const std::string& blob) const;
  // COLLECTIVE. Pushes zeros for this rank's slices of tensors that only other ranks pushed, and values from `source`.
  absl::Status PushRest(const std::string& what, const v1::StepHeader& agreed, absl::Status mine,
                        const Values::Source* source);
  absl::StatusOr<v1::Decision> Seal(const Agreement& agreed, const Values::Source& source);
  // Sends slices of the sealed step again that a server lacks. If a server refuses one, `refused` gets the last
  // refusal.
  absl::Status Resend(absl::Span<const OwnedSlice* const> missing, const v1::StepHeader& agreed,
                      const Values::Source& source, absl::Status* refused);
  absl::Status OutcomeUnknown(const absl::Status& why) const;
  // Where this rank's time went since the last decision, up to now.
  v1::TrainerTimes Spent() const;

  OpenJob* job_;
  Gradients* gradients_;
  Values* values_;
  const Parameters* parameters_;
  Transaction transaction_;
  std::string sealed_blob_;
  double push_seconds_ = 0;
  double seal_seconds_ = 0;
  // The time of the last decision, at first of the session's opening, and the seconds that this rank had been blocked
  // by then.
  struct {
    absl::Time at = absl::Now();
    double pull_seconds = 0, gather_seconds = 0, push_seconds = 0;
  } since_;
  v1::TrainerTimes spent_;  // Spent() when the present transaction began
};

}  // namespace ballast::client
