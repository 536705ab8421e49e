#include "ballast/tests/sim_server/checker.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/model/verdict.h"

namespace ballast::sim {
namespace {

absl::Status Wrong(const std::string& message) { return absl::AbortedError(message); }

}  // namespace

void Checker::Note(const v1::Decision& decision) {
  if (decision.step() <= reference_.last_step()) return;
  for (const GroupIntent* group : groups_) {
    if (model::Compare(group->epoch, decision.epoch()) != 0) continue;
    // A restore may begin behind numbers that stay free.
    const bool restore = group->Header(decision.step(), 0).kind() == v1::STEP_KIND_RESTORE;
    if (decision.step() != reference_.last_step() + 1 && !restore) return;
    reference_.Decided(decision, *group);
    tally_->moments_written = reference_.moments_written();
    decided_[decision.step()] = decision;
    return;
  }
}

void Checker::Sent(const Request& request) {
  if (const auto* commit = std::get_if<std::shared_ptr<const v1::CommitRequest>>(&request.body)) {
    Note((*commit)->decision());
  }
  if (const auto* open = std::get_if<std::shared_ptr<const v1::OpenRequest>>(&request.body)) {
    if ((*open)->has_base_decision()) Note((*open)->base_decision());
  }
}

void Checker::Answered(const Response& response) {
  if (!response.status.ok()) return;
  v1::Epoch epoch;
  const auto* sealed = std::get_if<std::shared_ptr<const v1::SealResponse>>(&response.body);
  if (sealed != nullptr && (*sealed)->has_prepared()) {
    epoch = std::get<std::shared_ptr<const v1::SealRequest>>(response.request.body)->epoch();
  } else if (!opens_fail_ && std::holds_alternative<std::shared_ptr<const v1::FenceResponse>>(response.body)) {
    epoch = std::get<std::shared_ptr<const v1::FenceRequest>>(response.request.body)->epoch();
  }
  v1::Epoch& promised = promised_[response.request.server];
  if (model::Compare(promised, epoch) < 0) promised = epoch;
}

absl::Status Checker::CheckRecord(int server, const v1::GetJobResponse& job) const {
  if (model::Compare(job.promised(), promised_[server]) < 0) {
    return Wrong(absl::StrCat("forgot its promise of epoch ", promised_[server].counter()));
  }
  if (job.state_lost()) return absl::OkStatus();  // its state is checked after the restore
  const int64_t committed = job.committed();
  const int64_t decided = oracle_->last_decided();
  if (committed > decided) return Wrong(absl::StrCat("is at step ", committed, ", and only ", decided, " is decided"));
  if (committed < decided - 1) return Wrong(absl::StrCat("is at step ", committed, " after ", decided, " was decided"));
  if (committed == decided - 1) {
    // A decided step is prepared everywhere until it is committed.
    if (!job.has_prepared() || job.prepared().step() != decided) {
      return Wrong(absl::StrCat("is at step ", committed, " and has not prepared the decided ", decided));
    }
    const auto decision = decided_.find(decided);
    if (decision != decided_.end() && job.prepared().plan_hash() != decision->second.plan_hash()) {
      return Wrong(absl::StrCat("has prepared another step ", decided, " than was decided"));
    }
  }
  if (committed >= 0 && committed == reference_.last_step() &&
      !std::equal(job.tensor_steps().begin(), job.tensor_steps().end(), reference_.tensor_steps().begin(),
                  reference_.tensor_steps().end())) {
    return Wrong(absl::StrCat("counts other optimizer steps after step ", committed, " than there were updates"));
  }
  return absl::OkStatus();
}

absl::Status Checker::Compare(const v1::PullRequest& request, uint64_t chunk, absl::Span<const std::byte> bits) const {
  const uint64_t width = request.content() == v1::CONTENT_WORKING ? 2 : 4;
  const uint64_t start = PlanOf(1).layout().chunks()[chunk].range.begin;
  const absl::Span<const std::byte> all = reference_.Bits(request.version(), chunk, request.content());
  if (all.empty()) return Wrong(absl::StrCat("step ", request.version(), " was pulled and is not decided"));
  const absl::Span<const std::byte> expected =
      all.subspan((request.begin() - start) * width, (request.end() - request.begin()) * width);
  if (bits.size() == expected.size() && std::memcmp(bits.data(), expected.data(), bits.size()) == 0) {
    return absl::OkStatus();
  }
  size_t at = 0;
  while (at < std::min(bits.size(), expected.size()) && bits[at] == expected[at]) ++at;
  return Wrong(absl::StrCat(v1::Content_Name(request.content()), " of chunk ", chunk, " at version ", request.version(),
                            " has wrong bits, first at element ", request.begin() - start + at / width,
                            " of the chunk"));
}

absl::Status Checker::CheckServer(int server, Machine* machine) {
  BALLAST_ASSIGN_OR_RETURN(const v1::GetJobResponse job, machine->Describe());
  BALLAST_RETURN_IF_ERROR(CheckRecord(server, job));
  if (job.committed() < 0 || !job.has_open() || job.state_lost()) return absl::OkStatus();
  for (const model::Chunk& chunk : PlanOf(1).layout().chunks()) {
    if (PlanOf(1).holders_of(chunk.index)[0] != static_cast<uint32_t>(server)) continue;
    for (int content = v1::CONTENT_WORKING; content < v1::CONTENT_WORKING + reference_.contents(); ++content) {
      v1::PullRequest request;
      request.set_job(kJob);
      request.set_version(job.committed());
      request.set_content(static_cast<v1::Content>(content));
      request.set_unit(chunk.unit);
      request.set_begin(chunk.range.begin);
      request.set_end(chunk.range.end);
      absl::StatusOr<std::vector<std::byte>> bits = machine->PullNow(request, random_);
      if (model::ReasonOf(bits.status()) == model::kVersionGone && job.has_prepared() &&
          reference_.last_step() == job.prepared().step()) {
        // The chunk's next version became durable before its decision did.
        request.set_version(reference_.last_step());
        bits = machine->PullNow(request, random_);
        ++tally_->chunks_ahead;
      }
      BALLAST_RETURN_IF_ERROR(bits.status());
      BALLAST_RETURN_IF_ERROR(Compare(request, chunk.index, *bits));
    }
    ++tally_->chunks_checked;
  }
  if (machine->LacksCopies()) ++tally_->without_copies;
  return absl::OkStatus();
}

void Checker::PullSomething(int server, Machine* machine) {
  const auto job = machine->Describe();
  if (!job.ok() || !job->has_open()) return;
  std::vector<uint64_t> chunks;
  for (const model::Chunk& chunk : PlanOf(1).layout().chunks()) {
    if (PlanOf(1).holders_of(chunk.index)[0] == static_cast<uint32_t>(server)) chunks.push_back(chunk.index);
  }
  if (chunks.empty()) return;
  const model::Chunk& chunk = PlanOf(1).layout().chunks()[chunks[random_->Below(chunks.size())]];
  v1::PullRequest request;
  request.set_job(kJob);
  request.set_version(std::max<int64_t>(0, job->committed() - 1 + static_cast<int64_t>(random_->Below(3))));
  request.set_content(static_cast<v1::Content>(
      v1::CONTENT_WORKING + static_cast<int>(random_->Below(static_cast<uint64_t>(reference_.contents())))));
  request.set_unit(chunk.unit);
  const uint64_t begin = random_->Below(chunk.range.size());
  request.set_begin(chunk.range.begin + begin);
  request.set_end(request.begin() + 1 + random_->Below(std::min<uint64_t>(5000, chunk.range.size() - begin)));
  machine->Pull(request, [this, request, chunk = chunk.index](absl::StatusOr<std::vector<std::byte>> bits) {
    const std::string reason = model::ReasonOf(bits.status());
    if (reason == model::kVersionGone || reason == model::kServerDown || reason == model::kStateLost) return;
    if (bits.ok()) ++tally_->pulls_checked;
    const absl::Status status = bits.ok() ? Compare(request, chunk, *bits) : bits.status();
    if (error_.ok()) error_ = status;
  });
}

}  // namespace ballast::sim
