// Stands up the core of a job with its journal and store, on one thread and without a server, for tests of the other
// parts. What is posted to the job's threads runs when the test says so.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <deque>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "ballast/kernels/kernels.h"
#include "ballast/proto/model/optimizer.h"
#include "ballast/proto/model/protocol.h"
#include "ballast/proto/model/step_header.h"
#include "ballast/proto/model/verdict.h"
#include "ballast/services/job/pushes.h"
#include "ballast/services/job/step_work.h"
#include "ballast/services/job_state/import_pace.h"
#include "ballast/services/job_state/job_core.h"
#include "ballast/services/job_state/slice_room.h"
#include "ballast/services/job_state/state_form.h"
#include "ballast/services/job_state/surroundings.h"
#include "ballast/services/journal/job_journal.h"
#include "ballast/tests/services/answer.h"
#include "ballast/tests/services/asked_chunks.h"
#include "ballast/tests/services/job_state.h"
#include "ballast/tests/services/one_thread.h"
#include "ballast/tests/sim_disk/sim_disk.h"

namespace ballast::services {

// One rank, and one server, "s".
class JobPartTest : public testing::Test, protected StepHost {
 protected:
  static constexpr auto kGradient = v1::SLICE_KIND_GRADIENT, kValue = v1::SLICE_KIND_VALUE;

  // Durability and frozen tensors are the test's choice, in `spec_`, before Open.
  JobPartTest() { core_.SetOwner(alive_); }
  ~JobPartTest() override {
    EndTimers();
    core_.JoinThreads();
    journal_.Stop();
  }
  // Before a part ends that has timers: none begins from here on, and none is under way.
  void EndTimers() {
    const std::weak_ptr<int> alive = std::exchange(alive_, nullptr);
    while (!alive.expired()) absl::SleepFor(absl::Milliseconds(1));
  }

  JobSurroundings Around() {
    JobSurroundings around;
    around.server_id = "s";
    around.catalog = &catalog_;
    around.tiers = tiers_.get();
    around.foundation = &thread_;
    around.compute = &compute_;
    around.answers = around.step_answers = answers_.get();
    around.deadlines = &deadlines_;
    around.counters = &counters_;
    around.waiting = {&requests_max_, &bytes_max_};
    around.push_bytes = &push_bytes_;
    around.answer_room = &answer_room_;
    around.moving = &moving_;
    around.chunk_source = &asked_chunks_;
    around.import_pace = &*import_pace_;
    return around;
  }
  void RunAll() { thread_.RunAll(); }
  // `body` under the job's lock; then what it made possible.
  template <typename Body>
  void Locked(Body body) {
    core_.Locked([&](Replies* replies) {
      core_.mu.AssertHeld();
      if constexpr (std::is_invocable_v<Body, Replies*>) {
        body(replies);
      } else {
        body();
      }
    });
  }

  // A group with the next epoch fences and opens the job.
  void Fence() {
    v1::FenceRequest fence;
    fence.set_job("job");
    fence.mutable_epoch()->set_counter(++epoch_);
    fence.set_group(group_);
    fence.set_protocol_version(model::kProtocolVersion);
    bool done = false;
    for (int i = 0; i < 3 && !done; ++i) {
      Locked([&] {
        ASSERT_EQ(journal_.MakeRoom(1, kSmallRecordBytesMax), absl::OkStatus());
        const auto fenced = core_.machine->Fence(fence);
        ASSERT_TRUE(fenced.ok()) << fenced.status();
        done = fenced->has_value();
      });
      RunAll();
    }
    ASSERT_TRUE(done);
  }
  void Open(uint32_t world_size = 1) {
    Fence();
    v1::OpenRequest open = OpenOf(spec_, world_size);
    if (table_.has_value()) {
      open.clear_members();
      *open.mutable_table() = *table_;
      open.set_group(group_);
    }
    open.mutable_epoch()->set_counter(epoch_);
    SendOpen(open);
  }
  // The fenced epoch. The base is the server's, unless the open has one.
  void SendOpen(v1::OpenRequest open) {
    bool done = false;
    for (int i = 0; i < 3 && !done; ++i) {
      Locked([&] {
        if (!open.has_base_decision()) open.set_base(core_.machine->committed());
        if (open.base() >= 0 && !open.has_base_decision()) {
          *open.mutable_base_decision() = core_.machine->Describe().decision();
        }
        ASSERT_EQ(journal_.MakeRoom(1, open.ByteSizeLong() + kSmallRecordBytesMax), absl::OkStatus());
        const auto opened = core_.machine->Open(open);
        ASSERT_TRUE(opened.ok()) << opened.status();
        done = opened->has_value();
      });
      RunAll();
    }
    ASSERT_TRUE(done);
  }
  const model::EpochPlan& plan() {
    JobMutexLock lock(&core_.mu);
    return *core_.state.plan();
  }

