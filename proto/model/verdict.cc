#include "ballast/proto/model/verdict.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "ballast/kernels/ieee_mode.h"
#include "ballast/kernels/optimizer.h"
#include "ballast/proto/model/field_hash.h"
#include "ballast/proto/model/optimizer.h"
#include "ballast/proto/model/status.h"

namespace ballast::model {
namespace {

constexpr size_t kBlobBytesMax = 64 << 10;

absl::Status BadHeader(absl::string_view message) {
  return Error(absl::StatusCode::kInvalidArgument, kBadRequest, message);
}

// The kernels compute in fp32: what is finite in fp64 alone would be Inf there.
bool Finite(double x) { return std::isfinite(static_cast<float>(x)); }

absl::Status CheckHyper(const v1::GroupHyper& hyper, int group, const v1::JobSpec& spec) {
  const auto bad = [group](const auto&... message) {
    return BadHeader(absl::StrCat("parameter group ", group, ": ", message...));
  };
  const auto at_least_zero = [](double x) { return Finite(x) && x >= 0; };
  const auto beta = [](double x) { return x >= 0 && x < 1; };
  if (!at_least_zero(hyper.learning_rate()) || !beta(hyper.beta1()) || !beta(hyper.beta2()) ||
      !at_least_zero(hyper.epsilon()) || !at_least_zero(hyper.weight_decay())) {
    return bad("expected learning_rate, epsilon and weight_decay >= 0 and finite in fp32, and betas in [0, 1), got lr ",
               hyper.learning_rate(), ", betas ", hyper.beta1(), ", ", hyper.beta2(), ", epsilon ", hyper.epsilon(),
               ", weight_decay ", hyper.weight_decay());
  }
  if (!Finite(hyper.dampening()) || !at_least_zero(hyper.learning_rate_decay()) ||
      !at_least_zero(hyper.initial_accumulator())) {
    return bad(
        "expected dampening, learning_rate_decay and initial_accumulator finite in fp32, the latter two >= 0, got ",
        hyper.dampening(), ", ", hyper.learning_rate_decay(), " and ", hyper.initial_accumulator());
  }
  if (hyper.dampening() != 0 && !spec.momentum()) {
    return bad("dampening is ", hyper.dampening(), ", but the job's optimizer is not SGD with momentum; leave it 0");
  }
  if (hyper.dampening() != 0 && spec.nesterov()) return bad("nesterov needs a dampening of 0, got ", hyper.dampening());
  if ((hyper.learning_rate_decay() != 0 || hyper.initial_accumulator() != 0) &&
      spec.optimizer() != v1::OPTIMIZER_ADAGRAD) {
    return bad(
        "learning_rate_decay and initial_accumulator are Adagrad's, which is not the job's optimizer; leave them 0, "
        "got ",
        hyper.learning_rate_decay(), " and ", hyper.initial_accumulator());
  }
  return absl::OkStatus();
}

bool SamePlan(const v1::PreparedRecord& a, const v1::PreparedRecord& b) {
  return a.step() == b.step() && Compare(a.epoch(), b.epoch()) == 0 && a.attempt() == b.attempt() &&
         a.plan_hash() == b.plan_hash();
}

bool SameDecision(const v1::Decision& a, const v1::Decision& b) {
  return a.step() == b.step() && Compare(a.epoch(), b.epoch()) == 0 && a.attempt() == b.attempt() &&
         a.plan_hash() == b.plan_hash() && a.verdict().skip() == b.verdict().skip() &&
         a.verdict().factor_bits() == b.verdict().factor_bits();
}

}  // namespace

absl::Status CheckPresence(const EpochPlan& plan, absl::string_view bitmap, absl::string_view name) {
  const size_t tensors = plan.layout().tensors().size();
  if (bitmap.size() != (tensors + 7) / 8) {
    return BadHeader(
        absl::StrCat(name, " must have ", (tensors + 7) / 8, " bytes for ", tensors, " tensors, got ", bitmap.size()));
  }
  for (uint32_t i = 0; i < bitmap.size() * 8; ++i) {
    if (!HasBit(bitmap, i)) continue;
    if (i >= tensors) return BadHeader(absl::StrCat(name, " names tensor ", i, "; the job has ", tensors));
    if (!plan.layout().live(i)) {
      return BadHeader(absl::StrCat(name, " names tensor ", i, " ('", plan.layout().tensors()[i].name,
                                    "'), which a later registration replaced"));
    }
  }
  return absl::OkStatus();
}

std::strong_ordering Compare(const v1::Epoch& a, const v1::Epoch& b) {
  if (const auto order = a.counter() <=> b.counter(); order != 0) return order;
  return a.nonce() <=> b.nonce();
}

bool MayBeSame(const v1::Epoch& a, const v1::Epoch& b) {
  return a.counter() == 0 || b.counter() == 0 || Compare(a, b) == 0;
}

std::string PlanHash(const EpochPlan& plan, int64_t step, uint64_t attempt, const v1::StepHeader& header,
                     absl::Span<const std::string> blobs) {
  FieldHash hash = plan.tiling_hash();
  hash.Add(static_cast<uint64_t>(step));
  hash.Add(attempt);
  hash.Add(static_cast<uint64_t>(header.kind()));
  hash.Add(static_cast<uint64_t>(header.groups_size()));
  for (const v1::GroupHyper& group : header.groups()) {
    hash.Add(group.learning_rate());
    hash.Add(group.beta1());
    hash.Add(group.beta2());
    hash.Add(group.epsilon());
    hash.Add(group.weight_decay());
    hash.Add(group.dampening());
    hash.Add(group.learning_rate_decay());
    hash.Add(group.initial_accumulator());
    hash.Add(uint64_t{group.maximize()});
  }
  hash.Add(header.gradient_scale());
  hash.Add(header.max_norm());
  hash.Add(absl::string_view(header.gradient_presence()));
  hash.Add(absl::string_view(header.value_presence()));
  hash.Add(static_cast<uint64_t>(blobs.size()));
  for (const std::string& blob : blobs) hash.Add(absl::string_view(blob));
  // The kind, above, tells whether this follows.
  if (header.kind() == v1::STEP_KIND_RESTORE) hash.Add(static_cast<uint64_t>(header.restored_version()));
  if (header.kind() == v1::STEP_KIND_VALUES) {
    hash.Add(uint64_t{header.value_array()});
    hash.Add(static_cast<uint64_t>(header.value_tensor_steps_size()));
    for (const uint64_t steps : header.value_tensor_steps()) hash.Add(steps);
  }
  // Logs of version 0 hold Opens without a digest, and hashes that end here.
  if (!plan.open().spec_digest().empty()) hash.Add(absl::string_view(plan.open().spec_digest()));
  // Logs of versions before 5 hold Opens without a version, and hashes that end here.
  if (plan.open().protocol_version() != 0) hash.Add(uint64_t{plan.open().protocol_version()});
  return hash.Finish();
}

std::vector<uint32_t> TensorsWithoutValues(const EpochPlan& plan, int64_t version) {
  std::vector<uint32_t> tensors;
  uint32_t index = 0;
  for (const v1::Registration& registration : plan.open().spec().registrations()) {
    for (int i = 0; i < registration.tensors_size(); ++i, ++index) {
      if (registration.version() == version && plan.layout().live(index)) tensors.push_back(index);
    }
  }
  return tensors;
}

namespace {

// Checks the array of the value slices, and the step counts given with the slices.
absl::Status CheckValues(const EpochPlan& plan, const v1::StepHeader& header) {
  if (header.value_array() == 0 && header.value_tensor_steps().empty()) return absl::OkStatus();
  if (header.kind() != v1::STEP_KIND_VALUES) {
    return BadHeader("moments and step counts are written by VALUES steps only");
  }
  BALLAST_ASSIGN_OR_RETURN(const kernels::OptimizerSpec optimizer, OptimizerOf(plan.open().spec()));
  const auto moments = static_cast<uint32_t>(kernels::MomentCount(optimizer));
  if (header.value_array() > moments) {
    return BadHeader(absl::StrCat("value_array is ", header.value_array(), "; the job's optimizer (", Show(optimizer),
                                  ") keeps ", moments, " moment(s)"));
  }
  const size_t tensors = plan.layout().tensors().size();
  const auto counts = static_cast<size_t>(header.value_tensor_steps_size());
  if (counts == 0 || counts == tensors) return absl::OkStatus();
  return BadHeader(
      absl::StrCat("value_tensor_steps must have an entry for each of ", tensors, " tensors or none, got ", counts));
}

// Frozen tensors have values alone: neither gradients, nor moments, nor updates to count.
absl::Status CheckFrozen(const EpochPlan& plan, const v1::StepHeader& header) {
  for (const Tensor& tensor : plan.layout().tensors()) {
    if (tensor.frozen == v1::FROZEN_UNSPECIFIED) continue;
    if (HasBit(header.gradient_presence(), tensor.index)) {
      return BadHeader(absl::StrCat("gradient_presence names tensor '", tensor.name,
                                    "', which was registered as frozen: servers have its values alone, and take no "
                                    "gradient of it; to train it, make a job in which it is not frozen"));
    }
    const bool counts =
        header.value_tensor_steps_size() > 0 && header.value_tensor_steps(static_cast<int>(tensor.index)) > 0;
    if (HasBit(header.value_presence(), tensor.index) && (header.value_array() != 0 || counts)) {
      return BadHeader(absl::StrCat("tensor '", tensor.name,
                                    "' is frozen: it has values, and neither moments nor a count of updates"));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckBlobs(const EpochPlan& plan, const v1::StepHeader& header, absl::Span<const std::string> blobs) {
  // A restore seals the blobs of the group that sealed the version; its number of ranks may differ.
  if (blobs.size() != plan.world_size() && header.kind() != v1::STEP_KIND_RESTORE) {
    return BadHeader(absl::StrCat("expected one blob per rank (", plan.world_size(), "), got ", blobs.size()));
  }
  size_t bytes = 0, largest = 0;
  for (size_t rank = 0; rank < blobs.size(); ++rank) {
    bytes += blobs[rank].size();
    if (blobs[rank].size() > blobs[largest].size()) largest = rank;
  }
  if (bytes <= kBlobBytesMax) return absl::OkStatus();
  return BadHeader(absl::StrCat(
      "the blobs of all ranks together may take ", kBlobBytesMax, " bytes, got ", bytes, " from ", blobs.size(),
      " ranks, the most (", blobs[largest].size(), ") from rank ", largest, "; if all ranks seal as much, each has ",
      kBlobBytesMax / blobs.size(),
      ". Keep what is larger (states of random generators, say) in files of the ranks, and seal the files' names"));
}

}  // namespace

absl::Status CheckHeader(const EpochPlan& plan, int64_t step, const v1::StepHeader& header,
                         absl::Span<const std::string> blobs) {
  BALLAST_RETURN_IF_ERROR(CheckHeader(plan, step, header));
  return CheckBlobs(plan, header, blobs);
}

absl::Status CheckHeader(const EpochPlan& plan, int64_t step, const v1::StepHeader& header) {
  const bool restore = header.kind() == v1::STEP_KIND_RESTORE;
  if (header.kind() != v1::STEP_KIND_UPDATE && header.kind() != v1::STEP_KIND_VALUES && !restore) {
    return BadHeader(
        absl::StrCat("step kind must be UPDATE, VALUES or RESTORE, got ", static_cast<int>(header.kind())));
  }
  // For every kind: every answer about the job repeats the header, and must fit into a message. The spec bounds its
  // lists.
  if (static_cast<uint32_t>(header.groups_size()) > plan.open().spec().group_count()) {
    return BadHeader(absl::StrCat("expected hyper-parameters for ", plan.open().spec().group_count(),
                                  " parameter group(s), got ", header.groups_size()));
  }
  BALLAST_RETURN_IF_ERROR(CheckPresence(plan, header.gradient_presence(), "gradient_presence"));
  BALLAST_RETURN_IF_ERROR(CheckPresence(plan, header.value_presence(), "value_presence"));
  const auto any = [](absl::string_view bitmap) {
    return std::any_of(bitmap.begin(), bitmap.end(), [](char c) { return c != 0; });
  };
  if (restore && (any(header.gradient_presence()) || any(header.value_presence()))) {
    return BadHeader("a RESTORE step has no slices: both presences must be empty");
  }
  if (restore && (header.restored_version() < 0 || header.restored_version() >= step)) {
    return BadHeader(
        absl::StrCat("step ", step, " can restore versions 0 to ", step - 1, ", got ", header.restored_version()));
  }
  if (header.kind() == v1::STEP_KIND_VALUES && (any(header.gradient_presence()) || !any(header.value_presence()))) {
    return BadHeader("a VALUES step needs at least one tensor in value_presence and none in gradient_presence");
  }
  BALLAST_RETURN_IF_ERROR(CheckValues(plan, header));
  BALLAST_RETURN_IF_ERROR(CheckFrozen(plan, header));
  if (header.kind() == v1::STEP_KIND_UPDATE) {
    const int expected = static_cast<int>(plan.open().spec().group_count());
    if (header.groups_size() != expected) {
      return BadHeader(
          absl::StrCat("expected hyper-parameters for ", expected, " parameter group(s), got ", header.groups_size()));
    }
    for (int i = 0; i < expected; ++i) {
      BALLAST_RETURN_IF_ERROR(CheckHyper(header.groups(i), i, plan.open().spec()));
    }
    if (!Finite(header.gradient_scale()) || !std::isfinite(header.max_norm()) || header.max_norm() < 0) {
      return BadHeader(absl::StrCat("expected a gradient_scale that is finite in fp32 and a finite max_norm >= 0, got ",
                                    header.gradient_scale(), " and ", header.max_norm()));
    }
  }
  for (const uint32_t tensor : TensorsWithoutValues(plan, step - 1)) {
    if (!HasBit(header.value_presence(), tensor) || header.value_array() != 0) {
      return BadHeader(absl::StrCat("tensor '", plan.layout().tensors()[tensor].name, "' was registered at version ",
                                    step - 1, " and has no values yet: step ", step, " must give its master weights"));
    }
  }
  return absl::OkStatus();
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
      return Error(absl::StatusCode::kInvalidArgument, kDiverged,
                   absl::StrCat("chunk ", sorted[i]->chunk(),
                                " has norms from two servers; the members disagree about routing"));
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
  BALLAST_ASSIGN_OR_RETURN(const double squared_norm, GlobalSquaredNorm(norms));
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

// Chooses among the versions kept by all servers. Takes the version that became the one to go on from in the latest
// transaction. This need not be the highest version: a restore gives up versions later than the restored one, and a
// server that has not heard of the restore's decision still keeps them. A version pinned only by request may be among
// the given-up ones; it is the last resort.
std::optional<int64_t> NewestCommonPin(absl::Span<const v1::GetJobResponse> answers) {
  std::optional<std::pair<int64_t, int64_t>> newest;  // since, version
  std::optional<int64_t> asked_for;
  const auto common = [&](int64_t version) {
    const v1::Epoch* known = &v1::Epoch::default_instance();
    return std::all_of(answers.begin(), answers.end(), [&](const v1::GetJobResponse& answer) {
      const v1::Epoch* const decided = DecidedBy(answer, version);
      if (decided == nullptr || !MayBeSame(*known, *decided)) return false;
      if (known->counter() == 0) known = decided;
      return true;
    });
  };
  for (const v1::GetJobResponse& answer : answers) {
    for (int i = 0; i < answer.automatic_versions_size(); ++i) {
      const int64_t version = answer.automatic_versions(i);
      // First the transaction that made the version the one to go on from, then the version itself.
      const std::pair since(i < answer.automatic_since_size() ? answer.automatic_since(i) : version, version);
      if (common(version)) newest = std::max(newest.value_or(since), since);
    }
    for (const int64_t version : answer.durable_versions()) {
      if (common(version)) asked_for = std::max(asked_for.value_or(version), version);
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

}  // namespace

absl::StatusOr<Resolution> Resolve(absl::Span<const v1::GetJobResponse> answers) {
  int64_t highest = -1;
  for (const v1::GetJobResponse& answer : answers) {
    if (answer.state_lost()) return ResolveLost(answers, answer);
    highest = std::max(highest, answer.committed());
  }
  const v1::GetJobResponse* at_highest = nullptr;
  const v1::GetJobResponse* behind = nullptr;
  std::vector<v1::PreparedRecord> prepared;
  for (const v1::GetJobResponse& answer : answers) {
    if (answer.committed() < 0 && highest > 0) {
      return Error(absl::StatusCode::kDataLoss, kDiverged,
                   absl::StrCat("server '", answer.server_id(), "' has nothing of this job, which is at step ", highest,
                                " on another: is it one of the job's servers? If another is meant, name that one; if "
                                "it is one of them, its data directory was replaced: put it back"));
    }
    if (answer.committed() < highest - 1) {
      return Error(
          absl::StatusCode::kDataLoss, kDiverged,
          absl::StrCat("server '", answer.server_id(), "' is at step ", answer.committed(), " while another is at ",
                       highest, "; more than one apart cannot come from faults: was its data directory replaced?"));
    }
    if (answer.committed() == highest - 1) behind = &answer;
    if (answer.committed() == highest) {
      if (at_highest != nullptr && highest >= 0 && !SameDecision(at_highest->decision(), answer.decision())) {
        return Error(absl::StatusCode::kDataLoss, kDiverged,
                     absl::StrCat("servers '", at_highest->server_id(), "' and '", answer.server_id(),
                                  "' decided step ", highest, " differently"));
      }
      at_highest = &answer;
      if (answer.has_prepared() && answer.prepared().step() == highest + 1) prepared.push_back(answer.prepared());
    }
  }
  Resolution resolution{.base = highest, .decision = std::nullopt};
  if (highest >= 0) resolution.decision = at_highest->decision();
  if (behind == nullptr && prepared.size() == answers.size() && !answers.empty()) {
    if (auto decision = Decide(prepared); decision.ok())
      return Resolution{.base = highest + 1, .decision = *std::move(decision)};
  }
  return resolution;
}

}  // namespace ballast::model
