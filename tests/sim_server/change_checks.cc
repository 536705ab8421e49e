#include "ballast/tests/sim_server/change_checks.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/model/step_header.h"
#include "ballast/services/server/stored_jobs.h"

namespace ballast::sim {
namespace {

bool EqualBits(absl::Span<const std::byte> a, absl::Span<const std::byte> b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size()) == 0;
}

}  // namespace

void ChangeChecks::Broken(const std::string& what) {
  if (violation_.empty()) violation_ = what;
}

void ChangeChecks::Prepared(const model::EpochPlan& plan, absl::Span<const v1::PreparedRecord> records) {
  for (const v1::PreparedRecord& record : records) {
    const auto digest = [&](const model::Slice& slice) {
      return intent_->Digest(record.step(), record.attempt(), v1::SLICE_KIND_GRADIENT, slice, 0);
    };
    for (const v1::ChunkNorm& norm : record.norms()) {
      const v1::ChunkNorm expected = NormOf(plan, norm.chunk(), record.header().gradient_presence(), digest);
      if (norm.SerializeAsString() == expected.SerializeAsString()) continue;
      Broken(absl::StrCat("chunk ", norm.chunk(), " has another norm in step ", record.step(),
                          " than its slices: ", norm.ShortDebugString()));
    }
  }
}

void ChangeChecks::Decided(const v1::Decision& decision) {
  const auto [known, first] = decided_.emplace(decision.step(), decision);
  if (!first) {
    if (known->second.verdict().SerializeAsString() != decision.verdict().SerializeAsString() ||
        model::Compare(known->second.epoch(), decision.epoch()) != 0) {
      Broken(absl::StrCat("step ", decision.step(), " is decided twice, and differently"));
    }
    return;
  }
  if (decision.step() != reference_.last_step() + 1) {
    return Broken(absl::StrCat("step ", decision.step(), " is decided after step ", reference_.last_step()));
  }
  reference_.Decided(decision, *intent_);
}

void ChangeChecks::StartsFrom(const model::Found& found, int64_t acknowledged) {
  if (found.base < acknowledged) {
    return Broken(absl::StrCat("a group begins at step ", found.base, ", and step ", acknowledged, " is decided"));
  }
  if (found.decision.has_value()) Decided(*found.decision);
  const std::vector<uint64_t>& steps = reference_.tensor_steps();
  if (found.base >= 0 &&
      !std::equal(steps.begin(), steps.end(), found.tensor_steps.begin(), found.tensor_steps.end())) {
    Broken(absl::StrCat("the servers count other updates of the tensors at step ", found.base, " than there were"));
  }
}

void ChangeChecks::Exported(const v1::ExportRequest& request, const services::ExportedChunk& chunk) {
  if (request.tell_kept()) return;
  const uint64_t index = request.chunk();
  if (chunk.head.version() < request.least()) {
    return Broken(absl::StrCat("chunk ", index, " is exported as of version ", chunk.head.version(), ", wanted ",
                               request.least(), " or later"));
  }
  if (chunk.head.changed() < reference_.ChangedAt(chunk.head.version(), index)) {
    Broken(absl::StrCat("chunk ", index, " is exported as of version ", chunk.head.version(),
                        " as last changed by step ", chunk.head.changed(), ", it was by step ",
                        reference_.ChangedAt(chunk.head.version(), index)));
  }
  // Other formats of moments are compared once the copy has arrived.
  const bool f32 = PlanOf(1).open().spec().moment_format() == v1::MOMENT_FORMAT_F32;
  const int arrays = f32 ? reference_.contents() - 1 : 1;
  for (int i = 0; i < arrays; ++i) {
    const absl::Span<const std::byte> expected =
        reference_.Bits(chunk.head.version(), index, static_cast<v1::Content>(v1::CONTENT_MASTER + i));
    const auto& bytes = chunk.state.arrays[static_cast<size_t>(i)].bytes;
    if (!expected.empty() && bytes.size() >= expected.size() &&
        EqualBits(absl::MakeConstSpan(bytes).first(expected.size()), expected)) {
      continue;
    }
    Broken(absl::StrCat("chunk ", index, " is exported as of version ", chunk.head.version(),
                        " with wrong bits in array ", i));
  }
}

