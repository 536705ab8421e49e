// A job whose state servers come and go, for tests: servers that copy chunks from each other, a group that opens the
// job with another table, and the same training without disturbances.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/model/members.h"
#include "ballast/proto/model/next_table.h"
#include "ballast/proto/model/table.h"
#include "ballast/services/threads/chunk_source.h"
#include "ballast/services/threads/exported_chunk.h"
#include "ballast/tests/services/trainer_group.h"
#include "ballast/tests/services/training_bits.h"

namespace ballast::services {

struct MembersCase {
  const char* name;
  storage::TierBytes budget;
  v1::Durability durability;
};

inline constexpr MembersCase kMembersCases[] = {
    {"dram", {0, uint64_t{64} << 20, uint64_t{64} << 20}, v1::DURABILITY_STEP},
    {"nvme", {0, uint64_t{5} << 20, uint64_t{64} << 20}, v1::DURABILITY_STEP},
    {"none", {0, uint64_t{64} << 20, 0}, v1::DURABILITY_NONE}};

// Servers a, b and c, a job on some of them, and a job on one server that nothing happens to.
class MembersFixture : public ::testing::TestWithParam<MembersCase> {
 protected:
  static constexpr int kShards = 4;
  static uint32_t Tensors() { return static_cast<uint32_t>(SmallModel().size()); }
  static v1::JobSpec Spec(v1::Durability durability) {
    v1::JobSpec spec = MakeSpec("job", SmallModel());
    spec.set_durability(durability);
    return spec;
  }

  MembersFixture() : layout_(*model::Layout::Make(Spec(GetParam().durability))) {
    for (const char* name : {"a", "b", "c"}) {
      servers_[name] = std::make_unique<TestServer>(name, GetParam().budget);
      servers_[name]->options().chunk_source = &source_;
      servers_[name]->Restart();
      source_.servers[name] = servers_[name].get();
    }
    EXPECT_EQ(reference_.Start(), absl::OkStatus());
    EXPECT_EQ(reference_.Initialise(Initial), absl::OkStatus());
  }

  // Servers fetch chunks from each other by a direct call.
  struct Source : ChunkSource {
    void Fetch(const v1::ExportRequest& request, const v1::Member& from, absl::Time deadline,
               Reply<v1::ExportResponse> reply) override {
      // A server that restarts answers nobody.
      if (!swapping.ReaderTryLock()) return reply(absl::UnavailableError("a server restarts"));
      Ask(request, from, deadline, std::move(reply));
      swapping.ReaderUnlock();
    }
    void Ask(const v1::ExportRequest& request, const v1::Member& from, absl::Time deadline,
             Reply<v1::ExportResponse> reply) {
      if (servers.at(from.server_id())->get() == nullptr) return reply(absl::UnavailableError("it has ended"));
      if (!opens || fetches == 0) return reply(absl::UnavailableError("the test keeps copies back"));
      if (fetches > 0) --fetches;
      const uint64_t id = request.chunk();
      (*servers.at(from.server_id()))->Export(request, deadline, [=, this](absl::StatusOr<ExportedChunk> chunk) {
        if (!chunk.ok()) return reply(chunk.status());
        v1::ExportResponse response = chunk->head;
        for (const storage::WholeState::Array& array : chunk->state.arrays) {
          v1::ExportResponse::Array* const sent = response.add_arrays();
          sent->set_payload(std::string(reinterpret_cast<const char*>(array.bytes.data()), array.bytes.size()));
          sent->set_crc32c(array.crc32c);
        }
        if (changes) changes(id, &response);
        reply(std::move(response));
      });
    }
    std::map<std::string, TestServer*> servers;
    absl::Mutex swapping;
    std::atomic<bool> opens{true};
    std::atomic<int> fetches{-1};                                      // how many more are answered; -1: all
    std::function<void(uint64_t chunk, v1::ExportResponse*)> changes;  // what arrives
  };

  ~MembersFixture() override {
    for (const auto& [name, server] : servers_) End(name);
  }
  void Restart(const std::string& name) {
    absl::MutexLock lock(&source_.swapping);
    servers_.at(name)->Restart();
  }
  void End(const std::string& name) {
    absl::MutexLock lock(&source_.swapping);
    servers_.at(name)->End();
  }

  v1::Member MemberOf(const std::string& name) {
    v1::Member member;
    member.set_server_id(name);
    member.set_weight(1);
    member.set_disk((*servers_.at(name))->disk());
    member.set_address(name);
    return member;
  }

