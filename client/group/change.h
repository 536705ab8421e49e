// How a group changes the servers of a job with a table, when it opens the job or while it trains: rules 19 to 24, 29
// and 31 of services/step/README.md. Who lost what it had, or does not answer, is left out; servers that are wanted and
// are no members join, and copy chunks while steps go on; who has copied all of its chunks holds them in the next
// epoch.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "ballast/client/discovery/job_key.h"
#include "ballast/client/group/choice.h"
#include "ballast/client/group/kept_room.h"
#include "ballast/client/group/members.h"
#include "ballast/client/group/sight.h"
#include "ballast/client/session_types.h"
#include "ballast/client/transport/router.h"
#include "ballast/proto/model/epoch_plan.h"
#include "ballast/proto/model/layout.h"
#include "ballast/proto/model/members.h"

namespace ballast::client {

// For rank 0. Calls come in this order: Look, maybe AskAhead, Claimed, Fence, Next; then, with the job open, Tell and
// DropLeft.
class Change {
 public:
  // Borrows all. `key`: as read. `reached`: the spares (Members::spares) that all ranks reach; others do not join.
  // `grace`: for answers of servers that are no members, once all members have answered. `plan`: of the group's last
  // Open, or null.
  Change(Router* router, Members* members, JobKey* key, const SessionOptions& options, std::set<std::string> reached,
         absl::Duration grace, std::shared_ptr<const model::EpochPlan> plan = nullptr)
      : router_(router),
        members_(members),
        key_(key),
        options_(options),
        grace_(grace),
        choice_(std::move(reached)),
        plan_(std::move(plan)) {}

  // Asks all servers for the job, and stops using those that do not answer, if others have all chunks. Members have
  // time until the deadline, since they answered a moment ago; other servers have no more than the constructor's grace.
  // The sight has the answers of servers that have this job, members or not. `spec`: of a job that no server has
  // opened. UNAVAILABLE (SERVER_DOWN): copies are missing. Otherwise errors of members, and of model::FindBase.
  absl::StatusOr<Sight> Look(const v1::JobSpec& spec, absl::Time deadline);
  // Whether the next table would differ, by what Look found. Copies that are complete wait for the others: each change
  // holds up a step, and a fence counts them in any case.
  bool IsNeeded() const;
  // Asks the servers for room for the next table, by what Look found, so that Next need not ask again if the fence
  // finds the same. `open`: as Next's. Servers that were to join and do not answer within `grace` do not join, and a
  // wish that finds no room is not heeded if nothing else is to be done: ask IsNeeded again. Other refusals are left to
  // Next.
  void AskAhead(v1::OpenRequest open, absl::Duration grace, absl::Time deadline);
  // After the claim, whose table it goes by: chooses who shall join, by the operator's wish, and stops using other
  // servers. FAILED_PRECONDITION (STALE_EPOCH) if another group made servers members that this one does not know.
  absl::Status Claimed(const v1::Epoch& epoch, absl::Time deadline);
  // Promises of all servers for the claimed epoch, which `group` will open. Errors as Look's.
  absl::Status Fence(const std::string& group, bool expect_empty, absl::Time deadline);
  // For people: what members answered instead of what they have, as ". Server 'a' says: ...". Empty: nothing.
  std::string ShowErrors() const;
  // Servers that are no members, and were done without since they did not answer.
  const std::vector<v1::Member>& absent() const { return choice_.absent(); }
  // Whether the operator's wish ends this membership at once.
  bool IsRemoved(const v1::Member& server) const { return choice_.IsRemoved(server); }
  // The operator's, as read by Look or Claimed.
  const v1::Wish& wish() const { return choice_.wish(); }
  // Not after there was no room for what it wants.
  bool heeds_wish() const { return choice_.heeds_wish(); }
  // What the fence found.
  const model::Found& found() const { return found_; }
  // The newest Open that a member has, or nullptr.
  const v1::OpenRequest* newest() const;

  // Of the table that was asked for last, at first the constructor's. After Next: of the table that Next returned.
  const std::shared_ptr<const model::EpochPlan>& plan() const { return plan_; }
  // Whether the server said that it has an Open with this one's spec, so that a brief Open is enough.
  bool HasSpec(const v1::Member& server, const v1::OpenRequest& open) const;

