#include "ballast/services/job_state/job_state.h"

#include "absl/strings/str_cat.h"
#include "ballast/proto/base/status.h"

namespace ballast::services {

std::shared_ptr<HeldChunk> JobState::Find(uint64_t index) const {
  const auto chunk = by_index_.find(index);
  return chunk == by_index_.end() ? nullptr : chunk->second;
}

absl::StatusOr<std::shared_ptr<HeldChunk>> JobState::Held(uint64_t index) const {
  if (std::shared_ptr<HeldChunk> chunk = Find(index)) return chunk;
  return model::Error(absl::StatusCode::kDataLoss, model::kDiverged,
                      absl::StrCat("the open epoch's plan gives chunk ", index,
                                   " to this server, which does not have it; restart the server"));
}

std::shared_ptr<HeldChunk> JobState::FindSlice(const v1::PushRequest& header, uint32_t* slice) const {
  if (plan_ == nullptr) return nullptr;
  const auto found = plan_->FindSlice(header.rank(), header.unit(), {header.begin(), header.end()});
  if (!found.has_value()) return nullptr;
  *slice = *found;
  return Find(plan_->slices()[*found].chunk);
}

void JobState::Open(std::shared_ptr<const model::EpochPlan> plan, HeldChunks chunks, absl::Span<const uint64_t> indices,
                    bool keeps_slices) {
  plan_ = std::move(plan);
  HeldChunks before = std::move(leaving_);
  before.insert(before.end(), chunks_->begin(), chunks_->end());
  chunks_ = std::make_shared<const HeldChunks>(std::move(chunks));
  lent_ = nullptr;
  const auto was = std::exchange(by_index_, {});
  by_index_.reserve(chunks_->size());
  for (size_t i = 0; i < chunks_->size(); ++i) {
    const std::shared_ptr<HeldChunk>& chunk = (*chunks_)[i];
    const auto stays = was.find(indices[i]);
    if (!keeps_slices || stays == was.end() || stays->second != chunk) {
      chunk->Open(plan_->layout().chunks()[indices[i]], *plan_);
    }
    by_index_[indices[i]] = chunk;
  }
  leaving_.clear();
  for (std::shared_ptr<HeldChunk>& chunk : before) {
    if (by_index_.contains(chunk->id)) continue;
    chunk->intake.Clear();
    if (!recovering_) chunk->Void(*chunk->version());  // a later Open of the log may bring it back
    leaving_.push_back(std::move(chunk));
  }
}

void JobState::SetKept(absl::Span<const uint64_t> bytes) {
  for (const HeldChunks* const chunks : {chunks_.get(), static_cast<const HeldChunks*>(&leaving_)}) {
    for (const auto& chunk : *chunks) {
      chunk->SetKeptBytes(chunk->store_index < bytes.size() ? bytes[chunk->store_index] : 0);
    }
  }
}

std::vector<uint64_t> JobState::KeptByShard() const {
  if (plan_ == nullptr || !plan_->open().has_table()) return {};
  std::vector<uint64_t> bytes(static_cast<size_t>(plan_->open().table().shards_size()), 0);
  bool some = false;
  for (const auto& chunk : *chunks_) {
    bytes[chunk->id % bytes.size()] += chunk->kept_bytes();
    some = some || chunk->kept_bytes() > 0;
  }
  return some ? bytes : std::vector<uint64_t>();
}

}  // namespace ballast::services
