#include "ballast/services/job/kept_copies.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <utility>

#include "ballast/proto/base/status.h"
#include "ballast/proto/model/verdict.h"
#include "ballast/services/job_state/job_core.h"
#include "ballast/services/job_state/job_entry.h"
#include "ballast/services/journal/job_journal.h"

namespace ballast::services {
namespace {

// A quarter of what is missing, so that entries of 10,000 chunks are written a few times only.
constexpr uint64_t kBatchMin = 16, kBatches = 4;

}  // namespace

std::vector<int64_t> KeptCopies::Wanted() const {
  std::set<int64_t> wanted;
  for (const auto& [version, pin] : core_->machine->pins()) wanted.insert(version);
  for (const auto& [version, pin] : told_) wanted.insert(version);
  return {wanted.begin(), wanted.end()};
}

bool KeptCopies::Wants(int64_t version) const {
  return told_.contains(version) || core_->machine->FindPin(version) != nullptr;
}

KeptCopies::Next KeptCopies::NextOf(const HeldChunk& chunk) {
  if (!IsTold()) return {};
  const uint64_t index = chunk.store_index;
  std::vector<int64_t> needed = Wanted();
  std::erase_if(needed, [&](int64_t version) {
    core_->mu.AssertHeld();
    return written_.contains({version, index});
  });
  if (needed.empty()) return {.newest = true};
  if (writing_) return {};
  if (batch_.empty()) batch_max_ = std::max<uint64_t>(kBatchMin, core_->machine->unfilled().size() / kBatches);
  if (!batch_.contains(index) && batch_.size() >= batch_max_) return {};
  batch_.insert(index);
  for (const int64_t version : needed) {
    if (!have_.contains({version, index})) return {.version = version};
  }
  return {};
}

bool KeptCopies::Mend(int64_t version, uint64_t store_index, const absl::Status& found) {
  if (std::exchange(unmended_in_, core_->state.plan()) != core_->state.plan()) unmended_.clear();
  const HeldChunks& chunks = core_->state.chunks();
  const auto at =
      std::find_if(chunks.begin(), chunks.end(), [&](const auto& chunk) { return chunk->store_index == store_index; });
  const Place place = {version, store_index};
  if (at == chunks.end() || !Wants(version) || unmended_.contains(place)) return false;
  const uint64_t index = (*at)->layout().index;
  if (resume_ == nullptr || core_->around.chunk_source == nullptr || !core_->machine->HasOtherHolder(index)) {
    return false;
  }
  if (mends_.emplace(place, Damage{.chunk = *at, .fills = !(*at)->filled()}).second && (*at)->filled()) {
    ++core_->counters.damaged_chunks;
    spdlog::error("job '{}': what version {} keeps of chunk {} is damaged here, and is copied from another server: {}",
                  core_->name, version, index, std::string(found.message()));
    resume_();
  }
  return true;
}

bool KeptCopies::Mends(int64_t version) const {
  const auto first = mends_.lower_bound({version, 0});
  return first != mends_.end() && first->first.first == version;
}

std::vector<std::pair<int64_t, std::shared_ptr<HeldChunk>>> KeptCopies::ToMend() const {
  std::vector<std::pair<int64_t, std::shared_ptr<HeldChunk>>> damaged;
  for (const auto& [place, damage] : mends_) {
    if (damage.chunk->filled()) damaged.emplace_back(place.first, damage.chunk);
  }
  return damaged;
}

void KeptCopies::EndMend(int64_t version, const HeldChunk& chunk, const absl::Status& mended) {
  const Place place = {version, chunk.store_index};
  if (mends_.erase(place) == 0) return;
  lack_.erase(place);
  if (!mended.ok()) {
    unmended_.insert(place);
    spdlog::error("job '{}': what version {} keeps of chunk {} stays damaged here, and a restore of it is refused: {}",
                  core_->name, version, chunk.layout().index, std::string(mended.message()));
  } else {
    spdlog::info("job '{}': what version {} keeps of chunk {} is whole again", core_->name, version,
                 chunk.layout().index);
  }
  core_->Moved();
}

void KeptCopies::AdvanceMends() {
  const size_t before = mends_.size();
  for (auto next = mends_.begin(); next != mends_.end();) {
    const auto at = next++;
    const HeldChunk& chunk = *at->second.chunk;
    const bool here = core_->state.Find(chunk.layout().index).get() == &chunk;
    const bool was_filled = chunk.filled() && at->second.fills;
    at->second.fills = !chunk.filled();
    if (!was_filled && here && Wants(at->first.first)) {
      if (!chunk.filled() || core_->machine->HasOtherHolder(chunk.layout().index)) continue;
      EndMend(at->first.first, chunk,
              model::Error(absl::StatusCode::kDataLoss, model::kStateLost, "no other server holds the chunk any more"));
      continue;
    }
    if (chunk.filled() || !here) lack_.erase(at->first);
    mends_.erase(at);
  }
  if (mends_.size() < before) core_->Moved();
}

void KeptCopies::ForgetFilled() {
  const uint64_t changes = core_->machine->unfilled_changes();
  if (std::exchange(forgot_under_, core_->state.plan()) == core_->state.plan() && forgot_at_ == changes) return;
  forgot_at_ = changes;
  std::vector<bool> missing;
  for (const auto& [index, least] : core_->machine->unfilled()) {
    const std::shared_ptr<HeldChunk> chunk = core_->state.Find(index);
    if (chunk == nullptr) continue;
    if (chunk->store_index >= missing.size()) missing.resize(chunk->store_index + 1);
    missing[chunk->store_index] = true;
  }
  const auto is_filled = [&](uint64_t index) { return index >= missing.size() || !missing[index]; };
  std::erase_if(have_, [&](const Place& place) { return is_filled(place.second); });
  std::erase_if(written_, [&](const Place& place) { return is_filled(place.second); });
  std::erase_if(lack_, [&](const auto& entry) {
    core_->mu.AssertHeld();
    return is_filled(entry.first.second) && !mends_.contains(entry.first);
  });
  std::erase_if(batch_, is_filled);
}

void KeptCopies::Filled(const HeldChunk& chunk) {
  const uint64_t index = chunk.store_index;
  for (const int64_t version : Wanted()) {
    const Place place = {version, index};
    have_.erase(place);
    written_.erase(place);
    if (!mends_.contains(place)) lack_.erase(place);
  }
  batch_.erase(index);
}

// Asked after each copy, and a table adds thousands of chunks.
bool KeptCopies::KeepsNothing() const {
  return told_.empty() && have_.empty() && written_.empty() && lack_.empty() && batch_.empty();
}

void KeptCopies::Advance(std::function<void()> written) {
  AdvanceMends();
  if (KeepsNothing()) return;
  ForgetFilled();
  if (writing_ || (batch_.empty() && (!core_->machine->unfilled().empty() || told_.empty()))) return;
  for (const int64_t version : Wanted()) {
    const bool whole = std::all_of(batch_.begin(), batch_.end(), [&](uint64_t index) {
      core_->mu.AssertHeld();
      return have_.contains({version, index});
    });
    if (!whole) return;
  }
  writing_ = true;
  core_->worker->Post([this, written = std::move(written)] { Write(written); });
}

bool KeptCopies::IsOf(const HeldChunk& chunk, int64_t version) const {
  const uint32_t tensor = chunk.layout().segments.front().tensor;
  uint32_t tensors = 0;
  for (const v1::Registration& registration : core_->state.plan()->open().spec().registrations()) {
    tensors += static_cast<uint32_t>(registration.tensors_size());
    if (tensor < tensors) return registration.version() < version;
  }
  return false;
}

std::map<std::string, uint32_t> KeptCopies::HoldersOf(const model::EpochPlan& plan) {
  std::map<std::string, uint32_t> holders;
  for (const v1::Shard& shard : plan.open().table().shards()) {
    for (const uint32_t member : shard.holders()) {
      holders.emplace(plan.members()[static_cast<int>(member)].server_id(), member);
    }
  }
  return holders;
}

bool KeptCopies::IsTold() {
  const std::shared_ptr<const model::EpochPlan> plan = core_->state.plan();
  if (plan == nullptr || asked_under_ == plan || !plan->open().has_table()) return true;
  // Asked for each missing chunk, and a table is long.
  if (std::exchange(looked_at_, plan) != plan) holds_ = HoldersOf(*plan).contains(core_->around.server_id);
  return holds_;
}

// The one that is there longest knows the most, should a copy have just ended.
std::optional<uint32_t> KeptCopies::ToAsk(const model::EpochPlan& plan, uint32_t failed) {
  if (IsTold()) return std::nullopt;
  std::vector<uint32_t> members;
  for (const auto& [server, member] : HoldersOf(plan)) members.push_back(member);
  if (members.empty()) return std::nullopt;
  std::stable_sort(members.begin(), members.end(), [&](uint32_t a, uint32_t b) {
    return model::Compare(plan.members()[static_cast<int>(a)].since(), plan.members()[static_cast<int>(b)].since()) < 0;
  });
  return members[failed % members.size()];
}

void KeptCopies::Tell(const v1::ExportResponse& answer, const std::set<int64_t>& unpinning) {
  asked_under_ = core_->state.plan();
  for (const v1::ExportResponse::Kept& kept : answer.kept()) {
    const int64_t version = kept.decision().step();
    if (Wants(version) || unpinning.contains(version)) continue;
    const HeldChunks& chunks = core_->state.chunks();
    const bool was_here = std::any_of(chunks.begin(), chunks.end(), [&](const auto& chunk) {
      core_->mu.AssertHeld();
      return chunk->filled() && IsOf(*chunk, version);
    });
    if (was_here) {
      spdlog::warn(
          "job '{}': this server has chunks that version {} needs, and does not keep it: it cannot be restored",
          core_->name, version);
      continue;
    }
    v1::PinnedVersion& pin = told_[version];
    pin.set_version(version);
    *pin.mutable_since() = core_->state.plan()->open().epoch();
    *pin.mutable_decision() = kept.decision();
    *pin.mutable_tensor_steps() = kept.tensor_steps();
    pin.set_registration_count(kept.registration_count());
    pin.set_requested(true);
    pin.set_life(journal_->life());
  }
}

bool KeptCopies::waits() { return !IsTold() || !told_.empty() || !core_->machine->unfilled().empty(); }

void KeptCopies::Took(int64_t version, const HeldChunk& chunk) { have_.insert({version, chunk.store_index}); }

bool KeptCopies::Lack(int64_t version, const HeldChunk& chunk, const std::string& server,
                      const std::vector<std::string>& holders) {
  std::set<std::string>& lacking = lack_[{version, chunk.store_index}];
  lacking.insert(server);
  return std::all_of(holders.begin(), holders.end(), [&](const std::string& one) { return lacking.contains(one); });
}

bool KeptCopies::Forget(int64_t version) {
  const auto is_of = [&](const Place& place) { return place.first == version; };
  std::erase_if(have_, is_of);
  std::erase_if(written_, is_of);
  std::erase_if(lack_, [&](const auto& entry) { return is_of(entry.first); });
  return told_.erase(version) > 0;
}

std::vector<v1::PinnedVersion> KeptCopies::Described() const {
  std::vector<v1::PinnedVersion> pins;
  for (const auto& [version, pin] : core_->machine->pins()) pins.push_back(pin);
  for (const auto& [version, pin] : told_) pins.push_back(pin);
  return pins;
}

void KeptCopies::Write(const std::function<void()>& written) {
  std::shared_ptr<storage::ChunkStore> store;
  std::vector<v1::PinnedVersion> pins;
  std::set<uint64_t> batch;
  {
    JobMutexLock lock(&core_->mu);
    if (!core_->Refusal().ok()) return;
    store = core_->state.store();
    pins = Described();
    batch = batch_;
  }
  absl::Status status;
  for (const v1::PinnedVersion& pin : pins) {
    if (store != nullptr) store->ExpectPin(pin.version());  // of a chunk that is zero there is nothing else
    if (status.ok() && store != nullptr) status = store->SyncKept(pin.version());
    const auto kept = store == nullptr ? std::vector<storage::DurableChunk>() : store->KeptBy(pin.version());
    if (status.ok()) status = WritePin(core_->around.catalog, core_->name, pin, kept);
  }
  core_->LockedOnWorker([&](Replies* replies) {
    core_->mu.AssertHeld();
    writing_ = false;
    if (!status.ok()) return core_->Fail(status, kCatalogRemedy, replies);
    for (const v1::PinnedVersion& pin : pins) {
      if (!Wants(pin.version())) continue;  // given up meanwhile: the worker erases the entry next
      if (told_.erase(pin.version()) > 0) core_->machine->Pinned(pin);
      for (const uint64_t index : batch) {
        if (have_.contains({pin.version(), index})) written_.insert({pin.version(), index});
      }
    }
    batch_.clear();
    core_->Moved();
    written();
  });
}

}  // namespace ballast::services
