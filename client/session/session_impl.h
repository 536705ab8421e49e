// The parts of a session and their shared state. Internal to session*.cc.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "ballast/client/group/group.h"
#include "ballast/client/group/job_spec.h"
#include "ballast/client/group/joining.h"
#include "ballast/client/session.h"
#include "ballast/client/transfers/gradients.h"
#include "ballast/client/transfers/parameters.h"
#include "ballast/client/transfers/seat.h"
#include "ballast/client/transfers/transaction.h"
#include "ballast/client/transfers/values.h"
#include "ballast/client/transport/router.h"
#include "ballast/proto/model/status.h"

namespace ballast::client {

inline absl::Status Precondition(absl::string_view message) {
  return model::Error(absl::StatusCode::kFailedPrecondition, model::kBadRequest, message);
}

struct Session::Impl {
  Impl(const SessionOptions& options, std::vector<std::unique_ptr<Transport>> servers, Collective* collective);
  ~Impl();

  // Whether this is a forked child: the loan then belongs to the parent.
  bool forked() const;
  void EndLoan() {
    if (forked()) return;
    // A decided step must be applied from lent memory, not from copies.
    if (loan != nullptr) (void)transaction.AwaitCommits(seat.Deadline());
    loan.reset();
    values.EndLoan();
  }
  // One rank, and one server in this process that takes loans; lends_values: loans of values and gradients, too.
  bool takes_loans() const;
  bool lends_values() const;
  // Lends written values too, if loans of values are possible.
  absl::Status Lend(std::vector<model::LentTensor> tensors);
  absl::Status AwaitApplied();
  absl::Status Await(std::optional<uint32_t> unit);  // until all lent parameters, or the unit's, are at seat.version
  // OK, or the reason why no call is possible: forked, finished.
  absl::Status Usable() const;
  // Usable, the job is initialised and `unit` exists.
  absl::Status CheckReadable(uint32_t unit) const;
  // CheckReadable, and all tensors of the unit have values.
  absl::Status CheckHasValues(uint32_t unit) const;
  // BAD_DTYPE if elements of this size cannot be `what`.
  static absl::Status CheckElement(const char* what, kernels::Dtype dtype, uint64_t element_bytes);
  UnitLease Lease(Session* session, uint32_t unit, std::unique_ptr<UnitBuffer> buffer) const;
  absl::Status PullOwned(uint32_t unit, absl::Span<std::byte> to, uint64_t element_bytes);
  absl::Status Push(uint32_t unit, absl::Span<const std::byte> gradient, uint64_t element_bytes,
                    absl::Span<const std::string> absent);
  // Returns `status`, and remembers a status that ends the session.
  absl::Status Conclude(absl::Status status);

  // Takes over the plan implied by `open`.
  absl::Status Adopt(const std::shared_ptr<const v1::OpenRequest>& open);

  // A step as all ranks are about to seal it, or to ask norms of it.
  struct Agreement {
    v1::StepHeader header;  // with everybody's presence
    std::vector<std::string> blobs;
  };
  // COLLECTIVE. Exchanges `header` (presence: this rank's own) and blob. Makes sure that the servers have everything
  // needed for the agreed presence, values included if `source` is given. `mine`: an error of this rank, which all
  // ranks then return.
  absl::StatusOr<Agreement> Settle(const std::string& what, absl::Status mine, v1::StepHeader header,
                                   const std::string& blob, const Values::Source* source);
  // Tensors lie where their placements say, so ranks may have different ones. With kRows a rank may have no row.
  bool places() const { return options.split != Split::kEven; }
  // PLAN_MISMATCH if another rank has written a tensor that this rank has and has not written.
  absl::Status CheckWritten(const v1::StepHeader& own, const v1::StepHeader& agreed) const;
  // COLLECTIVE. One transaction.
  absl::StatusOr<StepReport> Transact(const std::string& what, absl::Status mine, v1::StepHeader header,
                                      const std::string& blob, const Values::Source& source);
  // COLLECTIVE. The rest of a transaction, from the seal on. `blob`: this rank's blob of `agreed`.
  absl::StatusOr<StepReport> Conduct(const Agreement& agreed, const std::string& blob, const Values::Source& source);
  // Asks all servers, by this rank alone; returns the versions that all keep.
  absl::StatusOr<Pins> AskCommonPins();
  // Asks all servers about a kept version, by this rank alone.
  absl::StatusOr<v1::PinResponse> AskPin(int64_t pinned);
  // COLLECTIVE. The transaction that restores a version, the first of its epoch.
  absl::StatusOr<StepReport> BringBack(int64_t pinned, const v1::PinResponse& pin);
  // COLLECTIVE. After an Open that found state lost.
  absl::Status GoBack(int64_t pinned);
  // Where this rank's time went since the last decision, up to now.
  v1::TrainerTimes Spent() const;
  absl::StatusOr<v1::Decision> SealAgreed(const Agreement& agreed, absl::Time deadline, const Values::Source& source);
  // Asks all servers for norms, by this rank alone.
  absl::StatusOr<v1::NormResponse> AskNorms(const std::string& presence);
  // COLLECTIVE. Norms of all servers' chunks, in chunk order.
  absl::StatusOr<const std::vector<v1::ChunkNorm>*> Norms(const std::string& what, absl::Status mine);

  SessionOptions options;
  const uint64_t forks;  // in this process's ancestry when the session was opened
  std::unique_ptr<Router> router;
  Group group;
  Seat seat;
  Gradients gradients;
  Values values;
  Parameters parameters;
  Transaction transaction;
  std::shared_ptr<const v1::OpenRequest> open;
  std::vector<uint32_t> without_values;  // tensors
  std::vector<std::string> resumed_blobs;
  int64_t restored_version = -1;
  std::string sealed_blob;  // this rank's last one: transactions without a blob of their own seal it again
  std::map<int64_t, std::vector<uint64_t>> pinned_steps;  // step counts by tensor, of versions pinned by this rank
  // Step counts by tensor from the servers' last answer, which has all tensors' while callers ask for single ones.
  struct {
    int64_t version = -2;
    std::vector<uint64_t> steps;
  } steps_cache;
  std::unique_ptr<model::Loan> loan;  // for the step in the making, or for the last one
  absl::Status finished;
  double push_seconds = 0;
  double seal_seconds = 0;
  // When the last step was decided, or the session opened, and the blocked seconds until then.
  struct {
    absl::Time at = absl::Now();
    double pull_seconds = 0, gather_seconds = 0, push_seconds = 0;
  } since;
  v1::TrainerTimes spent;  // up to the exchange before the seal in the making

  // Norms never change within an attempt for the same presence.
  struct {
    int64_t version = -2;
    uint64_t attempt = 0;
    std::string presence;
    std::vector<v1::ChunkNorm> norms;
  } norm_cache;
};

}  // namespace ballast::client
