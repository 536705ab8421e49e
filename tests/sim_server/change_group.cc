#include "ballast/tests/sim_server/change_group.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/model/next_table.h"
#include "ballast/proto/model/protocol.h"
#include "ballast/proto/model/step_header.h"
#include "ballast/tests/sim_server/bits.h"

namespace ballast::sim {
namespace {

constexpr int kTableShards = 5;
constexpr uint32_t kCopies = 2;
constexpr uint64_t kLife = 5;
constexpr uint64_t kWithholdPercent = 25;
// So long a filler's slices are kept back: it prepares without them, if it may.
constexpr int kTurnsWithheld = 400;
constexpr uint64_t kHoldPercent = 40;
constexpr uint64_t kHeldGoesPercent = 30;  // at each record of its server
constexpr int kTurnsHeld = 300;
constexpr uint64_t kForsakenPercent = 20;  // of commits that come apart

int ServerOfMember(const v1::Member& member) { return member.server_id()[0] - ServerName(0)[0]; }

}  // namespace

template <typename Response>
services::Reply<Response> ChangeGroup::ReplyTo(const std::shared_ptr<Call<Response>>& call) {
  Machine& machine = machines_->of(call->server);
  return [call, &machine, lives = machine.alive()](absl::StatusOr<Response> response) {
    if (!*lives || machine.off()) return;
    call->response = std::move(response);
    call->answered = true;
  };
}

void ChangeGroup::Send(int server, std::function<void(Machine*)> call) {
  if (apart_ && random_->Percent(kHoldPercent)) {
    held_.emplace_back(server, std::move(call));
  } else {
    call(&machines_->of(server));
  }
}

void ChangeGroup::SendHeld(std::optional<int> server) {
  std::vector<std::pair<int, std::function<void(Machine*)>>> stay;
  for (auto& [to, call] : std::exchange(held_, {})) {
    if (server.value_or(to) != to) {
      stay.emplace_back(to, std::move(call));
    } else if (machines_->up(to) && !machines_->of(to).off()) {
      call(&machines_->of(to));
    }
  }
  held_.insert(held_.end(), std::make_move_iterator(stay.begin()), std::make_move_iterator(stay.end()));
}

void ChangeGroup::Records(int server) {
  if (!held_.empty() && random_->Percent(kHeldGoesPercent)) SendHeld(server);
}

template <typename Response>
bool ChangeGroup::AwaitAll(const Calls<Response>& calls, const char* what) {
  int turns = 0;
  const auto answered = [&] {
    if (++turns == kTurnsHeld) SendHeld(std::nullopt);
    return std::all_of(calls.begin(), calls.end(), [](const auto& call) { return call->answered; });
  };
  const bool all = machines_->Await(answered);
  held_.clear();
  if (!all) {
    if (machines_->stuck()) {
      checks_->Broken(absl::StrCat("a ", what, " for step ", next_, " is not answered; the last error of a push: ",
                                   push_error_->ToString(), "; copies on their way:", machines_->ShowCopies()));
    }
    return false;
  }
  for (const auto& call : calls) {
    if (call->response.ok()) continue;
    checks_->Broken(absl::StrCat("server ", call->server, " refuses a ", what, " for step ", next_, ": ",
                                 call->response.status().ToString()));
    return false;
  }
  return true;
}

bool ChangeGroup::Fence(std::vector<v1::GetJobResponse>* answers) {
  v1::FenceRequest request;
  request.set_job(kJob);
  *request.mutable_epoch() = epoch_;
  request.set_protocol_version(model::kProtocolVersion);
  Calls<v1::FenceResponse> calls;
  for (int server = 0; server < kServers; ++server) {
    if (!machines_->up(server)) continue;
    calls.push_back(std::make_shared<Call<v1::FenceResponse>>());
    calls.back()->server = server;
    Send(server, [this, request, call = calls.back()](Machine* machine) {
      machine->server().Fence(request, absl::InfiniteFuture(), ReplyTo(call));
    });
  }
  if (!AwaitAll(calls, "fence")) return false;
  for (const auto& call : calls) answers->push_back(call->response->job());
  return true;
}

void ChangeGroup::CheckLosses(absl::Span<const v1::GetJobResponse> answers) {
  for (size_t lost = 0; lost < answers.size(); ++lost) {
    std::vector<v1::GetJobResponse> others(answers.begin(), answers.end());
    others.erase(others.begin() + static_cast<std::ptrdiff_t>(lost));
    const absl::StatusOr<model::Found> found = model::FindBase(table_, PlanOf(1).layout(), others);
    if (found.ok() && (!found->enough() || found->base >= step_)) continue;
    checks_->Broken(
        absl::StrCat("without server '", answers[lost].server_id(), "' the others have all of the job, and ",
                     found.ok() ? absl::StrCat("begin at step ", found->base) : std::string(found.status().message()),
                     ", while step ", step_, " is decided"));
  }
}

bool ChangeGroup::Choose(absl::Span<const v1::GetJobResponse> answers, absl::Span<const int> wanted,
                         model::Found* found) {
  std::vector<v1::Member> servers;
  for (const int server : wanted) {
    if (!machines_->up(server)) continue;
    v1::Member& member = servers.emplace_back();
    member.set_server_id(ServerName(server));
    member.set_weight(1);
    member.set_disk(machines_->of(server).server().disk());
    member.set_address(member.server_id());
  }
  const std::vector<uint64_t> elements = model::ShardElements(PlanOf(1).layout(), kTableShards);
  const model::Wanted want{.servers = servers, .replicas = kCopies, .shard_elements = elements, .level = true};
  if (table_.shards().empty()) {
    table_ = model::FirstTable(want, v1::Epoch());
    table_.set_life(kLife);
    return true;
  }
  CheckLosses(answers);
  absl::StatusOr<model::Found> base = model::FindBase(table_, PlanOf(1).layout(), answers);
  if (!base.ok()) {
    checks_->Broken(absl::StrCat("no base: ", base.status().ToString()));
    return false;
  }
  *found = *std::move(base);
  if (!found->enough()) return false;
  table_ = model::NextTable(table_, *found, want, epoch_);
  return true;
}

ChangeGroup::Opened ChangeGroup::Open(absl::Span<const int> wanted) {
  epoch_.set_counter(epoch_.counter() + 1);
  epoch_.set_nonce(random_->Next());
  std::vector<v1::GetJobResponse> answers;
  if (!Fence(&answers)) return Opened::kInterrupted;
  model::Found found;
  if (!Choose(answers, wanted, &found)) return checks_->kept() ? Opened::kWaits : Opened::kInterrupted;
  checks_->StartsFrom(found, step_);
  if (found.decision.has_value()) step_ = found.base;
  next_ = step_ + 1;
  return checks_->kept() && SendOpens(found) ? Opened::kYes : Opened::kInterrupted;
}

bool ChangeGroup::SendOpens(const model::Found& found) {
  v1::OpenRequest request = OpenTemplate(1);
  request.clear_members();
  *request.mutable_epoch() = epoch_;
  request.set_base(found.base);
  if (found.decision.has_value()) *request.mutable_base_decision() = *found.decision;
  *request.mutable_table() = table_;
  request.set_group(absl::StrCat("group ", epoch_.counter()));  // each opening is another group's
  request.mutable_tensor_steps()->Add(found.tensor_steps.begin(), found.tensor_steps.end());
  absl::StatusOr<model::EpochPlan> plan = model::EpochPlan::Make(request);
  if (!plan.ok()) {
    checks_->Broken(absl::StrCat("no plan: ", plan.status().ToString()));
    return false;
  }
  plan_ = std::make_unique<model::EpochPlan>(*std::move(plan));
  members_.clear();
  withheld_.clear();
  for (const v1::Member& member : table_.members()) members_.push_back(ServerOfMember(member));
  Calls<v1::OpenResponse> calls;
  for (const int server : members_) {
    calls.push_back(std::make_shared<Call<v1::OpenResponse>>());
    calls.back()->server = server;
    if (!machines_->up(server)) {
      checks_->Broken(absl::StrCat("server ", server, " is down and a member of the next table"));
      return false;
    }
    Send(server, [this, request, call = calls.back()](Machine* machine) {
      machine->server().Open(request, absl::InfiniteFuture(), ReplyTo(call));
    });
  }
  return AwaitAll(calls, "Open");
}

void ChangeGroup::OpenOn(Machine* fresh) {
  v1::OpenRequest request = plan_->open();
  v1::FenceRequest fence;
  fence.set_job(kJob);
  *fence.mutable_epoch() = request.epoch();
  fence.set_protocol_version(model::kProtocolVersion);
  request.set_base(-1);
  request.clear_base_decision();
  request.clear_tensor_steps();
  for (v1::Member& member : *request.mutable_table()->mutable_members()) {
    if (member.server_id() == fresh->server().server_id()) member.set_disk(fresh->server().disk());
    member.clear_since();
  }
  absl::Status fenced = absl::UnknownError("no answer"), opened = fenced;
  const auto run = [&] {
    while (fresh->RunTask(random_) || fresh->PumpOne(random_)) {
    }
  };
  fresh->server().Fence(fence, absl::InfiniteFuture(), [&](const auto& answer) { fenced = answer.status(); });
  run();
  fresh->server().Open(request, absl::InfiniteFuture(), [&](const auto& answer) { opened = answer.status(); });
  run();
  if (!fenced.ok() || !opened.ok())
    checks_->Broken(absl::StrCat("a fresh server: ", fenced.ToString(), opened.ToString()));
}

bool ChangeGroup::fills() const {
  return std::any_of(table_.shards().begin(), table_.shards().end(),
                     [](const v1::Shard& shard) { return !shard.fillers().empty(); });
}

bool ChangeGroup::filled() {
  return std::all_of(members_.begin(), members_.end(), [&](int server) {
    if (!machines_->up(server)) return false;
    const v1::GetServerStatusResponse status = machines_->of(server).server().Status();
    return !status.jobs().empty() && status.jobs(0).unfilled_chunks() == 0;
  });
}

void ChangeGroup::PushTo(int server, v1::SliceKind kind, const model::Slice& slice) {
  if (!machines_->up(server) || machines_->of(server).off()) return;
  v1::PushRequest request;
  request.set_job(kJob);
  *request.mutable_epoch() = epoch_;
  request.set_step(next_);
  request.set_attempt(intent_->FinalAttempt(next_));
  request.set_rank(slice.rank);
  request.set_kind(kind);
  request.set_unit(slice.unit);
  request.set_begin(slice.range.begin);
  request.set_end(slice.range.end);
  request.set_crc32c(intent_->Digest(next_, request.attempt(), kind, slice, 0));
  const Payload payload = PayloadOf(request.crc32c());
  // The seal tells what is missing.
  const auto reply = [payload, error = push_error_](const absl::StatusOr<v1::PushResponse>& pushed) {
    if (!pushed.ok()) *error = pushed.status();
  };
  machines_->of(server).server().Push(request, absl::MakeConstSpan(*payload), absl::InfiniteFuture(), reply);
}

void ChangeGroup::Push(v1::SliceKind kind, const std::string& presence) {
  for (const model::Slice& slice : plan_->slices()) {
    if (!plan_->Touches(slice, presence)) continue;
    for (const uint32_t member : plan_->holders_of(slice.chunk)) PushTo(members_[member], kind, slice);
    for (const uint32_t member : plan_->fillers_of(slice.chunk)) {
      if (random_->Percent(kWithholdPercent)) {
        withheld_.push_back({members_[member], kind, &slice});
      } else {
        PushTo(members_[member], kind, slice);
      }
    }
  }
}

bool ChangeGroup::Seal(std::vector<v1::PreparedRecord>* records) {
  v1::SealRequest request;
  request.set_job(kJob);
  *request.mutable_epoch() = epoch_;
  request.set_step(next_);
  request.set_attempt(intent_->FinalAttempt(next_));
  *request.mutable_header() = intent_->Header(next_, 0);
  const std::vector<std::string> blobs = intent_->Blobs(next_);
  request.mutable_blobs()->Assign(blobs.begin(), blobs.end());
  request.set_plan_hash(model::PlanHash(*plan_, next_, request.attempt(), request.header(), blobs));
  request.set_wait_ms(50'000);
  Calls<model::SealAnswer> calls;
  for (const int server : members_) {
    calls.push_back(std::make_shared<Call<model::SealAnswer>>());
    calls.back()->server = server;
    Send(server, [this, request, call = calls.back()](Machine* machine) {
      machine->server().Seal(request, absl::InfiniteFuture(), ReplyTo(call));
    });
  }
  int turns = 0;
  const auto answered = [&] {
    if (turns == kTurnsHeld) SendHeld(std::nullopt);
    if (++turns == kTurnsWithheld) {
      for (const Withheld& push : std::exchange(withheld_, {})) PushTo(push.server, push.kind, *push.slice);
    }
    return std::all_of(calls.begin(), calls.end(), [](const auto& call) { return call->answered; });
  };
  (void)machines_->Await(answered);
  withheld_.clear();
  if (!AwaitAll(calls, "seal")) return false;
  for (const auto& call : calls) {
    const v1::SealResponse& response = ***call->response;
    if (!response.has_prepared()) {
      checks_->Broken(
          absl::StrCat("server ", call->server, " does not prepare step ", next_, ": ", response.ShortDebugString()));
      return false;
    }
    records->push_back(response.prepared());
  }
  return true;
}

bool ChangeGroup::Commit(const v1::Decision& decision) {
  v1::CommitRequest request;
  request.set_job(kJob);
  *request.mutable_decision() = decision;
  Calls<v1::CommitResponse> calls;
  for (const int server : members_) {
    calls.push_back(std::make_shared<Call<v1::CommitResponse>>());
    calls.back()->server = server;
    Send(server,
         [this, request, call = calls.back()](Machine* machine) { machine->server().Commit(request, ReplyTo(call)); });
  }
  if (apart_ && random_->Percent(kForsakenPercent)) {
    int turns = 0;
    (void)machines_->Await([&] { return ++turns == kTurnsHeld; });
    held_.clear();
    return false;
  }
  return AwaitAll(calls, "commit");
}

bool ChangeGroup::Step(Ends ends) {
  const v1::StepHeader header = intent_->Header(next_, 0);
  Push(v1::SLICE_KIND_GRADIENT, header.gradient_presence());
  Push(v1::SLICE_KIND_VALUE, header.value_presence());
  if (ends == Ends::kAbandoned) return false;
  std::vector<v1::PreparedRecord> records;
  if (!Seal(&records)) return false;
  checks_->Prepared(*plan_, records);
  const absl::StatusOr<v1::Decision> decision = model::Decide(records);
  if (!decision.ok()) {
    checks_->Broken(absl::StrCat("no decision of step ", next_, ": ", decision.status().ToString()));
    return false;
  }
  checks_->Decided(*decision);
  step_ = next_++;
  return ends == Ends::kWhole && Commit(*decision);
}

}  // namespace ballast::sim
