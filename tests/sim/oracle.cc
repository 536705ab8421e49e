#include "ballast/tests/sim/oracle.h"

#include <algorithm>
#include <iterator>

#include "absl/strings/str_cat.h"
#include "ballast/tests/sim/random.h"

namespace ballast::sim {
namespace {

std::string Show(const v1::Decision& d) {
  const std::string verdict =
      d.verdict().skip() ? std::string("skip") : absl::StrCat("factor bits ", d.verdict().factor_bits());
  return absl::StrCat("step ", d.step(), " of epoch ", d.epoch().counter(), ".", d.epoch().nonce() % 1000, ", attempt ",
                      d.attempt(), ", ", verdict);
}

bool Same(const v1::Decision& a, const v1::Decision& b) {
  return a.step() == b.step() && model::Compare(a.epoch(), b.epoch()) == 0 && a.attempt() == b.attempt() &&
         a.plan_hash() == b.plan_hash() && a.verdict().skip() == b.verdict().skip() &&
         a.verdict().norm() == b.verdict().norm() && a.verdict().factor_bits() == b.verdict().factor_bits();
}

}  // namespace

uint64_t Evolve(uint64_t state, int64_t step) { return Mix(state, static_cast<uint64_t>(step)); }

bool Changes(const model::EpochPlan& plan, int server, const v1::StepHeader& header) {
  return std::any_of(plan.slices().begin(), plan.slices().end(), [&](const model::Slice& slice) {
    return plan.holders_of(slice.chunk)[0] == static_cast<uint32_t>(server) &&
           (plan.Touches(slice, header.gradient_presence()) || plan.Touches(slice, header.value_presence()));
  });
}

void Oracle::Broken(const std::string& what) {
  if (violation_.empty()) violation_ = what;
}

bool Oracle::Explains(const Author& author, const v1::Decision& decision) const {
  const GroupIntent& group = *author.group;
  const int64_t step = decision.step();
  if (model::Compare(group.epoch, decision.epoch()) != 0 || group.Mismatched(step)) return false;
  if (group.FinalAttempt(step) != decision.attempt() || group.Hash(step, 0) != decision.plan_hash()) return false;
  const v1::StepHeader header = group.Header(step, 0);
  const model::EpochPlan& plan = PlanOf(group.world_size);
  std::vector<v1::ChunkNorm> norms;
  bool overflow = false;
  for (const model::Chunk& chunk : plan.layout().chunks()) {
    norms.push_back(NormOf(plan, chunk.index, header.gradient_presence(), [&](const model::Slice& slice) {
      return group.Digest(step, decision.attempt(), v1::SLICE_KIND_GRADIENT, slice, author.life[slice.rank]);
    }));
    overflow = overflow || norms.back().overflow();
  }
  std::vector<const v1::ChunkNorm*> pointers;
  for (const v1::ChunkNorm& norm : norms) pointers.push_back(&norm);
  const v1::Verdict verdict = model::MakeVerdict(header, *model::GlobalSquaredNorm(pointers), overflow);
  return verdict.skip() == decision.verdict().skip() && verdict.norm() == decision.verdict().norm() &&
         verdict.factor_bits() == decision.verdict().factor_bits();
}

void Oracle::Settle(const v1::Decision& decision, const std::string& who) {
  Step step;
  step.decision = decision;
  for (const GroupIntent* group : groups_) {
    for (uint32_t lives = 0; lives < lives_ * lives_; ++lives) {
      const Author author{group, {lives % lives_, lives / lives_}};
      if (Explains(author, decision)) step.authors.push_back(author);
    }
  }
  if (step.authors.empty()) {
    return Broken(absl::StrCat(who, " takes for decided what no group pushed and sealed: ", Show(decision)));
  }
  step.tensor_steps.assign(PlanOf(1).layout().tensors().size(), 0);
  const auto older = steps_.lower_bound(decision.step());
  const Step before = older == steps_.begin() ? Step() : std::prev(older)->second;
  const bool newest = older == steps_.end();
  if (older != steps_.begin()) step.tensor_steps = before.tensor_steps;
  const v1::StepHeader header = step.authors.front().group->Header(decision.step(), 0);
  if (decision.verdict().skip()) ++skipped_;
  for (uint32_t tensor = 0; tensor < step.tensor_steps.size() && !decision.verdict().skip(); ++tensor) {
    if (model::HasBit(header.gradient_presence(), tensor)) ++step.tensor_steps[tensor];
    if (header.value_tensor_steps_size() > 0 && model::HasBit(header.value_presence(), tensor)) {
      step.tensor_steps[tensor] = header.value_tensor_steps(static_cast<int>(tensor));
    }
  }
  for (int server = 0; server < kServers; ++server) {
    const bool changes =
        !decision.verdict().skip() && Changes(PlanOf(step.authors.front().group->world_size), server, header);
    step.states[server] = changes ? Evolve(before.states[server], decision.step()) : before.states[server];
  }
  const bool restore = header.kind() == v1::STEP_KIND_RESTORE;
  if ((older == steps_.begin() ? -1 : std::prev(older)->first) != decision.step() - 1 && !restore) {
    return Broken(absl::StrCat(who, " decides ", Show(decision), " after step ", last_decided()));
  }
  if (const auto interval = static_cast<int64_t>(PinInterval()); interval > 0 && newest) {
    // No step waits until the restored version is pinned anew on all servers, so the floor may sink.
    floor_ = restore ? std::min(floor_, header.restored_version()) : due_;
    if (restore) due_ = header.restored_version();
    if (decision.step() % interval == 0) due_ = decision.step();
  }
  if (restore) {
    const Step& restored = steps_.at(header.restored_version());
    step.tensor_steps = restored.tensor_steps;
    std::copy(restored.states, restored.states + kServers, step.states);
  }
  steps_[decision.step()] = std::move(step);
}

void Oracle::CheckState(int server, int64_t step, uint64_t state) {
  const auto found = steps_.find(step);
  if (!violation_.empty() || found == steps_.end() || found->second.states[server] == state) return;
  Broken(absl::StrCat("server ", server, " has other state at step ", step, " than that step's transactions make"));
}

void Oracle::Decided(const v1::Decision& decision, const std::string& who) {
  const bool known = steps_.contains(decision.step());
  // A rank that comes late may report a decided step unknown to a newer group when it began beyond this step.
  const auto newer = steps_.upper_bound(decision.step());
  const bool late = newer == steps_.end() || model::Compare(newer->second.decision.epoch(), decision.epoch()) > 0;
  if (decision.step() < 0 || (!known && !late)) {
    return Broken(absl::StrCat(who, " decides ", Show(decision), " after step ", last_decided()));
  }
  if (!known) Settle(decision, who);
  if (!violation_.empty()) return;
  const Step& step = steps_.at(decision.step());
  if (!Same(step.decision, decision)) {
    return Broken(absl::StrCat("two verdicts: ", Show(step.decision), "; ", who, " has ", Show(decision)));
  }
  const std::vector<std::string> sealed = step.authors.front().group->Blobs(decision.step());
  if (!std::equal(sealed.begin(), sealed.end(), decision.blobs().begin(), decision.blobs().end())) {
    Broken(absl::StrCat(who, " has other blobs for ", Show(decision), " than were sealed"));
  }
}

void Oracle::Acknowledged(const v1::Decision& decision, const std::string& who) {
  Decided(decision, who);
  acknowledged_ = std::max(acknowledged_, decision.step());
}

void Oracle::StartedFrom(int64_t base, const v1::Epoch& epoch, const std::string& who) {
  if (base >= acknowledged_) return;
  // A fenced group need not know the decisions of a newer group: every server refuses the fenced group's Open.
  if (model::Compare(steps_.upper_bound(base)->second.decision.epoch(), epoch) > 0) return;
  Broken(absl::StrCat(who, " starts from step ", base, " although step ", acknowledged_, " was acknowledged"));
}

void Oracle::StartsAnew(int64_t restored, const v1::Epoch& epoch, const std::string& who) {
  if (restored >= floor_ && steps_.contains(restored)) return;
  if (!steps_.empty() && model::Compare(steps_.rbegin()->second.decision.epoch(), epoch) > 0) return;
  Broken(absl::StrCat(who, " goes back to version ", restored, " although all servers have pinned ", floor_));
}

void Oracle::GivenUp(int64_t version) {
  if (version == due_) due_ = -1;
  if (version <= floor_) floor_ = -1;
}

void Oracle::Applied(int server, const v1::Decision& decision, absl::Span<const Consumed> consumed) {
  Decided(decision, absl::StrCat("server ", server));
  if (!violation_.empty()) return;
  Step& step = steps_.at(decision.step());
  const auto pushed_it_all = [&](const Author& author) {
    return std::all_of(consumed.begin(), consumed.end(), [&](const Consumed& c) {
      return c.digest ==
             author.group->Digest(decision.step(), decision.attempt(), c.kind, c.slice, author.life[c.slice.rank]);
    });
  };
  std::erase_if(step.authors, [&](const Author& author) { return !pushed_it_all(author); });
  if (step.authors.empty()) {
    Broken(absl::StrCat("server ", server, " applied ", Show(decision),
                        " with a range that is missing or has other bits than were pushed for it"));
  }
}

void Oracle::CheckTensorSteps(int server, int64_t committed, absl::Span<const uint64_t> tensor_steps) {
  const auto step = steps_.find(committed);
  if (step == steps_.end()) return;
  const auto& expected = step->second.tensor_steps;
  if (!std::equal(expected.begin(), expected.end(), tensor_steps.begin(), tensor_steps.end())) {
    Broken(absl::StrCat("server ", server, " counts other optimizer steps after step ", committed,
                        " than there were updates"));
  }
}

void Oracle::CheckApart(absl::Span<const int64_t> committed) {
  if (committed.empty()) return;
  const auto [low, high] = std::minmax_element(committed.begin(), committed.end());
  if (*high - *low > 1) Broken(absl::StrCat("servers are at steps ", *low, " and ", *high));
}

}  // namespace ballast::sim