std::optional<std::string> ChangeChecks::Compare(const v1::PullRequest& request, uint64_t chunk,
                                                 absl::Span<const std::byte> bits) const {
  const uint64_t width = request.content() == v1::CONTENT_WORKING ? 2 : 4;
  const uint64_t start = PlanOf(1).layout().chunks()[chunk].range.begin;
  const absl::Span<const std::byte> all = reference_.Bits(request.version(), chunk, request.content());
  if (all.empty() && request.version() <= reference_.last_step() - 4) return std::nullopt;  // the reference forgot
  if (!all.empty() &&
      EqualBits(bits, all.subspan((request.begin() - start) * width, (request.end() - request.begin()) * width))) {
    return std::nullopt;
  }
  return absl::StrCat(v1::Content_Name(request.content()), " of chunk ", chunk, " at version ", request.version(),
                      " has wrong bits");
}

v1::PullRequest ChangeChecks::PullOf(const model::Chunk& chunk, int64_t version, int content) const {
  v1::PullRequest request;
  request.set_job(kJob);
  request.set_version(version);
  request.set_content(static_cast<v1::Content>(content));
  request.set_unit(chunk.unit);
  request.set_begin(chunk.range.begin);
  request.set_end(chunk.range.end);
  return request;
}

void ChangeChecks::CheckChunk(int server, Machine* machine, const model::Chunk& chunk, int64_t version, bool ahead) {
  for (int content = v1::CONTENT_WORKING; content < v1::CONTENT_WORKING + reference_.contents(); ++content) {
    v1::PullRequest request = PullOf(chunk, version, content);
    absl::StatusOr<std::vector<std::byte>> bits = machine->PullNow(request, random_);
    if (ahead && model::ReasonOf(bits.status()) == model::kVersionGone) {
      request.set_version(version + 1);
      bits = machine->PullNow(request, random_);
    }
    if (machine->off()) return;
    ++pulls_;
    if (!bits.ok()) {
      return Broken(absl::StrCat("server ", server, " does not give chunk ", chunk.index, " at version ", version, ": ",
                                 bits.status().ToString()));
    }
    if (const auto wrong = Compare(request, chunk.index, *bits))
      return Broken(absl::StrCat("server ", server, ": ", *wrong));
  }
}

void ChangeChecks::Forgets(int server, Machine* machine) {
  const auto entries = services::ReadEntries(*machine->catalog().Look());
  if (!entries.ok()) return;
  const auto job = entries->find(kJob);
  if (job == entries->end()) return;
  uint64_t named = 0, taken = 0;
  for (const storage::DurableChunk& chunk : job->second.chunks) named += chunk.bytes;
  const v1::GetServerStatusResponse status = machine->server().Status();
  for (const v1::TierStatus& tier : status.tiers()) {
    for (const v1::TierPart& part : tier.parts()) {
      if (tier.tier() == "nvme" && part.part() == "state") taken = part.bytes();
    }
  }
  if (named <= taken) return;
  Broken(absl::StrCat("server ", server, "'s catalog names ", named, " bytes of states, and only ", taken,
                      " of them are taken: somebody else may write to the others"));
}

void ChangeChecks::CheckNoDamage(int server, Machine* machine) {
  const services::ServerFigures figures = machine->server().Figures();
  const auto job = figures.jobs.find(kJob);
  if (job == figures.jobs.end() || job->second->damaged_chunks == 0) return;
  Broken(absl::StrCat("server ", server, " says that ", job->second->damaged_chunks.load(), " chunks were damaged"));
}

