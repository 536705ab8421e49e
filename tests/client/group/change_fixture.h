// A job on servers that say what the test wants, and an etcd of the test's own, for tests of how a group changes its
// servers.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "ballast/client/group/change.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/model/brief_open.h"
#include "ballast/proto/model/next_table.h"
#include "ballast/proto/model/protocol.h"
#include "ballast/proto/model/table.h"
#include "ballast/proto/model/verdict.h"
#include "ballast/proto/model/wish.h"
#include "ballast/tests/client/fake_server.h"
#include "ballast/tests/client/transport/small_etcd.h"

namespace ballast::client {

inline constexpr int kShards = 12;

inline v1::Epoch At(uint64_t counter) {
  v1::Epoch epoch;
  epoch.set_counter(counter);
  return epoch;
}

inline absl::Time Soon() { return absl::Now() + absl::Seconds(60); }

inline absl::Status NoRoom(const std::string& why = "1000 bytes are short in dram") {
  return model::Error(absl::StatusCode::kResourceExhausted, model::kBudget, why);
}

// Job "job" on s0, s1 and s2, with two copies, at step 4; s3 and s4 are registered too. Server i has disk 100 + i.
class ChangeTest : public testing::Test {
 protected:
  ChangeTest() : servers_(5), registry_(etcd_.Connect()), key_(&registry_, "job"), members_(servers_.router.get()) {
    options_.job = "job";
    options_.failover_after = absl::Seconds(2);
    options_.progress = [this](const std::string& line) { lines_.push_back(line); };
    open_ = OpenOnFakes(0, 1);
    open_.mutable_epoch()->set_counter(1);
    std::vector<v1::Member> founders;
    for (int i = 0; i < 5; ++i) {
      FakeServer& server = servers_[static_cast<size_t>(i)];
      server.disk = 100 + static_cast<uint64_t>(i);
      v1::Member member;
      member.set_server_id(server.name());
      member.set_disk(server.disk);
      member.set_weight(1);
      if (i < 3) founders.push_back(member);
      server.on_get_job = [this, i](const v1::GetJobRequest&) -> absl::StatusOr<v1::GetJobResponse> {
        BALLAST_ASSIGN_OR_RETURN(v1::GetJobResponse job, JobOf(i));
        if (const auto behind = behind_.find(i); behind != behind_.end()) job.set_committed(behind->second);
        return job;
      };
      server.on_fence = [this, i](const v1::FenceRequest& fence) -> absl::StatusOr<v1::FenceResponse> {
        BALLAST_ASSIGN_OR_RETURN(v1::GetJobResponse job, JobOf(i));
        fenced_.insert(i);
        *job.mutable_promised() = fence.epoch();
        v1::FenceResponse response;
        *response.mutable_job() = job;
        return response;
      };
      server.on_open = [this, i](const v1::OpenRequest& open) -> absl::StatusOr<v1::OpenResponse> {
        EXPECT_TRUE(open.dry_run());
        asked_.push_back(absl::StrCat("s", i, model::IsBrief(open) ? " briefly" : "", fenced_.empty() ? " ahead" : ""));
        const auto refusal = refusals_.find(i);
        if (refusal != refusals_.end()) return refusal->second;
        v1::OpenResponse answer;
        if (free_nvme_.contains(i)) {
          answer.add_tiers()->set_tier("nvme");
          answer.mutable_tiers(0)->set_state_bytes(50);
          answer.mutable_tiers(0)->set_free_bytes(free_nvme_[i]);
        }
        return answer;
      };
      server.on_drop = [this, i](const v1::DropJobRequest& drop) -> absl::StatusOr<v1::DropJobResponse> {
        EXPECT_EQ(drop.epoch().counter(), key_.value().claimed().counter());
        dropped_.insert(i);
        if (i == 4) return model::Error(absl::StatusCode::kPermissionDenied, model::kNoRight, "no right to drop");
        return v1::DropJobResponse();
      };
    }
    const std::vector<uint64_t> elements(kShards, 1);
    first_ = model::FirstTable({.servers = founders, .replicas = 2, .shard_elements = elements}, v1::Epoch());
    first_.set_life(77);
    *open_.mutable_table() = first_;
    for (int i = 0; i < 3; ++i) has_job_.insert(i);
    for (int i = 0; i < 5; ++i) reached_.insert(model::TargetOf(absl::StrCat("s", i), 100 + static_cast<uint64_t>(i)));
    Put(first_);
  }

  void Put(const v1::Table& table) {
    const auto found = registry_.FindJob("job", Soon());
    v1::JobKey key;
    *key.mutable_claimed() = At(1);
    *key.mutable_table() = table;
    EXPECT_TRUE(*registry_.PutJob("job", key, found->has_value() ? (*found)->revision : 0, Soon()));
  }
  void Wish(const absl::StatusOr<v1::Wish>& wish) {
    ASSERT_TRUE(wish.ok()) << wish.status();
    v1::Wish of_job = *wish;
    of_job.set_life(77);
    const auto before = registry_.FindWish("job", Soon());
    ASSERT_TRUE(*registry_.PutWish("job", of_job, before->has_value() ? (*before)->revision : 0, Soon()));
  }

