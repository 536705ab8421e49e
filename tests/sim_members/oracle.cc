#include "ballast/tests/sim_members/oracle.h"

#include "absl/strings/str_cat.h"
#include "ballast/proto/model/verdict.h"

namespace ballast::sim_members {
namespace {

std::string Show(const v1::Decision& decision) {
  return absl::StrCat("step ", decision.step(), " of epoch ", decision.epoch().counter(), " attempt ",
                      decision.attempt());
}

bool Same(const v1::Decision& a, const v1::Decision& b) {
  return model::SameDecision(a, b) && a.verdict().norm() == b.verdict().norm();
}

const model::EpochPlan& PlanOf(uint32_t world_size) {
  static const auto* const plans = [] {
    auto* const made = new std::vector<model::EpochPlan>();
    for (uint32_t ranks = 1; ranks <= 2; ++ranks) {
      v1::OpenRequest open = OpenTemplate(ranks);
      v1::Member* const member = open.add_members();
      member->set_server_id("A");
      member->set_weight(1);
      made->push_back(*model::EpochPlan::Make(open));
    }
    return made;
  }();
  return (*plans)[world_size - 1];
}

}  // namespace

void Oracle::Broken(const std::string& what) {
  if (violation_.empty()) violation_ = what;
}

void Oracle::Decided(const v1::Decision& decision, const std::string& who) {
  const int64_t step = decision.step();
  if (step <= last()) {
    if (Same(this->decision(step), decision)) return;
    return Broken(absl::StrCat("two decisions: ", Show(this->decision(step)), "; ", who, " has ", Show(decision)));
  }
  if (step != last() + 1) return Broken(absl::StrCat(who, " decides ", Show(decision), " after step ", last()));
  if (step > 0 && model::Compare(this->decision(step - 1).epoch(), decision.epoch()) > 0) {
    return Broken(absl::StrCat(who, " decides ", Show(decision), " behind a newer epoch's step"));
  }
  const Intent& intent = *groups_.at(Key(decision.epoch()));
  const v1::StepHeader header = intent.Header(step);
  const model::EpochPlan& plan = PlanOf(intent.world_size);
  const uint64_t attempt = decision.attempt();
  std::vector<v1::ChunkNorm> norms;
  Step next{decision, {}};
  for (const model::Chunk& chunk : JobLayout().chunks()) {
    uint64_t digests = 0;
    bool gradients = false;
    for (const uint32_t index : plan.slices_of_chunk(chunk.index)) {
      const model::Slice& slice = plan.slices()[index];
      for (const v1::SliceKind kind : {v1::SLICE_KIND_GRADIENT, v1::SLICE_KIND_VALUE}) {
        const bool gradient = kind == v1::SLICE_KIND_GRADIENT;
        if (!plan.Touches(slice, gradient ? header.gradient_presence() : header.value_presence())) continue;
        digests += Mix(intent.Digest(step, attempt, kind, slice));
        gradients = gradients || gradient;
      }
    }
    if (gradients) {
      norms.push_back(NormOf(plan, chunk.index, header.gradient_presence(), [&](uint32_t index) {
        return intent.Digest(step, attempt, v1::SLICE_KIND_GRADIENT, plan.slices()[index]);
      }));
    }
    const uint64_t before = step == 0 ? 0 : steps_.back().contents[chunk.index];
    next.contents.push_back(Evolve(before, step, digests, decision.verdict()));
  }
  std::vector<const v1::ChunkNorm*> all;
  for (const v1::ChunkNorm& norm : norms) all.push_back(&norm);
  const v1::Verdict expected = model::MakeVerdict(header, *model::GlobalSquaredNorm(all), false);
  if (expected.norm() != decision.verdict().norm() || expected.factor_bits() != decision.verdict().factor_bits()) {
    return Broken(absl::StrCat(who, " decides ", Show(decision), " with a verdict that its slices do not give"));
  }
  steps_.push_back(std::move(next));
}

void Oracle::StartedFrom(int64_t base, const v1::Epoch& epoch, const std::string& who) {
  if (base >= last()) return;
  // Who is fenced need not know what newer groups decided.
  if (model::Compare(decision(base + 1).epoch(), epoch) > 0) return;
  Broken(absl::StrCat("a decided step is given up: ", who, " starts from step ", base, " although step ", last(),
                      " is decided"));
}

void Oracle::Taken(const v1::Decision& taken, const std::string& who) {
  if (taken.step() > last() || !model::SameDecision(decision(taken.step()), taken)) {
    Broken(absl::StrCat(who, " applies ", Show(taken), ", which nobody decided"));
  }
}

bool Oracle::Right(uint64_t chunk, int64_t version, uint64_t content) const {
  if (version < 0) return content == 0;
  return version <= last() && steps_[static_cast<size_t>(version)].contents[chunk] == content;
}

void Oracle::CheckChunk(uint64_t chunk, int64_t version, uint64_t content, const std::string& who) {
  if (!violation_.empty() || Right(chunk, version, content)) return;
  Broken(
      absl::StrCat(who, " has other bits of chunk ", chunk, " at version ", version, " than the decided steps make"));
}

}  // namespace ballast::sim_members
