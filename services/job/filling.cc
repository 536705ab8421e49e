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
constexpr absl::Duration kTellInterval = absl::Seconds(10);
// After so many late copies steps are held back, for less time than a trainer notices: a copy of 16 MiB takes a network
// of 1 Gbit/s an eighth of a second.
constexpr int kLateMax = 3;
constexpr absl::Duration kHoldMax = absl::Seconds(1);
// A round looks at so many missing chunks at most, some tenths of a millisecond under the job's lock. It goes on after
// a pause if none of them may be copied now.
constexpr int kLooksMax = 500;
constexpr absl::Duration kLookPause = absl::Milliseconds(100);

}  // namespace

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
    missing_.Return();  // what waited for this may begin
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
  if (lacks) {
    missing_.Update({plan, core_->machine->unfilled_changes(), &core_->machine->unfilled()}, [this](uint64_t chunk) {
      core_->mu.AssertHeld();
      return NeedOf(chunk);
    });
    ChooseMissing(CopyNeed::kLacking, &round, &begun);
    ChooseMissing(CopyNeed::kMoving, &round, &begun);
  }
  ChooseMends(plan.get(), &round, &begun);
  if (round.holds.value_or(false)) round.again = std::min(round.again, held_until_);
  RunAt(round.again);
  return begun;
}

void Filling::ChooseMissing(CopyNeed need, Round* round, std::vector<CopyPtr>* begun) {
  const std::map<uint64_t, int64_t>& unfilled = core_->machine->unfilled();
  const auto may_begin = [&] {
    core_->mu.AssertHeld();
    return copies_.size() < kCopiesAtOnce && !round->paused && !(need == CopyNeed::kMoving && round->moves_paused);
  };
  const uint64_t* at = missing_.First(need);
  for (int looks = 0; at != nullptr && may_begin(); ++looks) {
    const uint64_t index = *at;
    if (looks == kLooksMax) {
      missing_.Stay(need, index);
      round->again = std::min(round->again, round->now + kLookPause);
      return;
    }
    const auto lacks = unfilled.find(index);
    const std::shared_ptr<HeldChunk> chunk = core_->state.Find(index);
    const bool missing = lacks != unfilled.end() && chunk != nullptr && !chunk->filled();
    const CopyPtr copy = missing ? NextOf(*chunk, lacks->second, need, round) : nullptr;
    if (copy != nullptr) begun->push_back(copies_[KeyOf(*copy)] = copy);
    at = missing_.Next(need, index);
  }
  // The rest of the turn, if this was the end of one.
  if (at == nullptr && missing_.Stay(need, 0) > 0) round->again = std::min(round->again, round->now + kLookPause);
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
