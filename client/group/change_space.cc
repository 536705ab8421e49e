// Whether servers have room for the chunks of the next table, and what gives way if not.
#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "ballast/client/group/change.h"
#include "ballast/client/group/opens.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/model/brief_open.h"
#include "ballast/proto/model/epoch_plan.h"

namespace ballast::client {
namespace {

// The server says that it cannot take the chunks, not that something is wrong.
bool IsRefusal(const absl::Status& status) {
  return absl::IsResourceExhausted(status) || absl::IsUnimplemented(status);
}

// Who needs room for what does not depend on them.
v1::Table WithoutEpochs(v1::Table table) {
  for (v1::Member& member : *table.mutable_members()) member.clear_since();
  table.clear_last_fill();
  return table;
}

}  // namespace

bool Change::HasSpec(const v1::Member& server, const v1::OpenRequest& open) const {
  if (open.spec_digest().empty() || open.group().empty()) return false;
  const std::string tiling = open.tiling().SerializeAsString();
  return std::any_of(answers_.begin(), answers_.end(), [&](const v1::GetJobResponse& answer) {
    return answer.server_id() == server.server_id() && answer.disk() == server.disk() &&
           answer.open().spec_digest() == open.spec_digest() && answer.open().tiling().SerializeAsString() == tiling;
  });
}

absl::Status Change::MakePlan(const v1::OpenRequest& open) {
  BALLAST_ASSIGN_OR_RETURN(model::EpochPlan plan, model::EpochPlan::Make(open, plan_.get()));
  plan_ = std::make_shared<const model::EpochPlan>(std::move(plan));
  return absl::OkStatus();
}

absl::StatusOr<std::vector<Change::Refusal>> Change::AskForSpace(const v1::OpenRequest& open, absl::Duration grace,
                                                                 absl::Time deadline) {
  BALLAST_RETURN_IF_ERROR(MakePlan(open));
  const std::vector<std::string> ids = members_->ids();
  std::vector<OpenTo> servers;
  bool all_have_spec = true;
  for (const v1::Member& member : open.table().members()) {
    const auto place = std::find(ids.begin(), ids.end(), member.server_id()) - ids.begin();
    servers.push_back({static_cast<uint32_t>(place), HasSpec(member, open), choice_.IsMember(member)});
    all_have_spec = all_have_spec && servers.back().briefly;
  }
  const auto request = std::make_shared<v1::OpenRequest>(all_have_spec ? model::MakeBrief(open) : plan_->open());
  request->set_dry_run(true);
  const auto answers =
      SendOpenTo(router_, absl::StrCat("Space for job '", options_.job, "'"), request, servers, deadline, grace);
  const KeptNeed kept = KeptIn(open.table());
  const std::vector<std::string> counted = choice_.Counted(found_);
  const bool by_wish = choice_.HeedsForOthers();
  std::vector<Refusal> refusals;
  for (size_t m = 0; m < servers.size(); ++m) {
    const std::string& id = open.table().members(static_cast<int>(m)).server_id();
    // Who only makes up for a lost server copies as far as there is room: better some second copies than none.
    const bool fills_up = !by_wish && absl::c_linear_search(counted, id);
    const absl::Status room = !answers[m].ok() ? answers[m].status()
                              : fills_up       ? absl::OkStatus()
                                               : CheckKeptRoom(id, kept.bytes[m], kept.versions, *answers[m]);
    if (!room.ok()) refusals.push_back({id, room});
  }
  return refusals;
}

bool Change::IsAbsent(const Refusal& refusal) const {
  return IsSilence(refusal.status) && !absl::c_linear_search(choice_.Counted(found_), refusal.server_id);
}

// Nor is it told to drop anything.
void Change::DoWithout(const std::string& server_id) {
  for (const v1::Member& server : members_->all()) {
    if (server.server_id() == server_id) choice_.NoteAbsent(server);
  }
  choice_.Exclude(server_id);
  members_->LeaveOut(server_id);
}

// What to do without, so that the job can open all the same; false: nothing is left.
bool Change::GiveWay(const Refusal& refusal) {
  // The rest of a wish for it is heeded, and the server may join later.
  if (IsAbsent(refusal)) {
    Report(absl::StrCat("server '", refusal.server_id, "' does not join yet: ", refusal.status.message()));
    DoWithout(refusal.server_id);
    return true;
  }
  const bool counts = absl::c_linear_search(choice_.Counted(found_), refusal.server_id);
  if (counts && !IsRefusal(refusal.status)) return false;
  const std::optional<std::string> line = choice_.GiveWay(refusal.server_id, found_, refusal.status.message());
  if (line.has_value()) Report(*line);
  return line.has_value();
}

bool Change::GiveWay(const std::vector<Refusal>& refusals) {
  // One that does not join may make room needless elsewhere.
  const std::vector<std::string> counted = choice_.Counted(found_);
  const auto joins = std::find_if(refusals.begin(), refusals.end(),
                                  [&](const Refusal& one) { return !absl::c_linear_search(counted, one.server_id); });
  return GiveWay(joins == refusals.end() ? refusals.front() : *joins);
}

void Change::AskAhead(v1::OpenRequest open, absl::Duration grace, absl::Time deadline) {
  for (bool again = true; again;) {
    *open.mutable_table() = Plan();
    const absl::StatusOr<std::vector<Refusal>> refusals = AskForSpace(open, grace, deadline);
    if (!refusals.ok()) return;
    if (refusals->empty()) has_room_ = {WithoutEpochs(open.table()), KeptIn(open.table())};
    again = false;
    for (const Refusal& refusal : *refusals) {
      if (!IsAbsent(refusal)) continue;
      DoWithout(refusal.server_id);
      again = true;
    }
    // A wish for which there is no room costs no step.
    if (!again && !refusals->empty() && !IsNeededWithoutWish()) again = GiveWay(*refusals);
  }
}

bool Change::IsNeededWithoutWish() {
  const bool heeds = choice_.HeedWish(false);
  const bool needed = IsNeeded();
  choice_.HeedWish(heeds);
  return needed;
}

// A version may have been kept in the meantime.
bool Change::HasRoom(const v1::Table& next) const {
  if (!has_room_.has_value() || !model::SameTable(WithoutEpochs(next), has_room_->table)) return false;
  const std::vector<uint64_t> bytes = KeptIn(next).bytes;
  return std::equal(bytes.begin(), bytes.end(), has_room_->kept.bytes.begin(), has_room_->kept.bytes.end(),
                    std::less_equal<>());
}

absl::StatusOr<v1::Table> Change::Next(v1::OpenRequest open, absl::Time deadline) {
  for (;;) {
    v1::Table next = Plan();
    *open.mutable_table() = next;
    if (HasRoom(next)) {
      BALLAST_RETURN_IF_ERROR(MakePlan(open));
      return next;
    }
    BALLAST_ASSIGN_OR_RETURN(const std::vector<Refusal> refusals, AskForSpace(open, grace_, deadline));
    if (refusals.empty()) return next;
    if (!GiveWay(refusals)) return refusals.front().status;
  }
}

}  // namespace ballast::client
