#include "ballast/proto/model/verdict.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "ballast/kernels/ieee_mode.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/model/layout.h"

namespace ballast::model {
namespace {

bool SamePlan(const v1::PreparedRecord& a, const v1::PreparedRecord& b) {
  return a.step() == b.step() && Compare(a.epoch(), b.epoch()) == 0 && a.attempt() == b.attempt() &&
         a.plan_hash() == b.plan_hash();
}

bool SameNorm(const v1::ChunkNorm& a, const v1::ChunkNorm& b) {
  // Of a norm that overflowed the bits say nothing.
  if (a.overflow() && b.overflow()) return true;
  return a.overflow() == b.overflow() &&
         std::equal(a.segments().begin(), a.segments().end(), b.segments().begin(), b.segments().end(),
                    [](const v1::SegmentNorm& x, const v1::SegmentNorm& y) {
                      return x.tensor() == y.tensor() &&
                             std::bit_cast<uint64_t>(x.squared_norm()) == std::bit_cast<uint64_t>(y.squared_norm());
                    });
}

}  // namespace

bool SameDecision(const v1::Decision& a, const v1::Decision& b) {
  return a.step() == b.step() && Compare(a.epoch(), b.epoch()) == 0 && a.attempt() == b.attempt() &&
         a.plan_hash() == b.plan_hash() && a.verdict().skip() == b.verdict().skip() &&
         a.verdict().factor_bits() == b.verdict().factor_bits();
}

void CountSteps(const v1::PreparedRecord& record, bool skip, std::vector<uint64_t>* tensor_steps) {
  const v1::StepHeader& header = record.header();
  const auto tensors = static_cast<uint32_t>(tensor_steps->size());
  if (header.kind() == v1::STEP_KIND_UPDATE && !skip) {
    for (uint32_t tensor = 0; tensor < tensors; ++tensor) {
      if (HasBit(header.gradient_presence(), tensor)) ++(*tensor_steps)[tensor];
    }
  }
  if (header.kind() == v1::STEP_KIND_RESTORE) {
    tensor_steps->assign(record.restored_tensor_steps().begin(), record.restored_tensor_steps().end());
    tensor_steps->resize(tensors, 0);
  }
  if (header.kind() == v1::STEP_KIND_VALUES && !header.value_tensor_steps().empty()) {
    for (uint32_t tensor = 0; tensor < tensors; ++tensor) {
      if (!HasBit(header.value_presence(), tensor)) continue;
      (*tensor_steps)[tensor] = header.value_tensor_steps(static_cast<int>(tensor));
    }
  }
}

std::strong_ordering Compare(const v1::Epoch& a, const v1::Epoch& b) {
  if (const auto order = a.counter() <=> b.counter(); order != 0) return order;
  return a.nonce() <=> b.nonce();
}

bool MayBeSame(const v1::Epoch& a, const v1::Epoch& b) {
  return a.counter() == 0 || b.counter() == 0 || Compare(a, b) == 0;
}

double ChunkSquaredNorm(const v1::ChunkNorm& norm) {
  double sum = 0;
  for (const v1::SegmentNorm& segment : norm.segments()) sum += segment.squared_norm();
  return sum;
}

absl::StatusOr<double> GlobalSquaredNorm(absl::Span<const v1::ChunkNorm* const> norms) {
  const kernels::IeeeMode mode;
  std::vector<const v1::ChunkNorm*> sorted(norms.begin(), norms.end());
  std::sort(sorted.begin(), sorted.end(), [](const auto* a, const auto* b) { return a->chunk() < b->chunk(); });
  double sum = 0;
  for (size_t i = 0; i < sorted.size(); ++i) {
    if (i > 0 && sorted[i]->chunk() == sorted[i - 1]->chunk()) {
      if (SameNorm(*sorted[i], *sorted[i - 1])) continue;
      return Error(absl::StatusCode::kDataLoss, kDiverged,
                   absl::StrCat("two servers differ in their norms of the same gradient of chunk ", sorted[i]->chunk(),
                                ": the memory or the processor of one of them is at fault. Take that server away ",
                                "before the job goes on"));
    }
    sum += ChunkSquaredNorm(*sorted[i]);
  }
  return sum;
}

v1::Verdict MakeVerdict(const v1::StepHeader& header, double squared_norm, bool overflow) {
  const kernels::IeeeMode mode;
  v1::Verdict verdict;
  verdict.set_skip(overflow);
  const double scale = header.kind() == v1::STEP_KIND_UPDATE ? header.gradient_scale() : 1;
  const double norm = overflow ? 0 : std::fabs(scale) * std::sqrt(squared_norm);
  verdict.set_norm(norm);
  double clip = 1;
  if (header.max_norm() > 0) clip = std::min(1.0, header.max_norm() / (norm + 1e-6));
  const float factor = static_cast<float>(scale * clip);
  verdict.set_factor_bits(std::bit_cast<uint32_t>(factor));
  // No gradient is larger than the norm, so below this none leaves fp32 when it is scaled.
  if (!(std::fabs(factor) * std::sqrt(squared_norm) <= std::numeric_limits<float>::max())) verdict.set_skip(true);
  return verdict;
}

absl::StatusOr<v1::Decision> Decide(absl::Span<const v1::PreparedRecord> records) {
  if (records.empty())
    return Error(absl::StatusCode::kInvalidArgument, kBadRequest, "no prepared records to decide from");
  const v1::PreparedRecord& first = records.front();
  std::vector<const v1::ChunkNorm*> norms;
  bool overflow = false;
  absl::flat_hash_set<absl::string_view> authors;
  for (const v1::PreparedRecord& record : records) {
    // Servers of versions before 5 left the author out.
    if (!record.server_id().empty() && !authors.insert(record.server_id()).second) {
      return Error(
          absl::StatusCode::kFailedPrecondition, kOtherServer,
          absl::StrCat("server '", record.server_id(), "' answered twice that it prepared step ", record.step(),
                       ", and another did not answer: two addresses lead to one server. Name each server by an ",
                       "address of its own, and restart the group with resume=auto"));
    }
    if (!SamePlan(first, record)) {
      return Error(absl::StatusCode::kFailedPrecondition, kPlanMismatch,
                   absl::StrCat("servers prepared different steps: (step ", first.step(), ", epoch ",
                                first.epoch().counter(), ", attempt ", first.attempt(), ") and (step ", record.step(),
                                ", epoch ", record.epoch().counter(), ", attempt ", record.attempt(),
                                "), or plans; restart the group with resume=auto"));
    }
    for (const v1::ChunkNorm& norm : record.norms()) {
      norms.push_back(&norm);
      overflow = overflow || norm.overflow();
    }
  }
  const absl::StatusOr<double> summed = GlobalSquaredNorm(norms);
  if (!summed.ok()) return Annotate(summed.status(), absl::StrCat("servers ", absl::StrJoin(authors, ", ")));
  const double squared_norm = *summed;
  v1::Decision decision;
  decision.set_step(first.step());
  *decision.mutable_epoch() = first.epoch();
  decision.set_attempt(first.attempt());
  decision.set_plan_hash(first.plan_hash());
  *decision.mutable_verdict() = MakeVerdict(first.header(), squared_norm, overflow || !std::isfinite(squared_norm));
  *decision.mutable_blobs() = first.blobs();
  return decision;
}

namespace {

absl::Status StateLost(const v1::GetJobResponse& answer) {
  if (answer.open().spec().durability() != v1::DURABILITY_EVERY_K) {
    return Error(
        absl::StatusCode::kDataLoss, kStateLost,
        absl::StrCat("server '", answer.server_id(), "' was restarted and lost its part of the job's state at step ",
                     answer.committed(), " (durability none); drop the job (", kHowToDrop, ") and start it again"));
  }
  return Error(
      absl::StatusCode::kDataLoss, kStateLost,
      absl::StrCat("server '", answer.server_id(), "' was restarted and lost its part of the job's state since ",
                   "its newest pin (durability every-K), and there is no version that all servers have "
                   "pinned: the job had not reached its first, a server gave its own up because it could not be "
                   "read, or a server's data directory was replaced. Drop the job (",
                   kHowToDrop, ") and start it again"));
}

// The epoch that decided a version which the server keeps; counter 0: the server does not tell. Null: it does not keep
// the version.
const v1::Epoch* DecidedBy(const v1::GetJobResponse& answer, int64_t version) {
  const auto& versions = answer.durable_versions();
  const auto found = std::lower_bound(versions.begin(), versions.end(), version);
  if (found == versions.end() || *found != version) return nullptr;
  const auto at = static_cast<int>(found - versions.begin());
  return at < answer.decided_by_size() ? &answer.decided_by(at) : &v1::Epoch::default_instance();
}

// Do all servers keep the version, and none another version of that number?
bool KeptByAll(absl::Span<const v1::GetJobResponse> answers, int64_t version) {
  const v1::Epoch* known = &v1::Epoch::default_instance();
  return std::all_of(answers.begin(), answers.end(), [&](const v1::GetJobResponse& answer) {
    const v1::Epoch* const decided = DecidedBy(answer, version);
    if (decided == nullptr || !MayBeSame(*known, *decided)) return false;
    if (known->counter() == 0) known = decided;
    return true;
  });
}

// Chooses among the versions kept by all servers. Takes the version that became the one to go on from in the latest
// transaction. This need not be the highest version: a restore gives up versions later than the restored one, and a
// server that has not heard of the restore's decision still keeps them. A version pinned only by request may be among
// the given-up ones; it is the last resort.
std::optional<int64_t> NewestCommonPin(absl::Span<const v1::GetJobResponse> answers) {
  std::optional<std::pair<int64_t, int64_t>> newest;  // since, version
  std::optional<int64_t> asked_for;
  for (const v1::GetJobResponse& answer : answers) {
    for (int i = 0; i < answer.automatic_versions_size(); ++i) {
      const int64_t version = answer.automatic_versions(i);
      // First the transaction that made the version the one to go on from, then the version itself.
      const std::pair since(i < answer.automatic_since_size() ? answer.automatic_since(i) : version, version);
      if (KeptByAll(answers, version)) newest = std::max(newest.value_or(since), since);
    }
    for (const int64_t version : answer.durable_versions()) {
      if (KeptByAll(answers, version)) asked_for = std::max(asked_for.value_or(version), version);
    }
  }
  return newest.has_value() ? newest->second : asked_for;
}

// `lost`: the answer of a server that lost its state.
absl::StatusOr<Resolution> ResolveLost(absl::Span<const v1::GetJobResponse> answers, const v1::GetJobResponse& lost) {
  const std::optional<int64_t> pin = NewestCommonPin(answers);
  if (!pin.has_value()) return StateLost(lost);
  // A step is decided once all servers have prepared it, and each answer bounds the steps that its server can have
  // prepared. So no step beyond the smallest bound was decided, and the numbers after the bound are free.
  Resolution resolution{.base = std::numeric_limits<int64_t>::max(), .decision = std::nullopt, .restores = pin};
  const v1::GetJobResponse* least = nullptr;
  for (const v1::GetJobResponse& answer : answers) {
    const int64_t last = answer.committed() + (answer.has_prepared() ? 1 : 0);
    if (last >= resolution.base) continue;
    resolution.base = last;
    least = &answer;
  }
  for (const v1::GetJobResponse& answer : answers) {
    if (answer.state_lost() || answer.committed() <= resolution.base) continue;
    return Error(absl::StatusCode::kDataLoss, kDiverged,
                 absl::StrCat("server '", answer.server_id(), "' is at step ", answer.committed(), ", and server '",
                              least->server_id(), "' cannot have prepared any after ", resolution.base,
                              ": was its data directory replaced?"));
  }
  return resolution;
}

// A decision reaches all servers before the next step: none is more than a step behind `highest`.
absl::Status CheckNear(const v1::GetJobResponse& answer, int64_t highest) {
  if (answer.committed() < 0 && highest > 0) {
    return Error(absl::StatusCode::kDataLoss, kDiverged,
                 absl::StrCat("server '", answer.server_id(), "' has nothing of this job, which is at step ", highest,
                              " on another: is it one of the job's servers? If another is meant, name that one; if "
                              "it is one of them, its data directory was replaced: put it back"));
  }
  if (answer.committed() >= highest - 1) return absl::OkStatus();
  return Error(
      absl::StatusCode::kDataLoss, kDiverged,
      absl::StrCat("server '", answer.server_id(), "' is at step ", answer.committed(), " while another is at ",
                   highest, "; more than one apart cannot come from faults: was its data directory replaced?"));
}

}  // namespace

absl::StatusOr<Resolution> Resolve(absl::Span<const v1::GetJobResponse> answers) {
  int64_t highest = -1;
  for (const v1::GetJobResponse& answer : answers) {
    if (answer.state_lost()) return ResolveLost(answers, answer);
    highest = std::max(highest, answer.committed());
  }
  const v1::GetJobResponse* at_highest = nullptr;
  std::vector<v1::PreparedRecord> prepared;  // of the step after `highest`
  for (const v1::GetJobResponse& answer : answers) {
    BALLAST_RETURN_IF_ERROR(CheckNear(answer, highest));
    if (answer.committed() < highest) continue;
    if (at_highest != nullptr && highest >= 0 && !SameDecision(at_highest->decision(), answer.decision())) {
      return Error(absl::StatusCode::kDataLoss, kDiverged,
                   absl::StrCat("servers '", at_highest->server_id(), "' and '", answer.server_id(), "' decided step ",
                                highest, " differently"));
    }
    at_highest = &answer;
    if (answer.has_prepared() && answer.prepared().step() == highest + 1) prepared.push_back(answer.prepared());
  }
  if (prepared.size() == answers.size() && !answers.empty()) {
    if (auto decision = Decide(prepared); decision.ok()) {
      return Resolution{.base = highest + 1, .decision = *std::move(decision)};
    }
  }
  Resolution resolution{.base = highest, .decision = std::nullopt};
  if (highest >= 0) resolution.decision = at_highest->decision();
  return resolution;
}

}  // namespace ballast::model
