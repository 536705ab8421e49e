// What a group finds when it looks at a job with a table, and when it fences it: which answers count, whether they are
// enough, and from which step the job goes on. services/step/README.md has the rules.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "ballast/proto/model/layout.h"
#include "ballast/proto/model/next_table.h"
#include "ballast/proto/model/verdict.h"
#include "ballast/v1/state_service.pb.h"

namespace ballast::model {

// Rules 20 to 22, from the answers that there are. Members are indices into the table's members, ascending.
struct Found {
  std::vector<uint32_t> counted;  // answers that count
  std::vector<uint32_t> silent;   // no answer: wait for them until failover_after
  std::vector<uint32_t> gone;     // another disk answers under the name, or a server that lost its state
  // Of each shard: the members that count, are at the base, and have it filled.
  std::vector<std::vector<uint32_t>> filled;
  // Shards that nobody has filled. Not empty: wait for more answers.
  std::vector<uint32_t> uncovered;
  // The next is known once no shard is uncovered.
  int64_t base = -1;
  std::optional<v1::Decision> decision;  // of the base; empty at -1
  std::vector<uint64_t> tensor_steps;    // at the base
  // The base is a step that all who count have prepared and nobody has committed.
  bool adopted = false;

  // No shard lacks a copy, so the job may go on without those who are silent.
  bool enough() const { return uncovered.empty() && !counted.empty(); }
};

// An answer counts as a member's if it comes from the member's disk, the server has its state, and its newest Open is
// of Member.since or later. `layout`: of the spec that the newest Open has. DATA_LOSS (DIVERGED): members decided a
// step differently, or nobody tells the norm of a chunk of the step to adopt.
absl::StatusOr<Found> FindBase(const v1::Table& table, const Layout& layout,
                               absl::Span<const v1::GetJobResponse> answers);
// As FindBase, from answers to GetJob before a fence. Servers at work answer amid steps, each at another moment, so
// their steps are not compared, and the base is not looked for: only the fence says who lags behind.
Found FindFilled(const v1::Table& table, absl::Span<const v1::GetJobResponse> answers);

// Rule 23 by what a fence found. Who does not count is a member no more: if it is wanted, it joins and fills. REQUIRES:
// found is of `now`, and enough.
v1::Table NextTable(const v1::Table& now, const Found& found, const Wanted& wanted, const v1::Epoch& epoch);

// For people: which shards lack a copy, and who may have one. Empty if enough.
std::string ShowWait(const v1::Table& table, const Found& found);

}  // namespace ballast::model
