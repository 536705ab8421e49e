// From the claim to the Open (rules 19 to 24).
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/model/next_table.h"
#include "ballast/proto/model/table.h"
#include "ballast/proto/model/wish.h"
#include "ballast/tests/sim_members/group.h"

namespace ballast::sim_members {

Group::Group(Intent intent, const Around& around) : intent_(std::move(intent)), around_(around) {}

void Tally::Add(const Tally& other) {
  const uint64_t* from = reinterpret_cast<const uint64_t*>(&other);
  auto* to = reinterpret_cast<uint64_t*>(this);
  for (size_t i = 0; i < sizeof(Tally) / sizeof(uint64_t); ++i) to[i] += from[i];
}

bool Group::Wanted(int server) const {
  const std::vector<int>& servers = around_.wish->servers;
  return std::find(servers.begin(), servers.end(), server) != servers.end();
}

// A new epoch: by a group that starts, or that was at work.
void Group::Again() {
  phase_ = Phase::kRead;
  blind_ = false;
  ++call_;
  waits_ = false;
  patience_ = 0;
  early_.reset();
}

const v1::OpenRequest* Group::NewestOpen() const {
  const v1::OpenRequest* newest = nullptr;
  for (const auto& server : *around_.servers) {
    if (!server->up() || server->machine().plan() == nullptr) continue;
    const v1::OpenRequest& open = server->machine().plan()->open();
    if (newest == nullptr || model::Compare(open.epoch(), newest->epoch()) > 0) newest = &open;
  }
  return newest;
}

void Group::ReadKey() {
  if (around_.bug == Bug::kBlind && phase_ == Phase::kRead && around_.random->Percent(20)) return GoBlind();
  around_.net->Post([this, call = call_] {
    const Key key = *around_.key;
    around_.net->Post([this, call, key] {
      if (!dead() && call == call_) OnRead(key);
    });
  });
}

void Group::OnRead(const Key& key) {
  const bool mine = epoch_.counter() > 0 && model::Compare(key.claimed, epoch_) == 0;
  if (phase_ == Phase::kWrite) {
    // The answer to the write is lost: the value tells.
    if (!mine && around_.bug != Bug::kNoClaim && around_.bug != Bug::kCasBlind) return Kill();
    if (model::SameTable(key.table, next_)) return Begin();
    return Write(key.revision);
  }
  if (phase_ != Phase::kRead && phase_ != Phase::kClaim) return;
  if (phase_ == Phase::kClaim && mine) {
    revision_ = key.revision;
    table_ = key.table;
    if (early_.has_value()) table_ = *early_;
    phase_ = Phase::kFence;
    return;
  }
  // A group at work claims only over its own claim.
  if (in_session_ && key.group != intent_.group) return Kill();
  if (around_.bug == Bug::kReadFirst && !early_.has_value()) {
    early_ = key.table;
    phase_ = Phase::kRead;
    return;
  }
  Claim(key);
}

void Group::Claim(const Key& key) {
  epoch_.set_counter(std::max(key.claimed.counter(), epoch_.counter()) + 1);
  epoch_.set_nonce(around_.random->Next());
  around_.oracle->AddEpoch(epoch_, &intent_);
  answers_.clear();
  table_ = key.table;
  revision_ = key.revision;
  if (around_.bug == Bug::kNoClaim) {
    phase_ = Phase::kFence;
    return;
  }
  phase_ = Phase::kClaim;
  ++call_;
  around_.net->Post([this, call = call_, revision = key.revision, epoch = epoch_] {
    Key& now = *around_.key;
    const bool won = now.revision == revision;
    if (won) {
      ++now.revision;
      now.claimed = epoch;
      now.group = intent_.group;
    }
    around_.net->Post([this, call, won, key = now] {
      if (dead() || call != call_ || phase_ != Phase::kClaim) return;
      if (won) return OnRead(key);
      ++around_.tally->claims_lost;
      phase_ = Phase::kRead;
    });
  });
}

void Group::GoBlind() {
  const v1::OpenRequest* const newest = NewestOpen();
  if (newest == nullptr) return;
  uint64_t counter = std::max(newest->epoch().counter(), epoch_.counter());
  for (const auto& server : *around_.servers) {
    if (server->up()) counter = std::max(counter, server->machine().DescribeProgress().promised().counter());
  }
  epoch_.set_counter(counter + 1);
  epoch_.set_nonce(around_.random->Next());
  around_.oracle->AddEpoch(epoch_, &intent_);
  answers_.clear();
  table_ = newest->table();
  blind_ = true;
  phase_ = Phase::kFence;
}

v1::FenceRequest Group::FenceOf(const v1::Epoch& epoch) const {
  v1::FenceRequest fence;
  fence.set_job(kJob);
  *fence.mutable_epoch() = epoch;
  fence.set_group(GroupBytes());
  return fence;
}

void Group::Fence(bool timeout) {
  if (timeout) ++patience_;
  const v1::FenceRequest fence = FenceOf(epoch_);
  for (int server = 0; server < kServers; ++server) {
    if (answers_.contains(server) || silent_.contains(server) || (!timeout && patience_ > 0)) continue;
    const bool member = std::any_of(table_.members().begin(), table_.members().end(),
                                    [&](const v1::Member& m) { return m.server_id() == ServerName(server); });
    if (!member && !Wanted(server)) continue;
    const bool frees = around_.bug == Bug::kReleaseEarly && !Wanted(server);
    Call<v1::FenceResponse>(
        server,
        [fence, frees, asks = around_.bug == Bug::kNoFence](Server& target) -> services::Outcome<v1::FenceResponse> {
          if (asks) {
            v1::FenceResponse told;
            *told.mutable_job() = target.machine().DescribeProgress();
            return told;
          }
          auto answer = target.machine().Fence(fence);
          if (frees && answer.ok() && answer->has_value()) target.FreeAll();
          return answer;
        },
        [this, server, epoch = epoch_](absl::StatusOr<v1::FenceResponse> response) {
          if (phase_ != Phase::kFence || model::Compare(epoch, epoch_) != 0) return;
          if (!response.ok()) {
            ++around_.tally->stale;
            return Kill();
          }
          answers_[server] = response->job();
          TryResolve();
        },
        By::kKeeper);
  }
  patience_ = std::max(patience_, 1);
}

std::vector<v1::GetJobResponse> Group::AnswersOfFence() const {
  std::vector<v1::GetJobResponse> answers;
  for (const auto& [server, answer] : answers_) answers.push_back(answer);
  const v1::GetJobResponse* prepared = nullptr;
  for (const v1::GetJobResponse& answer : answers) {
    if (answer.has_prepared()) prepared = &answer;
  }
  const v1::PreparedRecord record = prepared != nullptr ? prepared->prepared() : v1::PreparedRecord();
  for (v1::GetJobResponse& answer : answers) {
    const auto member = std::find_if(table_.members().begin(), table_.members().end(),
                                     [&](const v1::Member& m) { return m.server_id() == answer.server_id(); });
    if (around_.bug == Bug::kBelieve && member != table_.members().end()) answer.set_disk(member->disk());
    if (around_.bug == Bug::kBelieve || around_.bug == Bug::kNoSince) answer.mutable_opened()->set_counter(1 << 30);
    if (around_.bug == Bug::kUnfilledCounts) answer.set_filled_shards("\xff");
    if (around_.bug == Bug::kSomePrepared && prepared != nullptr && record.step() == answer.committed() + 1) {
      *answer.mutable_prepared() = record;
      answer.mutable_prepared()->set_server_id(answer.server_id());
    }
    const bool all = answers_.size() >= static_cast<size_t>(table_.members_size());
    if (around_.bug == Bug::kAbortUnknown && !all) answer.clear_prepared();
  }
  return answers;
}

void Group::TryResolve() {
  v1::Table table = table_;
  if (around_.bug == Bug::kServersSay) {
    const v1::OpenRequest* const newest = NewestOpen();
    if (newest != nullptr) table_ = table = newest->table();
  }
  auto found = model::FindBase(table, JobLayout(), AnswersOfFence());
  if (!found.ok()) {
    if (around_.leave_on_error) return Kill();
    return around_.oracle->Broken(absl::StrCat(Name(), " cannot resolve: ", found.status().ToString()));
  }
  // failover_after: some timeouts in a row.
  const auto heard = [&](int server) { return answers_.contains(server) || silent_.contains(server); };
  const std::vector<int>& wished = around_.wish->servers;
  const bool all = std::all_of(wished.begin(), wished.end(), heard) &&
                   std::all_of(found->silent.begin(), found->silent.end(), [&](uint32_t m) {
                     return heard(ServerOf(table.members(static_cast<int>(m)).server_id()));
                   });
  if (!all && patience_ < patience_max()) return;
  if (!found->enough()) {
    if (around_.bug != Bug::kNoCover || found->counted.empty()) {
      // open_timeout: the group is started again, and a keeper begins the change again. By then a server may have
      // filled what it lacked when it was fenced.
      if (patience_ < 2 * patience_max()) return;
      silent_.clear();
      return Again();
    }
    for (const uint32_t shard : found->uncovered) found->filled[shard] = {found->counted.front()};
    found->tensor_steps.assign(JobLayout().tensors().size(), 0);
  }
  Change(*found);
}

// As client::Change::Plan has it.
v1::Table Group::Plan(const v1::Table& now, const model::Found& found, const Answers& answers) const {
  v1::Wish wish;
  for (int server = 0; server < kServers; ++server) {
    if (!Wanted(server)) wish.add_not_(ServerName(server));
  }
  for (const int server : around_.wish->servers) wish.add_servers(ServerName(server));
  wish.set_count(static_cast<uint32_t>(wish.servers_size()));
  wish.set_replicas(around_.wish->replicas);
  std::vector<std::string> counted, others;
  for (const uint32_t m : found.counted) counted.push_back(now.members(static_cast<int>(m)).server_id());
  for (int server = 0; server < kServers; ++server) {
    const bool counts = std::find(counted.begin(), counted.end(), ServerName(server)) != counted.end();
    if (!counts && (answers.contains(server) || around_.bug == Bug::kDeadTarget)) others.push_back(ServerName(server));
  }
  std::vector<v1::Member> servers;
  bool level = false;
  for (const std::string& id : model::ChooseServers(now, wish, counted, others)) {
    v1::Member& member = servers.emplace_back();
    const auto is = [&](const v1::Member& m) { return m.server_id() == id; };
    const auto was = std::find_if(now.members().begin(), now.members().end(), is);
    const bool counts = std::find(counted.begin(), counted.end(), id) != counted.end();
    member.set_server_id(id);
    member.set_weight(1);
    member.set_disk(counts ? was->disk() : (*around_.servers)[static_cast<size_t>(ServerOf(id))]->disk());
    level = level || was == now.members().end() || was->disk() != member.disk();
  }
  const std::vector<uint64_t> elements = model::ShardElements(JobLayout(), now.shards_size());
  const model::Wanted wanted{.servers = servers,
                             .replicas = model::WantedCopies(now, wish),
                             .shard_elements = elements,
                             .level = level || static_cast<int>(servers.size()) != now.members_size()};
  v1::Table next = model::NextTable(now, found, wanted, epoch_);
  next.set_wanted_servers(model::WantedServers(now, wish));
  return next;
}

void Group::Change(const model::Found& found) {
  found_ = found;
  if (blind_) {
    next_ = table_;
    return Begin();
  }
  next_ = Plan(table_, found, answers_);
  for (v1::Shard& shard : *next_.mutable_shards()) {
    if (around_.bug == Bug::kSettleEarly && shard.leaving_size() > 0 && shard.leaving_size() < shard.holders_size()) {
      v1::Shard less;
      for (const uint32_t holder : shard.holders()) {
        if (std::find(shard.leaving().begin(), shard.leaving().end(), holder) == shard.leaving().end()) {
          less.add_holders(holder);
        }
      }
      *less.mutable_fillers() = shard.fillers();
      shard = less;
    }
  }
  if (around_.bug == Bug::kNeverSettle && model::SameTable(next_, table_) == false) {
    bool ends = true;
    for (const v1::Shard& shard : next_.shards()) ends = ends && shard.fillers().empty();
    bool fills = false;
    for (const v1::Shard& shard : table_.shards()) fills = fills || !shard.fillers().empty();
    if (ends && fills) next_ = table_;
  }
  if (around_.bug == Bug::kCommitAtFence && found.adopted) {
    v1::CommitRequest commit;
    *commit.mutable_decision() = *found.decision;
    for (const auto& [server, answer] : answers_) {
      Call<v1::CommitResponse>(
          server,
          [commit](Server& target) -> services::Outcome<v1::CommitResponse> {
            auto done = target.machine().Commit(commit);
            if (!done.ok()) return done.status();
            return *done;
          },
          [](auto) {});
    }
  }
  if (model::SameTable(next_, table_)) return Begin();
  if (around_.bug == Bug::kOpenEarly) {
    Begin();
    if (dead()) return;
  }
  phase_ = around_.bug == Bug::kOpenEarly ? Phase::kTrain : Phase::kWrite;
  Write(revision_);
}

void Group::Write(uint64_t revision) {
  ++call_;
  waits_ = true;
  const bool left_out = !found_->silent.empty();
  around_.net->Post([this, call = call_, revision, left_out, next = next_, epoch = epoch_] {
    Key& key = *around_.key;
    const bool won = key.revision == revision || around_.bug == Bug::kCasBlind ||
                     (around_.bug == Bug::kNoClaim && model::SameTable(key.table, table_));
    if (won) {
      const auto fills = [](const v1::Table& table) {
        return std::any_of(table.shards().begin(), table.shards().end(),
                           [](const v1::Shard& shard) { return !shard.fillers().empty(); });
      };
      around_.tally->begun += fills(next);
      around_.tally->ended += fills(key.table) && !fills(next);
      around_.tally->left_out += left_out;
      ++around_.tally->tables;
      ++key.revision;
      if (around_.bug == Bug::kNoClaim || around_.bug == Bug::kCasBlind) {
        key.claimed = epoch;
        key.group = intent_.group;
      }
      key.table = next;
      around_.table_written(left_out);
    }
    around_.net->Post([this, call, won] {
      if (dead() || call != call_ || phase_ != Phase::kWrite) return;
      if (won) return Begin();
      ++around_.tally->writes_lost;
      ReadKey();  // an earlier try of this write may have won
    });
  });
}

void Group::Begin() {
  const model::Found& found = *found_;
  auto open = std::make_shared<v1::OpenRequest>(OpenTemplate(intent_.world_size));
  *open->mutable_epoch() = epoch_;
  open->set_base(found.base);
  if (found.decision.has_value()) *open->mutable_base_decision() = *found.decision;
  *open->mutable_table() = next_;
  open->set_group(GroupBytes());
  open->set_continues(in_session_);
  open->mutable_tensor_steps()->Add(found.tensor_steps.begin(), found.tensor_steps.end());
  auto plan = model::EpochPlan::Make(*open);
  if (!plan.ok()) return around_.oracle->Broken(plan.status().ToString());
  plan_ = std::make_shared<const model::EpochPlan>(*std::move(plan));
  open_ = std::move(open);
  around_.oracle->StartedFrom(found.base, epoch_, Name());
  if (!around_.oracle->violation().empty()) return;
  around_.tally->adopted += found.adopted;
  around_.tally->adopted_some += found.adopted && !found.silent.empty();
  if (found.decision.has_value() && found.base > around_.oracle->last()) {
    around_.oracle->Decided(*found.decision, Name());
  }
  phase_ = Phase::kTrain;
  ++call_;
  for (int server = 0; server < kServers; ++server) {
    opens_[server] = Sent::kNo;
    silence_[server] = 0;
    for (auto& of_rank : seals_) of_rank[server] = Sent::kNo;
    prepared_[server].reset();
  }
  unfilled_.clear();
  if (in_session_ && (found.base > step_ || found.base < step_ - 1)) {
    // A group that was fenced meanwhile goes by old answers: its Opens come to nothing.
    return Kill();
  }
  around_.tally->continued += in_session_;
  silent_.clear();
  if (!model::SameTable(next_, table_)) considered_.clear();  // a change may be what a later wish waits for
  const bool same_step = in_session_ && found.base == step_ - 1;
  in_session_ = true;
  if (found.decision.has_value()) {
    last_ = found.decision;
    auto commit = std::make_shared<v1::CommitRequest>();
    *commit->mutable_decision() = *last_;
    commit_ = std::move(commit);
    for (Sent& sent : commits_) sent = Sent::kDone;
  }
  if (!same_step) return StartStep(found.base + 1);
  // Slices are kept: servers that have them are not sent them again.
}

}  // namespace ballast::sim_members
