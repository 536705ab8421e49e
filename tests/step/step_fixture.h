// A server's step machine, with a log and a host that only record calls. Further members of the epoch are mere names.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/model/epoch_plan.h"
#include "ballast/proto/model/verdict.h"
#include "ballast/services/step/step_machine.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ballast::services {

class RecordingHost : public StepJournal, public StepHost {
 public:
  uint64_t Append(const StepRecord& record) override {
    log.push_back(record);
    return log.size();
  }
  void Sync(uint64_t lsn) override { sync_wanted = std::max(sync_wanted, lsn); }
  v1::ChunkNorm Norm(uint64_t chunk, absl::string_view gradient_presence) override;
  void Apply(const v1::PreparedRecord& prepared, const v1::Decision& decision) override {
    applied.emplace_back(prepared, decision);
    calls.push_back("apply");
  }
  void Opened(std::shared_ptr<const model::EpochPlan>, const OpenChange&) override { ++opened; }
  void PinDue(int64_t version) override { calls.push_back(absl::StrCat("due ", version)); }
  void PinChanged(const v1::PinnedVersion& pin) override {
    calls.push_back(absl::StrCat(pin.automatic() || pin.requested() ? "keep " : "drop ", pin.version()));
  }

  std::vector<StepRecord> log;
  uint64_t sync_wanted = 0;
  bool overflow = false;
  std::vector<std::pair<v1::PreparedRecord, v1::Decision>> applied;
  int opened = 0;
  std::vector<std::string> calls;  // Apply, PinDue and PinChanged, in order
};

inline constexpr uint64_t kDisk = 77;  // of server "a"

v1::Epoch MakeEpoch(uint64_t counter, uint64_t nonce = 7);
v1::FenceRequest MakeFence(uint64_t counter, bool expect_empty = false);

// Two tensors in two units, two ranks, and only server "a" unless a test adds servers.
class StepMachineTest : public testing::Test {
 protected:
  StepMachineTest() : machine_(std::make_unique<StepMachine>("a", kDisk, &host_, &host_)) {}

  void SyncAll() { machine_->Synced(host_.log.size()); }
  v1::OpenRequest MakeOpen(uint64_t counter, int64_t base, uint32_t world_size = 2);
  // Fences, then opens with the machine's committed step as base.
  void Start(uint64_t counter, uint32_t world_size = 2);

  v1::StepHeader Values() const;
  v1::StepHeader Update(std::string gradient_presence = "\x03") const;
  // The slices that `rank` has to push for `kind`, in the open epoch.
  std::vector<v1::PushRequest> Slices(uint32_t rank, int64_t step, uint64_t attempt, v1::SliceKind kind) const;
  absl::Status Push(const v1::PushRequest& header);
  void PushAll(uint32_t rank, int64_t step, uint64_t attempt, const v1::StepHeader& header);
  v1::SealRequest MakeSeal(uint32_t rank, int64_t step, uint64_t attempt, const v1::StepHeader& header) const;
  // Pushes and seals everything for all ranks. The step is then prepared, but not yet synced.
  void PrepareStep(int64_t step, uint64_t attempt, const v1::StepHeader& header);
  v1::Decision DecisionOf(const v1::PreparedRecord& record) const;
  absl::StatusOr<v1::CommitResponse> Commit(const v1::Decision& decision);
  // Prepares, syncs and commits.
  void RunStep(int64_t step, const v1::StepHeader& header);
  // Replaces the machine by a new machine, recovered from the first `records` records of the log.
  void Restart(size_t records);

  uint64_t every_k_ = 0;  // 0: durability none
  std::vector<std::string> servers_ = {"a"};
  RecordingHost host_;
  std::unique_ptr<StepMachine> machine_;
};

MATCHER_P3(Fails, code, reason, part, "") {
  *result_listener << arg.ToString();
  return arg.code() == code && model::ReasonOf(arg) == reason &&
         std::string(arg.message()).find(part) != std::string::npos;
}

}  // namespace ballast::services