  // A push of a slice, each element `value`. The payload lives as long as the test.
  struct Push {
    v1::PushRequest header;
    absl::Span<const std::byte> payload;
    Answer<v1::PushResponse> answer;
  };
  Push PushOf(uint32_t slice, v1::SliceKind kind, float value) {
    const model::Slice& s = plan().slices()[slice];
    std::vector<float> elements(s.range.size(), value);
    std::string& bytes = payloads_.emplace_back(elements.size() * (kind == v1::SLICE_KIND_VALUE ? 4 : 2), '\0');
    if (kind == v1::SLICE_KIND_VALUE) {
      std::memcpy(bytes.data(), elements.data(), bytes.size());
    } else {
      std::vector<kernels::bf16> rounded(elements.size());
      kernels::Bf16FromF32(elements, absl::MakeSpan(rounded));
      std::memcpy(bytes.data(), rounded.data(), bytes.size());
    }
    Push push;
    push.payload = {reinterpret_cast<const std::byte*>(bytes.data()), bytes.size()};
    push.header.set_job("job");
    push.header.mutable_epoch()->set_counter(epoch_);
    push.header.set_step(step_);
    push.header.set_rank(s.rank);
    push.header.set_kind(kind);
    push.header.set_unit(s.unit);
    push.header.set_begin(s.range.begin);
    push.header.set_end(s.range.end);
    push.header.set_crc32c(kernels::Crc32c(push.payload));
    return push;
  }
  void Send(Push* push, Checksum checksum = Checksum::kCrc32c) {
    pushes_.Push(push->header, push->payload, absl::InfiniteFuture(), push->answer.reply(), checksum);
  }
  absl::Status PushSlice(uint32_t slice, v1::SliceKind kind, float value) {
    Push push = PushOf(slice, kind, value);
    Send(&push);
    RunAll();
    return push.answer.Wait().status();
  }

  v1::SealRequest SealOf(const v1::StepHeader& header) {
    const std::vector<std::string> blobs = {"cursor"};
    v1::SealRequest seal;
    seal.set_job("job");
    seal.mutable_epoch()->set_counter(epoch_);
    seal.set_step(step_);
    *seal.mutable_header() = header;
    seal.add_blobs("cursor");
    seal.set_plan_hash(model::PlanHash(plan(), step_, 0, header, blobs));
    return seal;
  }
  // Seals until the step is prepared. All of its slices have been pushed.
  std::optional<v1::PreparedRecord> Prepare(const v1::StepHeader& header) {
    const v1::SealRequest seal = SealOf(header);
    std::optional<v1::PreparedRecord> record;
    for (int i = 0; i < 3 && !record.has_value(); ++i) {
      Locked([&] {
        EXPECT_EQ(journal_.MakeRoomForSeal(seal), absl::OkStatus());
        const auto answer = core_.machine->Seal(seal);
        ASSERT_TRUE(answer.ok()) << answer.status();
        if (*answer != nullptr && (**answer)->has_prepared()) record = (**answer)->prepared();
      });
      RunAll();
    }
    EXPECT_TRUE(record.has_value());
    return record;
  }
  // A whole step: values, or gradients, of all tensors, each element `value`.
  void Step(const v1::StepHeader& header, float value) {
    const bool values = header.kind() == v1::STEP_KIND_VALUES;
    for (uint32_t i = 0; i < plan().slices().size(); ++i) {
      ASSERT_EQ(PushSlice(i, values ? v1::SLICE_KIND_VALUE : v1::SLICE_KIND_GRADIENT, value), absl::OkStatus());
    }
    const std::optional<v1::PreparedRecord> record = Prepare(header);
    ASSERT_TRUE(record.has_value());
    Commit(*record);
  }
  void Commit(const v1::PreparedRecord& record) {
    const auto decision = model::Decide({record});
    ASSERT_TRUE(decision.ok()) << decision.status();
    Locked([&](Replies* replies) {
      v1::CommitRequest commit;
      *commit.mutable_decision() = *decision;
      ASSERT_EQ(journal_.MakeRoom(1, commit.ByteSizeLong() + kSmallRecordBytesMax), absl::OkStatus());
      const auto committed = core_.machine->Commit(commit);
      ASSERT_TRUE(committed.ok()) << committed.status();
      for (const auto& chunk : core_.state.chunks()) {
        core_.waiting.Wake(&chunk->pulls, replies);
        core_.WakePushes(chunk.get(), replies);
      }
    });
    ++step_;
    RunAll();
  }
  void StepOfValues(float value) { Step(ValuesHeader(tensors()), value); }
  uint32_t tensors() const { return static_cast<uint32_t>(SmallModel().size()); }
  uint64_t committed() {
    JobMutexLock lock(&core_.mu);
    return static_cast<uint64_t>(core_.machine->committed());
  }