  // Another server answers under the name.
  void LoseDisk(int i) {
    servers_[static_cast<size_t>(i)].disk = 999;
    has_job_.erase(i);
  }
  // What server i answers of the job.
  absl::StatusOr<v1::GetJobResponse> JobOf(int i) const {
    const auto error = errors_.find(i);
    if (error != errors_.end()) return error->second;
    v1::GetJobResponse job;
    job.set_server_id(absl::StrCat("s", i));
    job.set_disk(servers_.servers[static_cast<size_t>(i)]->disk);
    job.set_exists(has_job_.contains(i));
    job.set_committed(-1);
    if (!has_job_.contains(i)) return job;
    job.set_committed(4);
    job.set_state_lost(lost_.contains(i));
    job.mutable_decision()->set_step(4);
    *job.mutable_promised() = At(1);
    *job.mutable_opened() = At(1);
    *job.mutable_open() = open_;
    job.set_life(77);
    for (int t = 0; t < 3; ++t) job.add_tensor_steps(4);
    if (kept_of_shard_ > 0) job.add_durable_versions(2);
    std::vector<uint32_t> filled;
    for (uint32_t s = 0; s < kShards; ++s) {
      const bool fills = fills_.contains(i);
      job.add_kept_bytes(0);
      for (const uint32_t m : open_.table().shards(static_cast<int>(s)).holders()) {
        if (open_.table().members(static_cast<int>(m)).server_id() != job.server_id()) continue;
        filled.push_back(s);
        job.set_kept_bytes(static_cast<int>(s), kept_of_shard_);
      }
      for (const uint32_t m : open_.table().shards(static_cast<int>(s)).fillers()) {
        if (fills && open_.table().members(static_cast<int>(m)).server_id() == job.server_id()) filled.push_back(s);
      }
    }
    job.set_filled_shards(model::MakeBitmap(kShards, filled));
    return job;
  }

  // From the look to the table.
  absl::StatusOr<v1::Table> Open() {
    BALLAST_RETURN_IF_ERROR(key_.Read(Soon()));
    BALLAST_RETURN_IF_ERROR(members_.Identify(key_, Spares::kConnect, {options_.failover_after, grace_}, Soon()));
    change_.emplace(servers_.router.get(), &members_, &key_, options_, reached_, grace_);
    BALLAST_ASSIGN_OR_RETURN(const Sight sight, change_->Look(open_.spec(), absl::Now() + patience_));
    EXPECT_EQ(sight.version, 4);
    if (asks_ahead_) change_->AskAhead(open_, grace_, Soon());
    BALLAST_ASSIGN_OR_RETURN(const v1::Epoch epoch, key_.Claim(v1::Table(), At(2), Soon()));
    claimed_ = epoch.counter();
    BALLAST_RETURN_IF_ERROR(change_->Claimed(epoch, Soon()));
    BALLAST_RETURN_IF_ERROR(change_->Fence("group", /*expect_empty=*/false, Soon()));
    EXPECT_EQ(change_->found().base, 4);
    v1::OpenRequest open = open_;
    *open.mutable_epoch() = epoch;
    open.set_base(4);
    *open.mutable_base_decision() = *change_->found().decision;
    if (tiling_.has_value()) *open.mutable_tiling() = *tiling_;
    BALLAST_ASSIGN_OR_RETURN(const v1::Table next, change_->Next(open, Soon()));
    BALLAST_RETURN_IF_ERROR(model::CheckTable(next));
    members_.PutFirst(next);
    BALLAST_RETURN_IF_ERROR(key_.WriteTable(next, epoch, Soon()));
    change_->Tell(next);
    change_->DropLeft(next);
    return next;
  }
  v1::Table Opened() {
    const auto next = Open();
    EXPECT_TRUE(next.ok()) << next.status();
    return next.ok() ? *next : v1::Table();
  }
  static std::vector<std::string> Ids(const v1::Table& table) {
    std::vector<std::string> ids;
    for (const v1::Member& member : table.members()) ids.push_back(member.server_id());
    return ids;
  }
  static int Fillers(const v1::Table& table) {
    int fillers = 0;
    for (const v1::Shard& shard : table.shards()) fillers += shard.fillers_size();
    return fillers;
  }

  FakeServers servers_;
  SmallEtcd etcd_;
  registry::Registry registry_;
  JobKey key_;
  Members members_;
  SessionOptions options_;
  std::set<std::string> reached_;
  std::optional<Change> change_;
  std::vector<std::string> lines_;
  v1::Table first_;
  v1::OpenRequest open_;           // of epoch 1
  std::map<int, int64_t> behind_;  // the step at which a server at work was when it was asked, before the fence
  std::set<int> has_job_, lost_, fills_, fenced_, dropped_;
  std::vector<std::string> asked_;     // for room
  std::map<int, uint64_t> free_nvme_;  // where 50 bytes are needed for chunks
  uint64_t kept_of_shard_ = 0;         // bytes of a kept version
  bool asks_ahead_ = false;
  std::optional<v1::Tiling> tiling_;  // of the next Open; none: as before
  std::map<int, absl::Status> errors_, refusals_;
  absl::Duration patience_ = absl::Seconds(60), grace_ = absl::Seconds(2);
  uint64_t claimed_ = 0;
};

}  // namespace ballast::client
