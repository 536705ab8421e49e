#include "ballast/tests/services/trainer_group.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ballast/kernels/kernels.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/model/brief_open.h"
#include "ballast/proto/model/copies.h"
#include "ballast/proto/model/optimizer.h"
#include "ballast/proto/model/protocol.h"
#include "ballast/proto/model/step_header.h"
#include "ballast/proto/model/tiling.h"

namespace ballast::services {

std::vector<TestTensor> SmallModel() {
  return {{"embed", "u0", 70000, 0}, {"norm", "u0", 100, 1}, {"weight", "u1", 140000, 0}, {"bias", "u1", 300, 1}};
}

v1::JobSpec MakeSpec(const std::string& job, const std::vector<TestTensor>& tensors) {
  v1::JobSpec spec;
  spec.set_name(job);
  spec.set_chunk_elements(model::kChunkElementsMin);
  spec.set_optimizer(v1::OPTIMIZER_ADAMW);
  spec.set_gradient_dtype(v1::DTYPE_BF16);
  spec.set_working_dtype(v1::DTYPE_BF16);
  spec.set_durability(v1::DURABILITY_NONE);
  spec.set_group_count(2);
  Append(tensors, -1, &spec);
  return spec;
}

void Append(const std::vector<TestTensor>& tensors, int64_t version, v1::JobSpec* spec) {
  v1::Registration* registration = spec->add_registrations();
  registration->set_version(version);
  for (const TestTensor& t : tensors) {
    v1::TensorSpec* tensor = registration->add_tensors();
    tensor->set_name(t.name);
    tensor->set_unit(t.unit);
    tensor->add_shape(t.elements);
    tensor->set_group(t.group);
    tensor->set_frozen(t.frozen);
    tensor->set_assist(t.assist);
  }
}

std::string AllTensors(uint32_t tensors) {
  std::vector<uint32_t> all(tensors);
  for (uint32_t i = 0; i < tensors; ++i) all[i] = i;
  return model::MakeBitmap(tensors, all);
}

v1::StepHeader UpdateHeader(uint32_t tensors) {
  v1::StepHeader header;
  header.set_kind(v1::STEP_KIND_UPDATE);
  for (int group = 0; group < 2; ++group) {
    v1::GroupHyper* hyper = header.add_groups();
    hyper->set_learning_rate(1e-2 / (1 + group));
    hyper->set_beta1(0.9);
    hyper->set_beta2(0.95);
    hyper->set_epsilon(1e-8);
    hyper->set_weight_decay(group == 0 ? 0.1 : 0);
  }
  header.set_gradient_scale(0.5);
  header.set_max_norm(1);
  header.set_gradient_presence(AllTensors(tensors));
  header.set_value_presence(model::MakeBitmap(tensors, {}));
  return header;
}

v1::StepHeader ValuesHeader(uint32_t tensors) {
  v1::StepHeader header;
  header.set_kind(v1::STEP_KIND_VALUES);
  header.set_gradient_scale(1);
  header.set_gradient_presence(model::MakeBitmap(tensors, {}));
  header.set_value_presence(AllTensors(tensors));
  return header;
}

TrainerGroup::TrainerGroup(std::vector<StateServer*> servers, v1::JobSpec spec, uint32_t world_size,
                           uint64_t epoch_counter)
    : servers_(std::move(servers)), spec_(std::move(spec)), world_size_(world_size) {
  epoch_.set_counter(epoch_counter);
  epoch_.set_nonce(7);
  name_ = absl::StrCat("group ", epoch_counter);
}

absl::Status TrainerGroup::Start() {
  std::vector<v1::GetJobResponse> answers;
  BALLAST_RETURN_IF_ERROR(Fence(&answers));
  BALLAST_ASSIGN_OR_RETURN(const model::Resolution resolution, model::Resolve(answers));
  restores_ = resolution.restores;
  return Open(resolution.base, resolution.decision);
}

absl::Status TrainerGroup::OpenWith(const v1::Table& table, std::vector<StateServer*> members,
                                    const model::Found& found) {
  table_ = table;
  servers_ = std::move(members);
  tensor_steps_ = found.tensor_steps;
  return Open(found.base, found.decision);
}

absl::Status TrainerGroup::Fence(std::vector<v1::GetJobResponse>* answers) {
  for (StateServer* server : servers_) {
    v1::FenceRequest request;
    request.set_job(spec_.name());
    *request.mutable_epoch() = epoch_;
    request.set_protocol_version(model::kProtocolVersion);
    request.set_group(name_);
    Answer<v1::FenceResponse> answer;
    server->Fence(request, absl::Now() + absl::Seconds(55), answer.reply());
    BALLAST_ASSIGN_OR_RETURN(const v1::FenceResponse response, answer.Wait());
    has_spec_[server->server_id()] = response.job().open().spec_digest() == model::SpecDigest(spec_);
    answers->push_back(response.job());
  }
  return absl::OkStatus();
}

v1::OpenRequest TrainerGroup::open_request(int64_t base, const std::optional<v1::Decision>& decision) const {
  v1::OpenRequest request;
  *request.mutable_epoch() = epoch_;
  request.set_base(base);
  if (decision.has_value()) *request.mutable_base_decision() = *decision;
  if (restores_.has_value()) request.set_restores(*restores_);
  *request.mutable_spec() = spec_;
  request.set_spec_digest(model::SpecDigest(spec_));
  request.set_protocol_version(model::kProtocolVersion);
  *request.mutable_tiling() = model::EvenTiling(world_size_);
  if (table_.has_value()) {
    *request.mutable_table() = *table_;
    request.set_group(name_);
    request.mutable_tensor_steps()->Add(tensor_steps_.begin(), tensor_steps_.end());
    return request;
  }
  for (const StateServer* server : servers_) {
    v1::Member* member = request.add_members();
    member->set_server_id(server->server_id());
    member->set_weight(1);
  }
  return request;
}

absl::Status TrainerGroup::Open(int64_t base, const std::optional<v1::Decision>& decision) {
  const v1::OpenRequest request = open_request(base, decision);
  BALLAST_ASSIGN_OR_RETURN(model::EpochPlan plan, model::EpochPlan::Make(request));
  plan_ = std::make_unique<model::EpochPlan>(std::move(plan));
  step_ = base + 1;
  for (StateServer* server : servers_) {
    Answer<v1::OpenResponse> answer;
    const bool briefly = model::IsBrief(model::MakeBrief(request)) && has_spec_[server->server_id()];
    server->Open(briefly ? model::MakeBrief(request) : request, absl::Now() + absl::Seconds(55), answer.reply());
    BALLAST_RETURN_IF_ERROR(answer.Wait().status());
  }
  return absl::OkStatus();
}

std::string TrainerGroup::Payload(uint32_t slice, v1::SliceKind kind, const Fill& fill) const {
  const model::Slice& s = plan_->slices()[slice];
  const bool value = kind == v1::SLICE_KIND_VALUE;
  // Padding holds rubbish: servers must not look at it.
  std::vector<float> elements(s.range.size(), 12345.0f);
  for (const uint32_t index : plan_->layout().units()[s.unit].tensors) {
    const model::Tensor& tensor = plan_->layout().tensors()[index];
    const model::Range part = model::Intersect(tensor.range, s.range);
    for (uint64_t i = part.begin; i < part.end; ++i) elements[i - s.range.begin] = fill(index, i - tensor.range.begin);
  }
  std::string payload(elements.size() * (value ? 4 : 2), '\0');
  if (value) {
    std::memcpy(payload.data(), elements.data(), payload.size());
  } else {
    std::vector<kernels::bf16> rounded(elements.size());
    kernels::Bf16FromF32(elements, absl::MakeSpan(rounded));
    std::memcpy(payload.data(), rounded.data(), payload.size());
  }
  return payload;
}

v1::PushRequest TrainerGroup::PushHeader(uint32_t slice, v1::SliceKind kind, const std::string& payload) const {
  const model::Slice& s = plan_->slices()[slice];
  v1::PushRequest request;
  request.set_job(spec_.name());
  *request.mutable_epoch() = epoch_;
  request.set_step(step_);
  request.set_attempt(attempt_);
  request.set_rank(s.rank);
  request.set_kind(kind);
  request.set_unit(s.unit);
  request.set_begin(s.range.begin);
  request.set_end(s.range.end);
  if (checksum_ == Checksum::kNone) return request;
  request.set_crc32c(
      kernels::Crc32c(absl::MakeConstSpan(reinterpret_cast<const std::byte*>(payload.data()), payload.size())));
  return request;
}

Answer<v1::PushResponse> TrainerGroup::BeginPushSlice(uint32_t slice, v1::SliceKind kind, const Fill& fill) {
  return BeginPushSlice(slice, kind, fill, server_of(plan_->slices()[slice].chunk));
}

Answer<v1::PushResponse> TrainerGroup::BeginPushSlice(uint32_t slice, v1::SliceKind kind, const Fill& fill,
                                                      StateServer* server) {
  payloads_.push_back(std::make_unique<std::string>(Payload(slice, kind, fill)));
  const std::string& payload = *payloads_.back();
  const auto bytes = absl::MakeConstSpan(reinterpret_cast<const std::byte*>(payload.data()), payload.size());
  PushedBytes::Pieces pieces = {bytes};
  if (slice % 2 == 1) {  // as gRPC gives it: in pieces that end anywhere
    pieces.clear();
    for (size_t at = 0; at < bytes.size(); at += pieces.back().size())
      pieces.push_back(bytes.subspan(at, 1 + at % 509));
  }
  Answer<v1::PushResponse> answer;
  server->Push(PushHeader(slice, kind, payload), PushedBytes(std::move(pieces)), absl::Now() + absl::Seconds(50),
               answer.reply(), checksum_);
  return answer;
}

absl::Status TrainerGroup::PushSlice(uint32_t slice, v1::SliceKind kind, const Fill& fill) {
  const uint64_t chunk = plan_->slices()[slice].chunk;
  for (const absl::Span<const uint32_t> members : {plan_->holders_of(chunk), plan_->fillers_of(chunk)}) {
    for (const uint32_t member : members) {
      const absl::Status status = BeginPushSlice(slice, kind, fill, servers_[member]).Wait().status();
      payloads_.pop_back();
      BALLAST_RETURN_IF_ERROR(status);
    }
  }
  return absl::OkStatus();
}

absl::Status TrainerGroup::PushAll(v1::SliceKind kind, const std::string& presence, const Fill& fill) {
  for (uint32_t i = 0; i < plan_->slices().size(); ++i) {
    if (plan_->Touches(plan_->slices()[i], presence)) BALLAST_RETURN_IF_ERROR(PushSlice(i, kind, fill));
  }
  return absl::OkStatus();
}

v1::SealRequest TrainerGroup::SealOf(uint32_t rank, const v1::StepHeader& header, uint32_t wait_ms) const {
  const std::vector<std::string> blobs(world_size_, "cursor");
  v1::SealRequest request;
  request.set_job(spec_.name());
  *request.mutable_epoch() = epoch_;
  request.set_step(step_);
  request.set_attempt(attempt_);
  request.set_rank(rank);
  request.set_plan_hash(model::PlanHash(*plan_, step_, attempt_, header, blobs));
  *request.mutable_header() = header;
  if (rank == 0) request.mutable_blobs()->Assign(blobs.begin(), blobs.end());
  request.set_wait_ms(wait_ms);
  return request;
}

absl::StatusOr<std::vector<v1::PreparedRecord>> TrainerGroup::SealAll(const v1::StepHeader& header) {
  std::vector<v1::PreparedRecord> records;
  told_.clear();
  for (StateServer* server : servers_) {
    std::vector<Answer<v1::SealResponse>> answers(world_size_);
    for (uint32_t rank = 0; rank < world_size_; ++rank) {
      server->Seal(SealOf(rank, header, 50'000), absl::Now() + absl::Seconds(55), answers[rank].reply());
    }
    for (uint32_t rank = 0; rank < world_size_; ++rank) {
      BALLAST_ASSIGN_OR_RETURN(const v1::SealResponse response, answers[rank].Wait());
      if (!response.has_prepared()) return absl::InternalError(response.ShortDebugString());
      if (rank != 0) continue;
      records.push_back(response.prepared());
      told_[response.prepared().server_id()] = response.digests();
    }
  }
  return records;
}

absl::Status TrainerGroup::Commit(const v1::Decision& decision) {
  std::vector<model::ToldDigests> told;
  for (const auto& [id, digests] : told_) told.push_back({id, &digests});
  const std::vector<v1::DifferingCopies> differing = model::FindDiffering(told);
  for (StateServer* server : servers_) {
    v1::CommitRequest request;
    request.set_job(spec_.name());
    *request.mutable_decision() = decision;
    request.mutable_differing()->Add(differing.begin(), differing.end());
    Answer<v1::CommitResponse> answer;
    server->Commit(request, answer.reply());
    BALLAST_RETURN_IF_ERROR(answer.Wait().status());
  }
  ++step_;
  attempt_ = 0;
  return absl::OkStatus();
}

absl::StatusOr<v1::Decision> TrainerGroup::Finish(const v1::StepHeader& header) {
  BALLAST_ASSIGN_OR_RETURN(const std::vector<v1::PreparedRecord> records, SealAll(header));
  BALLAST_ASSIGN_OR_RETURN(v1::Decision decision, model::Decide(records));
  BALLAST_RETURN_IF_ERROR(Commit(decision));
  return decision;
}

absl::Status TrainerGroup::Initialise(const Fill& fill) {
  const uint32_t tensors = plan_->layout().tensors().size();
  BALLAST_RETURN_IF_ERROR(PushAll(v1::SLICE_KIND_VALUE, AllTensors(tensors), fill));
  return Finish(ValuesHeader(tensors)).status();
}

Answer<uint32_t> TrainerGroup::Pull(StateServer* server, const v1::PullRequest& request, absl::Time deadline,
                                    std::string* to) const {
  Answer<uint32_t> answer;
  server->Pull(
      request, deadline,
      [to](uint64_t bytes, const AnswerRoom::Lease&) {
        to->resize(bytes);
        return absl::MakeSpan(reinterpret_cast<std::byte*>(to->data()), bytes);
      },
      answer.reply());
  return answer;
}

absl::StatusOr<std::vector<float>> TrainerGroup::Read(uint32_t tensor, v1::Content content, int64_t version) {
  const model::Tensor& t = plan_->layout().tensors()[tensor];
  BALLAST_ASSIGN_OR_RETURN(const auto pieces, plan_->layout().Cut(t.unit, t.range));
  std::vector<float> out;
  for (const model::Layout::Piece& piece : pieces) {
    v1::PullRequest request;
    request.set_job(spec_.name());
    request.set_version(version);
    request.set_content(content);
    request.set_unit(t.unit);
    request.set_begin(piece.range.begin);
    request.set_end(piece.range.end);
    std::string bytes;
    const auto crc = Pull(server_of(piece.chunk), request, absl::Now() + absl::Seconds(50), &bytes).Wait();
    if (!crc.ok()) return crc.status();
    if (*crc != kernels::Crc32c(absl::MakeConstSpan(reinterpret_cast<const std::byte*>(bytes.data()), bytes.size()))) {
      return absl::DataLossError("CRC32C");
    }
    std::vector<float> part(piece.range.size());
    if (content == v1::CONTENT_WORKING) {
      BALLAST_ASSIGN_OR_RETURN(const kernels::OptimizerSpec optimizer, model::OptimizerOf(spec_));
      kernels::ToF32(optimizer.working, reinterpret_cast<const std::byte*>(bytes.data()), absl::MakeSpan(part));
    } else {
      std::memcpy(part.data(), bytes.data(), bytes.size());
    }
    out.insert(out.end(), part.begin(), part.end());
  }
  return out;
}

namespace {

template <typename Request>
Request DurablePin(const std::string& job, const std::optional<v1::Epoch>& epoch, int64_t version) {
  Request request;
  request.set_job(job);
  request.set_version(version);
  request.set_durable(true);
  if (epoch.has_value()) *request.mutable_epoch() = *epoch;
  return request;
}

}  // namespace

absl::Status PinDurably(StateServer* server, const std::string& job, const std::optional<v1::Epoch>& epoch,
                        int64_t version) {
  Answer<v1::PinResponse> pinned;
  server->Pin(DurablePin<v1::PinRequest>(job, epoch, version), absl::InfiniteFuture(), pinned.reply());
  return pinned.Wait().status();
}

absl::Status UnpinDurably(StateServer* server, const std::string& job, const std::optional<v1::Epoch>& epoch,
                          int64_t version) {
  Answer<v1::UnpinResponse> unpinned;
  server->Unpin(DurablePin<v1::UnpinRequest>(job, epoch, version), unpinned.reply());
  return unpinned.Wait().status();
}

void AwaitIdle(StateServer* server, const std::string& job) {
  const auto busy = [&] {
    const v1::GetServerStatusResponse all = server->Status();
    return std::any_of(all.jobs().begin(), all.jobs().end(),
                       [&](const v1::JobStatus& status) { return status.name() == job && status.queued_steps() > 0; });
  };
  for (const absl::Time end = absl::Now() + absl::Minutes(1); busy();) {
    ASSERT_LT(absl::Now(), end) << "the steps of job '" << job << "' are not applied";
    absl::SleepFor(absl::Milliseconds(1));
  }
}

TestServer::TestServer(const std::string& id, storage::TierBytes budget) {
  options_.data_directory = directory_.path();
  options_.budget = budget;
  options_.server_id = id;
  options_.staging_bytes =
      (uint64_t{1} << 20) + storage::StateLayout().StateBytes(model::kChunkElementsMin);  // the least that works
  Restart();
}

void TestServer::End() { server_.reset(); }

void TestServer::Restart() {
  End();
  auto started = StateServer::Start(options_);
  EXPECT_TRUE(started.ok()) << started.status();
  if (started.ok()) server_ = *std::move(started);
}

}  // namespace ballast::services