void ChangeChecks::CameBack(int server, Machine* machine) {
  const absl::StatusOr<v1::GetJobResponse> job = machine->Describe();
  if (machine->off()) return;
  if (!job.ok() || job->state_lost()) {
    const absl::Status why = job.ok() ? machine->Cause() : job.status();
    return Broken(absl::StrCat("server ", server, " came back without its state: ", why.ToString()));
  }
  CheckNoDamage(server, machine);
  if (!job->has_open() || job->committed() < 0) return;
  const absl::StatusOr<model::EpochPlan> plan = model::EpochPlan::Make(job->open());
  if (!plan.ok())
    return Broken(absl::StrCat("server ", server, " has an Open without a plan: ", plan.status().ToString()));
  const uint64_t shards = static_cast<uint64_t>(job->open().table().shards_size());
  for (const model::Chunk& chunk : plan->layout().chunks()) {
    if (model::HasBit(job->filled_shards(), static_cast<uint32_t>(chunk.index % shards))) {
      CheckChunk(server, machine, chunk, job->committed(), job->has_prepared());
    }
    if (!kept() || machine->off()) return;
  }
}

ChangeChecks::Taken ChangeChecks::TakenBy(services::StateServer& server) {
  Taken taken;
  const v1::GetServerStatusResponse status = server.Status();
  for (const v1::TierStatus& tier : status.tiers()) {
    for (const v1::TierPart& part : tier.parts()) {
      // A log has its own length. An extent that is not written yet is spare.
      if (part.part() != "log") taken[tier.tier()] += part.bytes();
    }
  }
  return taken;
}

void ChangeChecks::CheckCatalog(int server, Machine* machine, const std::set<uint64_t>& chunks) {
  const std::unique_ptr<storage::Catalog> catalog = machine->catalog().Look();
  const auto entries = services::ReadEntries(*catalog);
  if (!entries.ok()) return Broken(absl::StrCat("server ", server, "'s catalog: ", entries.status().ToString()));
  const auto job = entries->find(kJob);
  if (job == entries->end()) return;
  for (const storage::DurableChunk& chunk : job->second.chunks) {
    if (chunks.contains(chunk.id)) continue;
    Broken(absl::StrCat("server ", server, "'s catalog has an entry of chunk ", chunk.id, ", which it gave up"));
  }
}

void ChangeChecks::Holds(int server, Machine* machine, const model::EpochPlan& plan, int64_t step, const Taken& alike) {
  const absl::StatusOr<uint32_t> member = plan.FindMember(ServerName(server));
  if (!member.ok()) return Broken(absl::StrCat("server ", server, " is no member in the end"));
  std::set<uint64_t> chunks;
  for (const model::Chunk& chunk : plan.layout().chunks()) {
    if (!plan.Has(*member, chunk.index)) continue;
    chunks.insert(chunk.index);
    CheckChunk(server, machine, chunk, step, /*ahead=*/false);
    if (!kept() || machine->off()) return;
  }
  for (const auto& [tier, bytes] : TakenBy(machine->server())) {
    const auto fresh = alike.find(tier);
    if (fresh == alike.end() || fresh->second == bytes) continue;
    Broken(absl::StrCat("server ", server, " takes ", bytes, " bytes of ", tier, " for ", chunks.size(),
                        " chunks, and a fresh one ", fresh->second));
  }
  CheckCatalog(server, machine, chunks);
  CheckNoDamage(server, machine);
}

void ChangeChecks::PullSomething(Machine* machine) {
  const auto& chunks = PlanOf(1).layout().chunks();
  const model::Chunk& chunk = chunks[random_->Below(chunks.size())];
  const int64_t version = std::max<int64_t>(0, reference_.last_step() - 1 + static_cast<int64_t>(random_->Below(3)));
  const int content =
      v1::CONTENT_WORKING + static_cast<int>(random_->Below(static_cast<uint64_t>(reference_.contents())));
  v1::PullRequest request = PullOf(chunk, version, content);
  const uint64_t begin = random_->Below(chunk.range.size());
  request.set_begin(chunk.range.begin + begin);
  request.set_end(request.begin() + 1 + random_->Below(std::min<uint64_t>(5000, chunk.range.size() - begin)));
  machine->Pull(request, [this, request, index = chunk.index](const absl::StatusOr<std::vector<std::byte>>& bits) {
    if (!bits.ok()) return;  // it does not have the chunk, or not this version
    ++pulls_;
    if (const auto wrong = Compare(request, index, *bits)) Broken(*wrong);
  });
}

}  // namespace ballast::sim
