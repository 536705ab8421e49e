#include "ballast/services/job/filling.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "ballast/proto/base/status.h"
#include "ballast/services/job/kept_copies.h"
#include "ballast/services/job/kept_versions.h"
#include "ballast/services/job_state/job_core.h"
#include "ballast/services/threads/chunk_source.h"

namespace ballast::services {
namespace {

// The holder may wait for the wanted version, and then for its worker.
constexpr absl::Duration kFetchPatience = absl::Seconds(30);
// A copy whose version is ahead waits for the commit here.
constexpr absl::Duration kMachinePatience = absl::Seconds(30);
constexpr absl::Duration kTellInterval = absl::Seconds(10);
// After so many late copies steps are held back, for less time than a trainer notices: a copy of 16 MiB takes a network
// of 1 Gbit/s an eighth of a second.
constexpr int kLateMax = 3;
constexpr absl::Duration kHoldMax = absl::Seconds(1);

constexpr char kNothingLeft[] =
    "Nothing is left of that part of the state: drop the job and start it from a checkpoint, or bring back a data "
    "directory of one of these servers as it was";

absl::Status TooLate(int64_t version, int64_t applied) {
  return model::Error(
      absl::StatusCode::kFailedPrecondition, model::kVersionGone,
      absl::StrCat("the copy is of version ", version, ", and step ", applied, " has been applied without the chunk"));
}

// The chunk that the holder has lost, by its answer.
std::string LostOf(const absl::Status& status) {
  const model::Details details = model::DetailsOf(status);
  const auto lost = details.find(model::kLostChunk);
  return lost == details.end() ? "" : lost->second;
}

}  // namespace

bool Filling::IsBadCopy(const absl::Status& status) {
  return absl::IsInvalidArgument(status) || model::ReasonOf(status) == model::kChecksum;
}

storage::WholeState Filling::TakeState(v1::ExportResponse* message) {
  storage::WholeState state;
  for (v1::ExportResponse::Array& array : *message->mutable_arrays()) {
    const std::string bytes = std::move(*array.mutable_payload());
    const auto* const begin = reinterpret_cast<const std::byte*>(bytes.data());
    state.arrays.push_back({{begin, begin + bytes.size()}, array.crc32c()});
  }
  return state;
}

Filling::Filling(JobCore* core, KeptCopies* kept_copies, KeptVersions* kept)
    : core_(core), kept_copies_(kept_copies), kept_(kept) {
  JobMutexLock lock(&core_->mu);
  kept_copies_->SetResume([this] {
    core_->mu.AssertHeld();
    Resume();
  });
}

Filling::~Filling() {
  JobMutexLock lock(&core_->mu);
  if (timer_at_ != absl::InfiniteFuture()) core_->around.deadlines->Cancel(timer_);
}

void Filling::Resume() {
  if (core_->around.chunk_source == nullptr || std::exchange(posted_, true)) return;
  core_->clerk->Post([this] { Begin(); });
}

void Filling::Begin() {
  std::vector<CopyPtr> begun;
  core_->LockedOnWorker([&](Replies*) {
    core_->mu.AssertHeld();
    posted_ = false;
    begun = Choose(absl::Now());
  });
  for (const CopyPtr& copy : begun) {
    core_->around.chunk_source->Fetch(copy->request, copy->from, absl::Now() + kFetchPatience,
                                      [this, job = core_->owner(), copy](absl::StatusOr<v1::ExportResponse> state) {
                                        if (const std::shared_ptr<const void> alive = job.lock())
                                          Arrive(copy, std::move(state));
                                      });
  }
}

uint64_t Filling::BytesOf(const HeldChunk& chunk) const {
  return core_->state.store()->layout().Of(chunk.form).StateBytes(chunk.elements);
}

v1::ExportRequest Filling::RequestTo(const model::EpochPlan& plan) const {
  v1::ExportRequest request;
  request.set_job(core_->name);
  request.set_life(plan.open().table().life());
  request.set_spec_digest(plan.open().spec_digest());
  return request;
}

Filling::CopyPtr Filling::MakeCopy(const HeldChunk& chunk, int64_t least, uint32_t from) const {
  const auto copy = std::make_shared<Copy>();
  copy->chunk = chunk.layout().index;
  copy->plan = core_->state.plan();
  copy->from = core_->state.plan()->members()[static_cast<int>(from)];
  copy->request = RequestTo(*copy->plan);
  copy->request.set_chunk(copy->chunk);
  copy->request.set_least(std::max(least, *chunk.version()));
  return copy;
}

bool Filling::CopiesNewest() const {
  return std::any_of(copies_.begin(), copies_.end(), [](const auto& copy) { return !copy.second->kept.has_value(); });
}

bool Filling::Lacks(const model::EpochPlan* plan) const {
  return plan != nullptr && plan->FindMember(core_->around.server_id).ok() && !core_->machine->unfilled().empty();
}

std::vector<Filling::CopyPtr> Filling::Choose(absl::Time now) {
  std::vector<CopyPtr> begun;
  const std::shared_ptr<const model::EpochPlan> plan = core_->state.plan();
  if (!core_->Refusal().ok() || core_->state.recovering() || !core_->machine->may_import()) return begun;
  std::erase_if(copies_, [&](const auto& copy) { return copy.second->plan != plan; });
  if (!CopiesNewest() || now >= held_until_) EndHold();
  kept_copies_->Advance([this] {
    core_->mu.AssertHeld();
    Resume();
  });
  AskForKept(plan, &begun);
  const bool lacks = Lacks(plan.get());
  if (lacks) {
    TellBegin();
    TellProgress(now);
  } else {
    told_begin_ = false;  // another table may have taken the last missing chunks away
  }
  Round round{.now = now, .again = HoldsSteps() ? held_until_ : absl::InfiniteFuture()};
  for (const auto& [index, least] : core_->machine->unfilled()) {
    if (!lacks || copies_.size() == kCopiesAtOnce || round.paused) break;
    const CopyNeed need = NeedOf(index);
    if (need == CopyNeed::kMoving && round.moves_paused) continue;
    const std::shared_ptr<HeldChunk> chunk = core_->state.Find(index);
    if (chunk == nullptr || chunk->filled()) continue;
    if (const CopyPtr copy = NextOf(*chunk, least, need, &round)) begun.push_back(copies_[KeyOf(*copy)] = copy);
  }
  ChooseMends(plan.get(), &round, &begun);
  if (round.holds.value_or(false)) round.again = std::min(round.again, held_until_);
  RunAt(round.again);
  return begun;
}

CopyNeed Filling::NeedOf(uint64_t chunk) const {
  const model::EpochPlan& plan = *core_->state.plan();
  // What a holder lacks was damaged.
  const bool lacking =
      core_->machine->IsHolder(chunk) || plan.holders_of(chunk).size() < plan.open().table().replicas();
  return lacking ? CopyNeed::kLacking : CopyNeed::kMoving;
}

bool Filling::MayBegin(const HeldChunk& chunk, CopyNeed need, Round* round) const {
  ImportPace* const pace = core_->around.import_pace;
  if (pace == nullptr) return true;
  const absl::Time free = pace->Take(need, BytesOf(chunk), round->now);
  if (free == round->now) return true;
  round->again = std::min(round->again, free);
  (need == CopyNeed::kMoving ? round->moves_paused : round->paused) = true;
  return false;
}

Filling::CopyPtr Filling::NextOf(const HeldChunk& chunk, int64_t least, CopyNeed need, Round* round) {
  const uint64_t index = chunk.layout().index;
  const KeptCopies::Next next = kept_copies_->NextOf(chunk);
  const bool nothing = !next.newest && !next.version.has_value();
  // Copies that hold steps back begin together.
  const bool late = next.newest && !round->holds.has_value() && late_ >= kLateMax && CopiesNewest();
  if (nothing || late || copies_.contains({index, next.version})) return nullptr;
  if (next.version.has_value() && round->now < no_room_.until) {
    round->again = std::min(round->again, no_room_.until);
    return nullptr;
  }
  CopyPtr copy = CopyFrom(chunk, least, need, round);
  if (copy == nullptr) return nullptr;
  if (next.newest) {
    if (!round->holds.has_value()) round->holds = BeginHold(round->now);
    copy->holds_steps = *round->holds;
  } else {
    copy->kept = *next.version;
    copy->request.set_kept_version(*next.version);
  }
  return copy;
}

Filling::CopyPtr Filling::CopyFrom(const HeldChunk& chunk, int64_t least, CopyNeed need, Round* round) {
  const model::EpochPlan& plan = *core_->state.plan();
  const uint32_t self = *plan.FindMember(core_->around.server_id);
  const std::optional<uint32_t> from = sources_.Choose(plan, chunk.layout().index, self, round->now, &round->again);
  if (!from.has_value()) return nullptr;
  if (!MayBegin(chunk, need, round)) return nullptr;
  return MakeCopy(chunk, least, *from);
}

// With no step prepared here none is decided, so the copies come in time.
bool Filling::BeginHold(absl::Time now) {
  const int64_t committed = core_->machine->committed();
  if (late_ < kLateMax || committed == held_after_ || core_->machine->prepared()) return false;
  held_after_ = committed;
  held_until_ = now + kHoldMax;
  return true;
}

void Filling::EndHold() {
  if (held_until_ == absl::InfinitePast()) return;
  held_until_ = absl::InfinitePast();
  core_->Moved();
}

bool Filling::HoldsSteps() const { return held_until_ != absl::InfinitePast() && absl::Now() < held_until_; }

void Filling::RunAt(absl::Time when) {
  if (when >= timer_at_) return;
  if (timer_at_ != absl::InfiniteFuture()) core_->around.deadlines->Cancel(timer_);
  timer_at_ = when;
  timer_ = core_->around.deadlines->Add(when, [this, job = core_->owner()] {
    const std::shared_ptr<const void> alive = job.lock();
    if (alive == nullptr) return;
    core_->Enter([this](Replies*) {
      core_->mu.AssertHeld();
      timer_at_ = absl::InfiniteFuture();
      core_->Moved();  // steps may be held back no longer
      Resume();
    });
  });
}

std::shared_ptr<HeldChunk> Filling::ChunkOf(const CopyPtr& copy) const {
  const auto current = copies_.find(KeyOf(*copy));
  if (current == copies_.end() || current->second != copy || copy->plan != core_->state.plan()) return nullptr;
  std::shared_ptr<HeldChunk> chunk = core_->state.Find(copy->chunk);
  return chunk == nullptr || chunk->filled() != copy->mends ? nullptr : chunk;
}

void Filling::End(const CopyPtr& copy) {
  const auto current = copies_.find(KeyOf(*copy));
  if (current != copies_.end() && current->second == copy) copies_.erase(current);
  if (!CopiesNewest()) EndHold();
  Resume();
}

void Filling::Repeat(const CopyPtr& copy, const absl::Status& why) {
  if (model::ReasonOf(why) == model::kVersionGone) ++late_;
  End(copy);
}

void Filling::Fail(const CopyPtr& copy, const absl::Status& cause) {
  const std::string& server = copy->from.server_id();
  if (core_->Refusal().ok() && sources_.Failed(server, cause, absl::Now())) {
    spdlog::warn("job '{}' cannot copy chunk {} from server '{}' at {}, and asks again: {}", core_->name, copy->chunk,
                 server, copy->from.address(), std::string(cause.message()));
  }
  End(copy);
}

void Filling::NoteLost(const CopyPtr& copy, Replies* replies) {
  if (std::exchange(lost_in_, copy->plan) != copy->plan) lost_by_.clear();
  std::set<std::string>& lost = lost_by_[copy->chunk];
  lost.insert(copy->from.server_id());
  const std::shared_ptr<HeldChunk> chunk = ChunkOf(copy);
  if (!core_->Refusal().ok() || !core_->machine->IsHolder(copy->chunk)) return;
  const model::EpochPlan& plan = *core_->state.plan();
  for (const uint32_t holder : plan.holders_of(copy->chunk)) {
    const std::string& server = plan.members()[static_cast<int>(holder)].server_id();
    if (server != core_->around.server_id && !lost.contains(server)) return;
  }
  absl::Status nowhere =
      model::Error(absl::StatusCode::kDataLoss, model::kStateLost,
                   absl::StrCat("chunk ", copy->chunk, " is damaged on all servers that hold it, here and on '",
                                absl::StrJoin(lost, "', '"), "': ", chunk->damage().message()));
  model::SetDetail(model::kLostChunk, absl::StrCat(copy->chunk), &nowhere);
  core_->Fail(nowhere, kNothingLeft, replies);
}

void Filling::Arrive(const CopyPtr& copy, absl::StatusOr<v1::ExportResponse> state) {
  if (state.ok()) copy->state = *std::move(state);
  core_->Enter([this, copy, status = state.status()](Replies* replies) {
    core_->mu.AssertHeld();
    if (copy->request.tell_kept()) return TakeKept(copy, status);
    const std::shared_ptr<HeldChunk> chunk = ChunkOf(copy);
    if (chunk == nullptr) return End(copy);
    if (copy->kept.has_value() && !status.ok()) return FailKept(copy, *chunk, status);
    if (LostOf(status) == absl::StrCat(copy->chunk)) NoteLost(copy, replies);
    if (!status.ok()) return Fail(copy, status);
    lost_by_.erase(copy->chunk);
    if (copy->state.elements() != chunk->elements) {
      return Fail(copy, model::Error(absl::StatusCode::kDataLoss, model::kDiverged,
                                     absl::StrCat("it has ", copy->state.elements(), " elements there, and ",
                                                  chunk->elements, " here")));
    }
    sources_.Answered(copy->from.server_id());
    if (copy->kept.has_value()) {
      return core_->worker->Post([this, copy] { copy->mends ? MendKept(copy) : InstallKept(copy); });
    }
    AwaitMachine(copy, replies);
  });
}

void Filling::AwaitMachine(const CopyPtr& copy, Replies* replies) {
  Waiter waiter;
  waiter.limit = absl::Now() + kMachinePatience;
  waiter.attempt = [this, copy](Replies*) {
    core_->mu.AssertHeld();
    return Try(copy);
  };
  waiter.expire = [this, copy](Replies*) {
    core_->mu.AssertHeld();
    End(copy);
  };
  waiter.refuse = [this, copy](const absl::Status& status, Replies*) {
    core_->mu.AssertHeld();
    Fail(copy, status);
  };
  core_->SubmitToMachine(std::move(waiter), replies);
}

absl::Status Filling::Check(const CopyPtr& copy, const HeldChunk& chunk) {
  BALLAST_RETURN_IF_ERROR(core_->Refusal());
  const int64_t version = copy->state.version();
  if (version < *chunk.version()) return TooLate(version, *chunk.version());
  if (!kept_copies_->NextOf(chunk).newest) return absl::CancelledError("what kept versions have of it comes first");
  return core_->machine->CheckImport(copy->chunk, version);
}

bool Filling::Try(const CopyPtr& copy) {
  const std::shared_ptr<HeldChunk> chunk = ChunkOf(copy);
  const absl::Status status = chunk == nullptr ? absl::CancelledError("") : Check(copy, *chunk);
  const std::string reason = model::ReasonOf(status);
  if (core_->Refusal().ok() && (reason == model::kBehind || reason == model::kBusy)) return false;
  if (status.ok()) {
    core_->worker->Post([this, copy] { Install(copy); });
  } else {
    Repeat(copy, status);
  }
  return true;
}

void Filling::Install(const CopyPtr& copy) {
  std::shared_ptr<storage::ChunkStore> store;
  storage::ChunkUpdate update;
  absl::Status status;
  core_->LockedOnWorker([&](Replies* replies) {
    core_->mu.AssertHeld();
    const std::shared_ptr<HeldChunk> chunk = ChunkOf(copy);
    status = chunk == nullptr ? absl::CancelledError("") : Check(copy, *chunk);
    if (!status.ok()) {
      // A step may have been decided meanwhile, and nothing more.
      return model::ReasonOf(status) == model::kBusy ? AwaitMachine(copy, replies) : Repeat(copy, status);
    }
    store = core_->state.store();
    update.chunk = chunk->store_index;
  });
  if (!status.ok()) return;
  const storage::WholeState state = TakeState(&copy->state);
  update.version = copy->state.version();
  update.flush = store->durable();
  update.imported = &state;
  status = store->Run({&update, 1}, [](size_t) {});
  if (status.ok() && store->durable()) status = store->Harden();
  bool counts = false;
  core_->LockedOnWorker([&](Replies* replies) {
    core_->mu.AssertHeld();
    counts = Installed(copy, status, replies);
    if (!counts) return;
    for (const storage::WholeState::Array& array : state.arrays) {
      core_->counters.imported_bytes.fetch_add(array.bytes.size(), std::memory_order_relaxed);
    }
  });
  if (!counts && status.ok()) store->Void({&update.chunk, 1});
}

bool Filling::Installed(const CopyPtr& copy, const absl::Status& status, Replies* replies) {
  if (!status.ok()) {
    if (IsBadCopy(status)) {
      Fail(copy, status);
      return false;
    }
    core_->Fail(model::Annotate(status, absl::StrCat("a copy of chunk ", copy->chunk, " could not be stored")),
                core_->Remedy(), replies);
    End(copy);
    return false;
  }
  const std::shared_ptr<HeldChunk> chunk = ChunkOf(copy);
  const int64_t version = copy->state.version();
  // Slices of a later step may have been missing when it was prepared.
  absl::Status filled = chunk == nullptr ? absl::CancelledError("") : core_->Refusal();
  if (filled.ok()) filled = core_->machine->MarkFilled(copy->chunk, version);
  if (filled.ok()) {
    chunk->Fill(version, std::max(chunk->changed(), std::min(copy->state.changed(), version)));
    core_->waiting.Wake(&chunk->pulls, replies);
    core_->Moved();
    if (!copy->holds_steps) late_ = 0;
    ++filled_chunks_;
    filled_bytes_ += BytesOf(*chunk);
    TellProgress(absl::Now());
  }
  Repeat(copy, filled);
  return filled.ok();
}

void Filling::TellBegin() {
  if (std::exchange(told_begin_, true)) return;
  began_ = told_ = absl::Now();
  filled_chunks_ = filled_bytes_ = 0;
  v1::JobStatus status;
  Describe(&status);
  std::set<std::string> holders;
  const model::EpochPlan& plan = *core_->state.plan();
  for (const auto& [chunk, least] : core_->machine->unfilled()) {
    for (const uint32_t holder : plan.holders_of(chunk)) {
      holders.insert(plan.members()[static_cast<int>(holder)].server_id());
    }
  }
  spdlog::info("job '{}' copies {} of {} chunks, {} MiB, from '{}'", core_->name, status.unfilled_chunks(),
               core_->state.chunks().size(), status.unfilled_bytes() >> 20, absl::StrJoin(holders, "', '"));
}

void Filling::TellProgress(absl::Time now) {
  const size_t left = core_->machine->unfilled().size();
  if (left == 0) {
    told_begin_ = false;
    spdlog::info("job '{}' has copied {} chunks, {} MiB, in {}", core_->name, filled_chunks_, filled_bytes_ >> 20,
                 absl::FormatDuration(absl::Trunc(now - began_, absl::Milliseconds(1))));
  } else if (now - told_ >= kTellInterval) {
    told_ = now;
    spdlog::info("job '{}' has copied {} of {} chunks, {} MiB", core_->name, filled_chunks_, filled_chunks_ + left,
                 filled_bytes_ >> 20);
  }
}

void Filling::Describe(v1::JobStatus* status) const {
  if (core_->state.recovering() || core_->machine->unfilled().empty()) return;
  uint64_t bytes = 0;
  for (const auto& [index, least] : core_->machine->unfilled()) {
    const std::shared_ptr<HeldChunk> chunk = core_->state.Find(index);
    if (chunk != nullptr) bytes += BytesOf(*chunk);
  }
  status->set_unfilled_chunks(core_->machine->unfilled().size());
  status->set_unfilled_bytes(bytes);
  status->set_filled_chunks(told_begin_ ? filled_chunks_ : 0);
}

}  // namespace ballast::services
