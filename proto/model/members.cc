#include "ballast/proto/model/members.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/model/table.h"

namespace ballast::model {
namespace {

using Answer = v1::GetJobResponse;

// Rule 20. A server that a table adds, but that never opened it, knows nothing of what was decided since.
bool Counts(const v1::Member& member, const Answer& answer) {
  return answer.disk() == member.disk() && !answer.state_lost() && Compare(answer.opened(), member.since()) >= 0;
}

// The answer of each member, null if none counts. Sorts members into `found`.
std::vector<const Answer*> Sort(const v1::Table& table, absl::Span<const Answer> answers, Found* found) {
  std::vector<const Answer*> of_member(static_cast<size_t>(table.members_size()), nullptr);
  for (uint32_t m = 0; m < of_member.size(); ++m) {
    const v1::Member& member = table.members(static_cast<int>(m));
    const auto answer = std::find_if(answers.begin(), answers.end(),
                                     [&](const Answer& a) { return a.server_id() == member.server_id(); });
    if (answer == answers.end()) {
      found->silent.push_back(m);
    } else if (answer->disk() != member.disk() || answer->state_lost()) {
      found->gone.push_back(m);
    } else if (Counts(member, *answer)) {
      found->counted.push_back(m);
      of_member[m] = &*answer;
    }
  }
  return of_member;
}

absl::Status Diverged(absl::string_view message) { return Error(absl::StatusCode::kDataLoss, kDiverged, message); }

bool SameKey(const v1::PreparedRecord& a, const v1::Decision& b) {
  return a.step() == b.step() && Compare(a.epoch(), b.epoch()) == 0 && a.attempt() == b.attempt() &&
         a.plan_hash() == b.plan_hash();
}

// The verdict needs the norm of every chunk with a gradient.
absl::Status CheckNorms(const Layout& layout, absl::Span<const Answer* const> counted) {
  absl::flat_hash_set<uint64_t> told;
  for (const Answer* answer : counted) {
    for (const v1::ChunkNorm& norm : answer->prepared().norms()) told.insert(norm.chunk());
  }
  const v1::PreparedRecord& record = counted.front()->prepared();
  const std::string& presence = record.header().gradient_presence();
  for (const Chunk& chunk : layout.chunks()) {
    const bool present = std::any_of(chunk.segments.begin(), chunk.segments.end(),
                                     [&](const Segment& segment) { return HasBit(presence, segment.tensor); });
    if (!present || told.contains(chunk.index)) continue;
    return Diverged(absl::StrCat("the servers that answered prepared step ", record.step(),
                                 ", and none of them tells the norm of chunk ", chunk.index,
                                 ": a server that had it is needed"));
  }
  return absl::OkStatus();
}

// Rule 22: the highest decided step, or the next one if all who count have prepared it. A server that is missing may
// have prepared it too, and the step may be acknowledged.
absl::Status ChooseBase(absl::Span<const Answer* const> counted, Found* found) {
  int64_t highest = -1;
  for (const Answer* answer : counted) highest = std::max(highest, answer->committed());
  bool lags = false;
  const Answer* at_highest = nullptr;
  std::vector<v1::PreparedRecord> prepared;  // of the step after
  size_t others = 0;
  for (const Answer* answer : counted) {
    if (answer->committed() == highest - 1) lags = true;
    if (answer->committed() != highest) continue;
    ++others;
    if (at_highest != nullptr && highest >= 0 && !SameDecision(at_highest->decision(), answer->decision())) {
      return Diverged(absl::StrCat("servers '", at_highest->server_id(), "' and '", answer->server_id(),
                                   "' decided step ", highest, " differently"));
    }
    at_highest = answer;
    if (answer->has_prepared() && answer->prepared().step() == highest + 1) prepared.push_back(answer->prepared());
  }
  found->base = highest;
  if (highest >= 0) found->decision = at_highest->decision();
  if (lags || prepared.size() != others) return absl::OkStatus();
  auto decision = Decide(prepared);
  if (!decision.ok()) return absl::OkStatus();  // the records are of several plans: nobody decided any
  found->base = highest + 1;
  found->decision = *std::move(decision);
  found->adopted = true;
  return absl::OkStatus();
}

// At the base, or one step before it with its prepared record?
bool AtBase(const Answer& answer, const Found& found) {
  if (answer.committed() == found.base) return true;
  return answer.committed() == found.base - 1 && answer.has_prepared() && found.decision.has_value() &&
         SameKey(answer.prepared(), *found.decision);
}

// A server says what it has, not what it lacks: it need not have opened the table that gives it the shard. A founder
// that has opened no table yet has what it holds.
bool HasFilled(const Answer& answer, uint32_t shard, bool holds) {
  return answer.has_filled_shards() ? HasBit(answer.filled_shards(), shard) : holds;
}

std::vector<uint64_t> StepsAtBase(const Answer& answer, const Found& found, const Layout& layout) {
  std::vector<uint64_t> steps(answer.tensor_steps().begin(), answer.tensor_steps().end());
  steps.resize(layout.tensors().size(), 0);
  if (answer.committed() < found.base) CountSteps(answer.prepared(), found.decision->verdict().skip(), &steps);
  return steps;
}

// Who has which shard filled, of those who count and are `at_base`.
void Fill(const v1::Table& table, absl::Span<const Answer* const> of_member,
          absl::FunctionRef<bool(const Answer&)> at_base, Found* found) {
  found->filled.resize(static_cast<size_t>(table.shards_size()));
  for (int s = 0; s < table.shards_size(); ++s) {
    const v1::Shard& shard = table.shards(s);
    std::vector<uint32_t>& filled = found->filled[s];
    for (const auto* places : {&shard.holders(), &shard.fillers()}) {
      for (const uint32_t m : *places) {
        if (of_member[m] == nullptr || !at_base(*of_member[m])) continue;
        if (HasFilled(*of_member[m], static_cast<uint32_t>(s), places == &shard.holders())) filled.push_back(m);
      }
    }
    std::sort(filled.begin(), filled.end());
    if (filled.empty()) found->uncovered.push_back(static_cast<uint32_t>(s));
  }
}

}  // namespace

absl::StatusOr<Found> FindBase(const v1::Table& table, const Layout& layout, absl::Span<const Answer> answers) {
  Found found;
  const std::vector<const Answer*> of_member = Sort(table, answers, &found);
  std::vector<const Answer*> counted;
  for (const uint32_t m : found.counted) counted.push_back(of_member[m]);
  if (!counted.empty()) BALLAST_RETURN_IF_ERROR(ChooseBase(counted, &found));
  Fill(
      table, of_member, [&](const Answer& answer) { return AtBase(answer, found); }, &found);
  if (!found.uncovered.empty()) return found;
  std::erase_if(counted, [&](const Answer* answer) { return !AtBase(*answer, found); });
  if (found.adopted) BALLAST_RETURN_IF_ERROR(CheckNorms(layout, counted));
  found.tensor_steps = StepsAtBase(*of_member[found.filled.front().front()], found, layout);
  return found;
}

Found FindFilled(const v1::Table& table, absl::Span<const Answer> answers) {
  Found found;
  const std::vector<const Answer*> of_member = Sort(table, answers, &found);
  Fill(
      table, of_member, [](const Answer&) { return true; }, &found);
  return found;
}

v1::Table NextTable(const v1::Table& now, const Found& found, const Wanted& wanted, const v1::Epoch& epoch) {
  std::vector<bool> counts(static_cast<size_t>(now.members_size()), false);
  std::vector<uint32_t> index(counts.size());
  for (uint32_t i = 0; i < found.counted.size(); ++i) {
    counts[found.counted[i]] = true;
    index[found.counted[i]] = i;
  }
  std::vector<std::vector<uint32_t>> filled = found.filled;
  for (std::vector<uint32_t>& members : filled) {
    for (uint32_t& member : members) member = index[member];
  }
  return NextTable(LeaveOut(now, counts), filled, wanted, epoch);
}

std::string ShowWait(const v1::Table& table, const Found& found) {
  if (found.enough()) return "";
  std::vector<bool> may(static_cast<size_t>(table.members_size()), false);
  for (const uint32_t s : found.uncovered) {
    for (const uint32_t m : table.shards(static_cast<int>(s)).holders()) may[m] = true;
  }
  std::string text = absl::StrCat(found.uncovered.size(), " of ", table.shards_size(),
                                  " shards have no copy on the servers that answered (the first is shard ",
                                  found.uncovered.front(), "); needed is");
  const char* separator = " ";
  for (uint32_t m = 0; m < may.size(); ++m) {
    if (!may[m]) continue;
    const bool gone = std::find(found.gone.begin(), found.gone.end(), m) != found.gone.end();
    absl::StrAppend(&text, separator, "'", table.members(static_cast<int>(m)).server_id(), "'",
                    gone ? " with the data directory that it had" : "");
    separator = " or ";
  }
  return text;
}

}  // namespace ballast::model
