// The end of a step: seal on every server, decide from all prepared records, spread the decision
// (services/step/README.md, rules 5-8).
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "ballast/client/transfers/seat.h"
#include "ballast/client/transport/tally.h"

namespace ballast::client {

class Transaction {
 public:
  // Sends again this rank's slices that a server misses.
  using Resend = std::function<absl::Status(absl::Span<const OwnedSlice* const>)>;

  // Borrows `seat`.
  explicit Transaction(const Seat* seat) : seat_(seat), commits_(std::make_shared<Tally>()) {}

  // Seals this rank's `request` on all servers until all are prepared, and returns the decision, which is then final.
  // If the job's servers change before the step is decided, it seals again on the new servers.
  // Blocks until `deadline`. After an error the outcome is unknown. DEADLINE_EXCEEDED (RANK_MISSING) names ranks that
  // have not sealed, or the first slice that has not come. SERVER_DOWN: a server did not answer, or still waits for its
  // disk. Other errors: the servers', such as FAILED_PRECONDITION, and those of `resend`.
  absl::StatusOr<v1::Decision> SealAndDecide(const v1::SealRequest& request, absl::Time deadline, const Resend& resend);

  // Sends the decision to all servers; does not wait. The router keeps it, and sends it again to servers that say
  // BEHIND.
  void Commit(const v1::Decision& decision);
  // Sends the last decision again, if any: a restarted server may have forgotten it.
  void CommitAgain();
  // Returns whether all servers took the last Commit before `deadline`.
  bool AwaitCommits(absl::Time deadline) { return commits_->WaitUntil(deadline); }

 private:
  struct Answers;

  struct Sealing;

  // One round: with the servers that the job has now. ABORTED (kRoutesChanged): the job's servers have changed
  // meanwhile.
  absl::StatusOr<v1::Decision> SealOn(const std::shared_ptr<const Routes>& routes,
                                      const std::shared_ptr<const v1::SealRequest>& seal, absl::Time deadline,
                                      const Resend& resend);
  // `server`: index into the servers of `sealing.routes`.
  void Send(const Sealing& sealing, uint32_t server);
  absl::Status SendMissing(const v1::SealResponse::Pending& pending, const Sealing& sealing, uint32_t server,
                           const Resend& resend) const;
  // Rank 0, where chunks have copies: compares the digests that came with the prepared answers, for the next Commit.
  void Compare(const Routes& routes, absl::Span<const v1::PreparedRecord> records,
               absl::Span<const v1::SealResponse> told);
  absl::Status Late(const Transport& server, int64_t step, const v1::SealResponse::Pending& pending) const;

  const Seat* seat_;
  std::shared_ptr<Tally> commits_;
  std::optional<v1::Decision> decision_;  // the last
  // Differing copies that the next Commit reports, by server. A server hears only of chunks that it holds.
  std::map<const Transport*, std::vector<v1::DifferingCopies>> differing_;
};

}  // namespace ballast::client
