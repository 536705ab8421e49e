#include "ballast/storage/store/store_addition.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ballast/proto/base/threads.h"

namespace ballast::storage {
namespace {

constexpr char kMemory[] = "chunk state and working copies";

}  // namespace

StoreAddition::StoreAddition(StoreCore* core, absl::Span<const ChunkToAdd> added, const Plan& plan)
    : core_(*core), added_(added), plan_(plan), own_(added.size()), extents_(added.size()) {}

absl::Status StoreAddition::Run(Interrupt interrupt, Dispensable dispensable) {
  BALLAST_RETURN_IF_ERROR(core_.failed());
  BALLAST_RETURN_IF_ERROR(Check());
  BALLAST_RETURN_IF_ERROR(TakeMemory());
  if (const absl::Status taken = TakeNvme(); !taken.ok()) {
    LeaveKept();
    return taken;
  }
  return Restore(Append(), interrupt, dispensable);
}

bool StoreAddition::restores() const {
  return std::all_of(added_.begin(), added_.end(), [](const auto& a) { return a.durable.has_value(); });
}

bool StoreAddition::fills() const {
  return std::all_of(added_.begin(), added_.end(), [](const auto& a) { return a.durable.has_value() || a.imported; });
}

absl::Status StoreAddition::Check() const {
  if (plan_.chunks.size() != added_.size()) {
    return Bad(model::kBadRequest, absl::StrCat("a plan of ", plan_.chunks.size(), " chunks for ", added_.size()));
  }
  if (core_.versions.has_value() && core_.tiers->nvme() == nullptr) {
    return Bad(model::kBadConfig, "durable state needs an nvme tier, and this server has none: give an nvme budget");
  }
  for (size_t i = 0; i < added_.size(); ++i) BALLAST_RETURN_IF_ERROR(CheckChunk(i));
  return absl::OkStatus();
}

absl::Status StoreAddition::CheckChunk(size_t i) const {
  const auto [state, working] = plan_.chunks[i];
  if (added_[i].elements == 0) return Bad(model::kBadRequest, absl::StrCat("chunk ", i, " is empty"));
  if (working == TierKind::kNvme || (working == TierKind::kHbm && state != TierKind::kHbm)) {
    return Bad(model::kBadRequest, absl::StrCat("working copy of chunk ", i, " cannot be in ", TierName(*working),
                                                " with its state in ", TierName(state)));
  }
  const bool durable = core_.versions.has_value();
  const StateLayout layout = LayoutOf(i);
  if (layout.lends_master() && (durable || layout.working_copies())) {
    return Bad(model::kBadConfig,
               absl::StrCat("chunk ", i, " has its master in the trainer's memory, and this store ",
                            durable ? "is durable" : "keeps working copies", ": keep an fp32 master"));
  }
  if (durable && layout.keeps_remainder()) {
    return Bad(model::kBadConfig, absl::StrCat("chunk ", i, " keeps its master as remainder, and durable state is ",
                                               "whole without a working copy: keep an fp32 master"));
  }
  return core_.CheckTier(i, added_[i].elements, layout, state);
}

absl::Status StoreAddition::TakeMemory() {
  TierBytes state, working;
  for (size_t i = 0; i < added_.size(); ++i) {
    state[plan_.chunks[i].state] += StateBytes(i);
    if (!plan_.chunks[i].working.has_value()) continue;
    working[*plan_.chunks[i].working] += LayoutOf(i).WorkingBytes(added_[i].elements);
  }
  if (const uint64_t bytes = (shares() ? state.dram : 0) + working.dram; bytes > 0) {
    DramTier& tier = *core_.tiers->dram();
    BALLAST_ASSIGN_OR_RETURN(dram_, fills() ? tier.AllocateToFill(bytes, kMemory) : tier.Allocate(bytes, kMemory));
    dram_.MarkRest(working.dram, TierPart::kWorking);
    dram_.Charge(core_.account);
  }
  for (size_t i = 0; i < added_.size() && !shares(); ++i) {
    BALLAST_ASSIGN_OR_RETURN(own_[i], TakeOwn(i));
  }
  if (core_.versions.has_value() && state.hbm > 0) BALLAST_RETURN_IF_ERROR(core_.buffers.reader.Prepare());
  return core_.buffers.TakePullMemory(plan_.pull);
}

absl::StatusOr<OwnMemory> StoreAddition::TakeOwn(size_t i) const {
  const ChunkPlacement& placement = plan_.chunks[i];
  OwnMemory own;
  if (placement.state == TierKind::kHbm) {
    BALLAST_ASSIGN_OR_RETURN(own.hbm, core_.tiers->hbm()->Allocate(StateBytes(i), kMemory));
  } else if (placement.state == TierKind::kDram) {
    BALLAST_ASSIGN_OR_RETURN(own.dram, core_.tiers->dram()->Allocate(StateBytes(i), kMemory));
  }
  if (placement.working == TierKind::kHbm) {
    const uint64_t bytes = core_.layout.WorkingBytes(added_[i].elements);
    BALLAST_ASSIGN_OR_RETURN(own.hbm_working, core_.tiers->hbm()->Allocate(bytes, kMemory));
    own.hbm_working.Mark(TierPart::kWorking);
  }
  own.Charge(core_.account);
  return own;
}

absl::Status StoreAddition::TakeNvme() {
  // Before any other space: what is given back after an error may be what a wrong entry should have named.
  BALLAST_RETURN_IF_ERROR(TakeKept());
  BALLAST_RETURN_IF_ERROR(TakeFresh());
  uint64_t moving = 0;  // the largest state that goes to NVMe
  for (size_t i = 0; i < added_.size(); ++i) {
    if (plan_.chunks[i].state == TierKind::kNvme) moving = std::max(moving, StateBytes(i));
  }
  return core_.buffers.TakeStaging(moving, DramTier::Limit::kBudget);
}

absl::Status StoreAddition::TakeKept() {
  for (size_t i = 0; i < added_.size(); ++i) {
    if (!added_[i].durable.has_value()) continue;
    const DurableChunk& durable = *added_[i].durable;
    BALLAST_ASSIGN_OR_RETURN(extents_[i], core_.tiers->nvme()->TakeKept(durable.offset, durable.file));
    extents_[i].Charge(core_.account);
  }
  return absl::OkStatus();
}

absl::Status StoreAddition::TakeFresh() {
  // A restart adds all chunks at once, and must not need more than they have taken one by one.
  uint64_t room = 0, largest = core_.chunks.largest_bytes();
  for (size_t i = 0; i < added_.size(); ++i) {
    const uint64_t bytes = StateBytes(i);
    largest = std::max(largest, bytes);
    aside_bytes_ += added_[i].aside_bytes;
    if (added_[i].durable.has_value()) continue;
    if (plan_.chunks[i].state == TierKind::kNvme) {
      BALLAST_ASSIGN_OR_RETURN(extents_[i], core_.tiers->nvme()->Allocate(bytes, "chunk state"));
      extents_[i].Charge(core_.account);
    } else {
      room += bytes;
    }
  }
  if (!core_.versions.has_value()) return absl::OkStatus();
  spare_bytes_ = core_.versions->extents.SpareBytesMissing(core_.chunks.present() + added_.size(), largest);
  if (const uint64_t bytes = room + spare_bytes_ + aside_bytes_; bytes > 0) {
    BALLAST_ASSIGN_OR_RETURN(room_, core_.tiers->nvme()->Promise(bytes, "durable versions of chunks", largest));
    room_.Charge(core_.account);
  }
  return absl::OkStatus();
}

void StoreAddition::LeaveKept() {
  for (size_t i = 0; i < added_.size(); ++i) {
    if (added_[i].durable.has_value()) extents_[i].Leave();
  }
}

std::vector<StoredChunk*> StoreAddition::Append() {
  if (room_.bytes() > 0) {
    core_.versions->pins.SetAside(room_.Split(aside_bytes_));
    core_.versions->extents.AddRoom(std::move(room_), spare_bytes_);
  }
  DramBlock* const shared = core_.chunks.Keep(std::move(dram_));
  std::byte* next = shared->bytes().data();
  std::vector<NewChunk> chunks;
  for (size_t i = 0; i < added_.size(); ++i) {
    // Noted even for a state that turns out unreadable: the extent stays on the disk.
    if (core_.versions.has_value()) {
      core_.versions->Add(added_[i].durable);
      core_.versions->pins.AddShare(core_.chunks.count() + i, added_[i].aside_bytes);
    }
    chunks.push_back(
        {LayoutOf(i), added_[i].elements, added_[i].id, MemoryOf(i, shared, &next), std::move(extents_[i])});
  }
  return core_.chunks.Append(std::move(chunks));
}

ChunkMemory StoreAddition::MemoryOf(size_t i, DramBlock* shared, std::byte** next) {
  const auto take = [next](uint64_t bytes) { return std::exchange(*next, *next + bytes); };
  const ChunkPlacement placement = plan_.chunks[i];
  const StateLayout layout = LayoutOf(i);
  SharedMemory parts{.block = shared};
  if (placement.state == TierKind::kDram && shares()) parts.state = take(StateBytes(i));
  if (placement.working != TierKind::kHbm && layout.working_copies()) {
    parts.working = take(layout.WorkingBytes(added_[i].elements));
  }
  return {placement, std::move(own_[i]), parts};
}

absl::Status StoreAddition::Restore(const std::vector<StoredChunk*>& chunks, Interrupt interrupt,
                                    Dispensable dispensable) {
  std::thread settling;  // beside the reads that fill the memory
  if (restores() && !chunks.empty()) {
    const auto settle = [this, block = chunks.front()->memory.shared()] { core_.tiers->dram()->Settle(block); };
    absl::StatusOr<std::thread> made = model::MakeThread(settle);
    if (made.ok()) {
      settling = *std::move(made);
    } else {
      settle();  // slower
    }
  }
  const auto goes_on = [&](size_t i, const absl::Status& damage) {
    if (!dispensable(i, damage)) return false;
    core_.Void(*chunks[i]);
    return true;
  };
  const absl::Status restored = core_.restore.All(added_, chunks, interrupt, goes_on);
  if (settling.joinable()) settling.join();
  return core_.EndWith(restored);  // on an error the chunks are there, and unusable
}

}  // namespace ballast::storage