  // The next table. Asks the servers of the next table whether they have room. One that has none does not join, or
  // the wish is not heeded, or no new copies are made: a line says so. `open`: of the claimed epoch, complete but for
  // the table.
  absl::StatusOr<v1::Table> Next(v1::OpenRequest open, absl::Time deadline);
  // Whether a server joins by `next`.
  bool Joins(const v1::Table& next) const;
  // A member of `next` did not answer its Open. If it joins by that table, it is absent.
  void NoteUnopened(const v1::Member& member);
  // A line for each server that joined, copies, or left.
  void Tell(const v1::Table& next) const;
  // Has servers that are reached and are not in `next` drop what they have of the job. A line says where that failed.
  void DropLeft(const v1::Table& next);

 private:
  using Response = std::optional<absl::StatusOr<v1::GetJobResponse>>;
  // As Answers::Await.
  using Await = std::function<std::vector<Response>(const std::vector<bool>& needed, absl::Time until)>;
  struct Refusal {
    std::string server_id;
    absl::Status status;
  };

  // Whether all members have answered, or failed.
  absl::StatusOr<bool> Take(const std::vector<Response>& responses);
  absl::Status Find();
  absl::StatusOr<model::Found> FindBy(const model::Layout& layout, absl::Span<const v1::GetJobResponse> answers) const;
  // By the answers of those alone whom the wish does not remove. False: they are not enough, or it removes nobody.
  bool FindWithoutRemoved(const model::Layout& layout);
  // Of the newest Open, or of the spec of a job that no server has opened. Valid until the next call.
  absl::StatusOr<const model::Layout*> FindLayout() const;
  void ExcludeRemoved();
  // Spares that have an earlier job of the name are of no use, and a later promise would keep the group out.
  void ExcludeOtherJobs();
  absl::Status CheckFailed(const v1::Member& server, const absl::Status& status);
  absl::Status Gather(const Await& await, absl::Time deadline);
  absl::Status NotEnough() const;
  absl::Status ReadWish(absl::Time deadline);
  const v1::Table& now() const { return choice_.now(); }
  // For Choice. Borrows `servers`.
  KnownServers Known(const std::vector<v1::Member>& servers) const;
  v1::Table Plan() const;
  absl::Status MakePlan(const v1::OpenRequest& open);
  KeptNeed KeptIn(const v1::Table& next) const { return KeptToCopy(now(), found_, next, answers_); }
  // Room for this, and for what Next would take of kept versions.
  bool HasRoom(const v1::Table& next) const;
  // Who is no member has `grace`, once all members have answered.
  absl::StatusOr<std::vector<Refusal>> AskForSpace(const v1::OpenRequest& open, absl::Duration grace,
                                                   absl::Time deadline);
  // Of a server that was to join and did not answer.
  bool IsAbsent(const Refusal& refusal) const;
  void DoWithout(const std::string& server_id);
  bool IsNeededWithoutWish();
  bool GiveWay(const std::vector<Refusal>& refusals);
  bool GiveWay(const Refusal& refusal);
  void Report(const std::string& line) const;

  Router* const router_;
  Members* const members_;
  JobKey* const key_;
  const SessionOptions& options_;
  const absl::Duration grace_;
  Choice choice_;  // its table is the key's

  // Made anew where the spec is another one: for 100,000 chunks that takes a tenth of a second.
  std::shared_ptr<const model::EpochPlan> plan_;
  mutable model::Layout layout_;
  v1::Epoch epoch_;   // claimed
  v1::JobSpec spec_;  // of a job that no server has opened
  bool fences_ = false;
  std::vector<v1::GetJobResponse> answers_;
  std::vector<std::string> errors_;  // of members, in what was gathered last
  model::Found found_;
  bool removes_ = false;     // by what was found last, nobody needs those whom the wish removes
  std::string not_removed_;  // or why somebody does
  // What the servers said before the claim that they have room for.
  struct Room {
    v1::Table table;  // without epochs
    KeptNeed kept;
  };
  std::optional<Room> has_room_;
};

}  // namespace ballast::client