  // StepHost: a decided step changes its chunks at once.
  v1::ChunkNorm Norm(uint64_t chunk, absl::string_view presence) override {
    core_.mu.AssertHeld();
    return (*core_.state.Held(chunk))->intake.Norm(presence);
  }
  void Apply(const v1::PreparedRecord& prepared, const v1::Decision& decision) override {
    core_.mu.AssertHeld();
    const StepWork work = WorkOf({.chunks = core_.state.chunks(),
                                  .layout = &core_.state.store()->layout(),
                                  .seed = 0,
                                  .tensor_steps = core_.machine->tensor_steps(),
                                  .lent = core_.state.lent().get(),
                                  .logged = false},
                                 prepared, decision);
    if (core_.state.lent() != nullptr) core_.state.lent()->applied = true;
    (void)ballast::services::Commit(work, core_.state.chunks(), /*release_idle=*/false);
    EXPECT_EQ(core_.state.store()->Run(work.updates, [](size_t) {}), absl::OkStatus());
    for (const auto& chunk : work.touched) {
      chunk->BeginUpdate();
      chunk->EndUpdate(work.step);
    }
    for (const auto& chunk : work.untouched) chunk->Reach(work.step);
  }
  void Opened(std::shared_ptr<const model::EpochPlan> plan, const OpenChange& change) override {
    core_.mu.AssertHeld();
    if (core_.state.store() == nullptr) MakeStore(*plan);
    std::vector<uint64_t> indices;
    for (const model::Chunk& chunk : plan->layout().chunks()) {
      indices.push_back(chunk.index);
      chunks_[chunk.index]->Register(-1);
    }
    core_.state.Open(std::move(plan), chunks_, indices, change.keeps_slices);
    journal_.Opened(change.keeps_slices);
  }
  bool KeepsSlices() const override { return true; }
  void PinDue(int64_t) override {
    if (on_pin_due_) on_pin_due_();
  }
  void PinChanged(const v1::PinnedVersion& pin) override {
    if (on_pin_changed_) on_pin_changed_(pin);
  }

  v1::JobSpec spec_ = MakeSpec("job", SmallModel());
  std::optional<v1::Table> table_;  // of Open
  std::string group_ = "g";         // of Open, with a table
  bool working_copies_ = true;
  bool durable_ = false;                                                         // the store
  std::function<absl::Status(absl::Span<const storage::DurableChunk>)> record_;  // as DurableOptions'
  std::function<void()> on_pin_due_;
  std::function<void(const v1::PinnedVersion&)> on_pin_changed_;

  uint64_t epoch_ = 0;
  int64_t step_ = 0;
  std::deque<std::string> payloads_;
  storage::SimDisk disk_{1};
  OneThread thread_{&disk_};
  MapCatalog catalog_;
  std::unique_ptr<storage::Tiers> tiers_ =
      *storage::Tiers::Open({.budget = {.dram = uint64_t{64} << 20, .nvme = uint64_t{64} << 20},
                             .directory = std::filesystem::temp_directory_path(),
                             .disk = &disk_});
  kernels::ThreadPool compute_{1};
  Deadlines deadlines_;
  ServerCounters counters_;
  std::atomic<uint64_t> count_{0}, bytes_{0}, pushed_{0};
  SharedBound requests_max_{100, &count_}, bytes_max_{1 << 20, &bytes_}, push_bytes_{uint64_t{1} << 20, &pushed_};
  AnswerRoom answer_room_{uint64_t{1} << 20};
  MoveGate moving_;
  AskedChunks asked_chunks_;
  std::optional<ImportPace> import_pace_{std::in_place, ImportPace::Rates{}};
  const std::unique_ptr<Executor> answers_ = thread_.MakeExecutor(1);
  std::shared_ptr<int> alive_ = std::make_shared<int>();
  HeldChunks chunks_;
  int flushes_posted_ = 0;
  JobJournal journal_{"job", &core_, &room_, [this] { ++flushes_posted_; }};
  JobCore core_{"job", Around(), &journal_, journal_.promises(), this, [](uint64_t) {}};
  SliceRoom room_{&core_};
  Pushes pushes_{&core_, &journal_, &room_};

 private:
  void MakeStore(const model::EpochPlan& plan) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) {
    const kernels::OptimizerSpec optimizer = *model::OptimizerOf(spec_);
    std::optional<storage::DurableOptions> durable;
    if (durable_) durable = {.job = "job", .life = journal_.life(), .record = record_};
    const auto store = std::make_shared<storage::ChunkStore>(
        tiers_.get(), storage::StateLayout(optimizer, working_copies_), &compute_, std::move(durable));
    std::vector<storage::ChunkToAdd> added;
    storage::Plan placed;
    const auto memory = std::make_shared<SliceMemory>(tiers_.get());
    for (const model::Chunk& chunk : plan.layout().chunks()) {
      added.push_back({.elements = chunk.range.size(), .id = chunk.index, .form = FormOf(chunk)});
      placed.chunks.push_back({.state = storage::TierKind::kDram});
      chunks_.push_back(std::make_shared<HeldChunk>(memory, chunks_.size(), chunk.index, chunk.range.size(),
                                                    FormOf(chunk), optimizer, /*logged=*/false));
    }
    ASSERT_EQ(store->Add(added, placed), absl::OkStatus());
    core_.state.Replace(store);
    room_.SetMemory(memory);
  }
};

}  // namespace ballast::services
