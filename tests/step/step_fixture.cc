#include "ballast/tests/step/step_fixture.h"

#include <algorithm>

#include "ballast/proto/model/protocol.h"
#include "ballast/proto/model/step_header.h"
#include "ballast/proto/model/tiling.h"

namespace ballast::services {

v1::FenceRequest MakeFence(uint64_t counter, bool expect_empty) {
  v1::FenceRequest fence;
  *fence.mutable_epoch() = MakeEpoch(counter);
  fence.set_expect_empty(expect_empty);
  return fence;
}

v1::Epoch MakeEpoch(uint64_t counter, uint64_t nonce) {
  v1::Epoch epoch;
  epoch.set_counter(counter);
  epoch.set_nonce(nonce);
  return epoch;
}

v1::ChunkNorm RecordingHost::Norm(uint64_t chunk, absl::string_view gradient_presence) {
  v1::ChunkNorm norm;
  norm.set_chunk(chunk);
  norm.set_overflow(overflow);
  v1::SegmentNorm* segment = norm.add_segments();
  segment->set_tensor(static_cast<uint32_t>(chunk));
  segment->set_squared_norm(2);
  return norm;
}

v1::OpenRequest StepMachineTest::MakeOpen(uint64_t counter, int64_t base, uint32_t world_size) {
  v1::OpenRequest open;
  *open.mutable_epoch() = MakeEpoch(counter);
  open.set_base(base);
  v1::JobSpec* spec = open.mutable_spec();
  spec->set_name("job");
  spec->set_chunk_elements(65536);
  spec->set_optimizer(v1::OPTIMIZER_ADAMW);
  spec->set_gradient_dtype(v1::DTYPE_BF16);
  spec->set_working_dtype(v1::DTYPE_BF16);
  spec->set_durability(every_k_ > 0 ? v1::DURABILITY_EVERY_K : v1::DURABILITY_NONE);
  spec->set_pin_interval(every_k_);
  spec->set_group_count(1);
  v1::Registration* batch = spec->add_registrations();
  batch->set_version(-1);
  for (const char* name : {"first", "second"}) {
    v1::TensorSpec* tensor = batch->add_tensors();
    tensor->set_name(name);
    tensor->set_unit(name);
    tensor->add_shape(1024);
  }
  for (const std::string& server : servers_) {
    v1::Member* member = open.add_members();
    member->set_server_id(server);
    member->set_weight(1);
  }
  *open.mutable_tiling() = model::EvenTiling(world_size);
  open.set_spec_digest(model::SpecDigest(*spec));
  open.set_protocol_version(model::kProtocolVersion);
  return open;
}

void StepMachineTest::Start(uint64_t counter, uint32_t world_size) {
  v1::FenceRequest fence;
  *fence.mutable_epoch() = MakeEpoch(counter);
  ASSERT_TRUE(machine_->Fence(fence).ok());
  SyncAll();
  v1::OpenRequest open = MakeOpen(counter, machine_->committed(), world_size);
  if (machine_->committed() >= 0) *open.mutable_base_decision() = machine_->Describe().decision();
  const auto opened = machine_->Open(open);
  ASSERT_TRUE(opened.ok()) << opened.status();
  ASSERT_TRUE(opened->has_value());
}

v1::StepHeader StepMachineTest::Values() const {
  v1::StepHeader header;
  header.set_kind(v1::STEP_KIND_VALUES);
  header.set_gradient_scale(1);
  header.set_gradient_presence(std::string(1, '\0'));
  header.set_value_presence("\x03");
  return header;
}

v1::StepHeader StepMachineTest::Update(std::string gradient_presence) const {
  v1::StepHeader header;
  header.set_kind(v1::STEP_KIND_UPDATE);
  header.set_gradient_scale(1);
  header.set_gradient_presence(std::move(gradient_presence));
  header.set_value_presence(std::string(1, '\0'));
  header.add_groups()->set_learning_rate(0.1);
  return header;
}

std::vector<v1::PushRequest> StepMachineTest::Slices(uint32_t rank, int64_t step, uint64_t attempt,
                                                     v1::SliceKind kind) const {
  std::vector<v1::PushRequest> headers;
  const model::EpochPlan& plan = *machine_->plan();
  for (const uint32_t index : plan.slices_of_rank(rank)) {
    const model::Slice& slice = plan.slices()[index];
    v1::PushRequest header;
    header.set_job("job");
    *header.mutable_epoch() = plan.open().epoch();
    header.set_step(step);
    header.set_attempt(attempt);
    header.set_rank(rank);
    header.set_kind(kind);
    header.set_unit(slice.unit);
    header.set_begin(slice.range.begin);
    header.set_end(slice.range.end);
    header.set_crc32c(static_cast<uint32_t>(1000 * step + 100 * static_cast<int64_t>(attempt) + index));
    headers.push_back(std::move(header));
  }
  return headers;
}

absl::Status StepMachineTest::Push(const v1::PushRequest& header) {
  const auto admission = machine_->Admit(header, [](uint32_t) { return true; });
  if (!admission.ok()) return admission.status();
  if (*admission == StepMachine::Admission::kHeld) return absl::OkStatus();
  return machine_->EndPush(header, absl::OkStatus());
}

void StepMachineTest::PushAll(uint32_t rank, int64_t step, uint64_t attempt, const v1::StepHeader& header) {
  const model::EpochPlan& plan = *machine_->plan();
  const auto push = [&](v1::SliceKind kind, const std::string& presence) {
    for (const v1::PushRequest& slice : Slices(rank, step, attempt, kind)) {
      const auto index = plan.FindSlice(rank, slice.unit(), {slice.begin(), slice.end()});
      if (!plan.Touches(plan.slices()[*index], presence)) continue;
      if (!plan.Has(*plan.FindMember("a"), plan.slices()[*index].chunk)) continue;
      const absl::Status status = Push(slice);
      ASSERT_TRUE(status.ok()) << status;
    }
  };
  push(v1::SLICE_KIND_GRADIENT, header.gradient_presence());
  push(v1::SLICE_KIND_VALUE, header.value_presence());
}

v1::SealRequest StepMachineTest::MakeSeal(uint32_t rank, int64_t step, uint64_t attempt,
                                          const v1::StepHeader& header) const {
  const model::EpochPlan& plan = *machine_->plan();
  v1::SealRequest seal;
  *seal.mutable_epoch() = plan.open().epoch();
  seal.set_step(step);
  seal.set_attempt(attempt);
  seal.set_rank(rank);
  *seal.mutable_header() = header;
  for (uint32_t r = 0; r < plan.world_size(); ++r) seal.add_blobs(absl::StrCat("blob of rank ", r));
  const std::vector<std::string> blobs(seal.blobs().begin(), seal.blobs().end());
  seal.set_plan_hash(model::PlanHash(plan, step, attempt, header, blobs));
  return seal;
}

void StepMachineTest::PrepareStep(int64_t step, uint64_t attempt, const v1::StepHeader& header) {
  for (uint32_t rank = 0; rank < machine_->plan()->world_size(); ++rank) {
    PushAll(rank, step, attempt, header);
    const auto sealed = machine_->Seal(MakeSeal(rank, step, attempt, header));
    ASSERT_TRUE(sealed.ok()) << sealed.status();
  }
}

v1::Decision StepMachineTest::DecisionOf(const v1::PreparedRecord& record) const { return *model::Decide({record}); }

absl::StatusOr<v1::CommitResponse> StepMachineTest::Commit(const v1::Decision& decision) {
  v1::CommitRequest request;
  *request.mutable_decision() = decision;
  return machine_->Commit(request);
}

void StepMachineTest::RunStep(int64_t step, const v1::StepHeader& header) {
  PrepareStep(step, 0, header);
  SyncAll();
  ASSERT_TRUE(machine_->Describe().has_prepared());
  const auto committed = Commit(DecisionOf(machine_->Describe().prepared()));
  ASSERT_TRUE(committed.ok()) << committed.status();
}

void StepMachineTest::Restart(size_t records) {
  host_.log.resize(records);
  host_.applied.clear();
  machine_ = std::make_unique<StepMachine>("a", kDisk, &host_, &host_);
  for (const StepRecord& record : host_.log) {
    const absl::Status status = machine_->Replay(record);
    ASSERT_TRUE(status.ok()) << status;
  }
  machine_->Synced(records);
}

}  // namespace ballast::services