  // The next group fences `wanted` and the present members but for those that are `down`, and opens the job with as
  // many copies on `wanted`.
  absl::Status Reconfigure(const std::vector<std::string>& wanted, uint32_t replicas,
                           const std::vector<std::string>& down = {}) {
    group_ = std::make_unique<TrainerGroup>(std::vector<StateServer*>(), Spec(GetParam().durability), world_size_,
                                            ++epochs_);
    return Change(wanted, replicas, down);
  }
  // As Reconfigure, but the group that is at work does so.
  absl::Status Continue(const std::vector<std::string>& wanted, uint32_t replicas,
                        const std::vector<std::string>& down = {}) {
    group_->BeginEpoch(++epochs_);
    return Change(wanted, replicas, down);
  }
  absl::Status Change(const std::vector<std::string>& wanted, uint32_t replicas, const std::vector<std::string>& down) {
    const auto is_down = [&](const std::string& name) {
      return std::find(down.begin(), down.end(), name) != down.end();
    };
    std::vector<std::string> asked;
    for (const v1::Member& member : table_.members()) asked.push_back(member.server_id());
    asked.insert(asked.end(), wanted.begin(), wanted.end());
    std::sort(asked.begin(), asked.end());
    asked.erase(std::unique(asked.begin(), asked.end()), asked.end());
    std::erase_if(asked, is_down);
    std::vector<StateServer*> servers;
    for (const std::string& name : asked) servers.push_back(servers_.at(name)->get());
    group_->set_servers(servers);
    std::vector<v1::GetJobResponse> answers;
    BALLAST_RETURN_IF_ERROR(group_->Fence(&answers));
    std::vector<v1::Member> members;
    for (const std::string& name : wanted) members.push_back(MemberOf(name));
    const std::vector<uint64_t> elements = model::ShardElements(layout_, kShards);
    const model::Wanted want{.servers = members, .replicas = replicas, .shard_elements = elements, .level = true};
    model::Found found;
    if (table_.shards().empty()) {
      table_ = model::FirstTable(want, v1::Epoch());
      table_.set_life(5);
    } else {
      BALLAST_ASSIGN_OR_RETURN(found, model::FindBase(table_, layout_, answers));
      EXPECT_TRUE(found.enough()) << model::ShowWait(table_, found);
      // Who does not count is no member any more: if it is wanted, it begins anew.
      std::vector<bool> there(static_cast<size_t>(table_.members_size()), false);
      for (const uint32_t member : found.counted) there[member] = true;
      table_ = model::LeaveOut(table_, there);
      BALLAST_ASSIGN_OR_RETURN(found, model::FindBase(table_, layout_, answers));
      table_ = model::NextTable(table_, found.filled, want, group_->epoch());
    }
    servers.clear();
    for (const v1::Member& member : table_.members()) servers.push_back(servers_.at(member.server_id())->get());
    return group_->OpenWith(table_, servers, found);
  }

  void Begin(const std::vector<std::string>& servers, uint32_t replicas) {
    ASSERT_EQ(Reconfigure(servers, replicas), absl::OkStatus());
    ASSERT_EQ(group_->Initialise(Initial), absl::OkStatus());
  }

  void Steps(int count) {
    for (int i = 0; i < count; ++i) {
      ++step_;
      for (TrainerGroup* group : {group_.get(), &reference_}) {
        ASSERT_EQ(group->PushAll(v1::SLICE_KIND_GRADIENT, AllTensors(Tensors()), GradientOf(step_)), absl::OkStatus());
        const auto finished = group->Finish(UpdateHeader(Tensors()));
        ASSERT_TRUE(finished.ok()) << finished.status();
      }
    }
  }

  v1::JobStatus StatusOf(const std::string& name) {
    const v1::GetServerStatusResponse status = (*servers_.at(name))->Status();
    return status.jobs().empty() ? v1::JobStatus() : status.jobs(0);
  }
  void AwaitFilled(const std::string& name) {
    for (const absl::Time end = absl::Now() + absl::Minutes(1); StatusOf(name).unfilled_chunks() > 0;) {
      ASSERT_LT(absl::Now(), end) << StatusOf(name).unfilled_chunks() << " chunks are not filled";
      absl::SleepFor(absl::Milliseconds(2));
    }
  }
  void ExpectSameBits() { ExpectSame(*group_, reference_, step_); }

  const model::Layout layout_;
  uint32_t world_size_ = 1;
  Source source_;
  std::map<std::string, std::unique_ptr<TestServer>> servers_;
  TestServer reference_server_{"reference"};
  TrainerGroup reference_{{reference_server_.get()}, Spec(v1::DURABILITY_NONE), 1};
  std::unique_ptr<TrainerGroup> group_;
  v1::Table table_;
  uint64_t epochs_ = 0;
  int64_t step_ = 0;
};

}  // namespace ballast::services
