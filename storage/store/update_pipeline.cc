#include "ballast/storage/store/update_pipeline.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "ballast/proto/base/status.h"
#include "ballast/storage/io/disk.h"

namespace ballast::storage {

namespace {

constexpr uint64_t kFlushTag = uint64_t{1} << 63;  // and the index in flushes_
// Enough to keep any disk busy, for each. With more, all loads would arrive late, also the load that the kernel waits
// for.
constexpr uint64_t kLoadingBytesMax = uint64_t{24} << 20;

// A number per thread, never used again. The system gives a dead thread's id to a new thread, but the dead thread's
// io_uring would refuse the new thread.
uint64_t ThisThread() {
  static std::atomic<uint64_t> threads{0};
  thread_local const uint64_t id = ++threads;
  return id;
}

}  // namespace

absl::StatusOr<IoQueue*> PipelineStaging::Queue(Disk* disk) {
  if (queue_ == nullptr || queue_thread_ != ThisThread()) {
    queue_.reset();
    BALLAST_ASSIGN_OR_RETURN(queue_, disk->MakeQueue({.registered = memory.bytes()}));
    queue_thread_ = ThisThread();
  }
  return queue_.get();
}

UpdatePipeline::UpdatePipeline(absl::Span<StoredChunk* const> chunks, PipelineStaging* staging, IoQueue* queue,
                               Tiers* tiers, LogReads* reads, RunStageObserver observer,
                               const std::vector<bool>& unread)
    : chunks_(chunks), queue_(queue), tiers_(tiers), reads_(reads), observer_(observer) {
  if (queue == nullptr) return;
  const uint64_t slot_bytes = std::max(staging->slot_bytes, uint64_t{1});  // no slots if no state lives on NVMe
  const uint64_t count = std::min(staging->memory.bytes().size() / slot_bytes, PipelineStaging::kSlotsMax);
  slots_.resize(count);
  for (uint64_t i = 0; i < count; ++i) slots_[i].data = staging->memory.bytes().data() + i * staging->slot_bytes;
  completions_.reserve(kIoRequestsMax);
  sources_.reserve(chunks.size());
  for (const StoredChunk* chunk : chunks) {
    const bool zero = !unread.empty() && unread[sources_.size()];
    absl::ReaderMutexLock lock(&chunk->mutex);
    const NvmeExtent& extent = chunk->on_disk.extent();
    sources_.push_back({extent.home(), extent.offset(), zero || chunk->history.zero()});
  }
  if (tiers->nvme() != nullptr) loading_bytes_max_ = kLoadingBytesMax * tiers->nvme()->file_count();
  LoadAhead();
}

UpdatePipeline::Slot* UpdatePipeline::Find(size_t update) {
  for (Slot& slot : slots_) {
    if (slot.phase != Phase::kFree && slot.update == update) return &slot;
  }
  return nullptr;
}

bool UpdatePipeline::Loaded(size_t i) {
  const Slot* const slot = Find(i);
  return slot != nullptr && slot->phase != Phase::kLoading;
}

absl::StatusOr<std::byte*> UpdatePipeline::Load(size_t i, absl::Status* unreadable) {
  FreeStored(/*may_wait=*/true);
  LoadAhead();
  Slot* slot = Find(i);
  while (slot == nullptr || slot->phase == Phase::kLoading) {
    // A failed store keeps its slot, so there may be none left to wait for.
    if (!failed_.ok()) return failed_;
    Wait(slot == nullptr ? RunStage::kWrite : RunStage::kRead);  // without a slot: for one whose state is being written
    FreeStored(/*may_wait=*/true);
    LoadAhead();
    slot = Find(i);
  }
  if (unreadable == nullptr) BALLAST_RETURN_IF_ERROR(slot->status);
  if (unreadable != nullptr) *unreadable = slot->status;
  return slot->data;
}

absl::StatusOr<absl::Span<const std::byte>> UpdatePipeline::LoadGradient(size_t i) {
  LoadAhead();
  while (!reads_->Arrived(i)) {
    if (!failed_.ok()) return failed_;
    Wait(RunStage::kRead);
    FreeStored(/*may_wait=*/true);
    LoadAhead();
  }
  return reads_->Bytes(i);
}

absl::Status UpdatePipeline::Store(size_t i) {
  BALLAST_RETURN_IF_ERROR(failed_);
  Slot& slot = *Find(i);
  slot.phase = Phase::kStoring;
  uint64_t offset = 0;
  {
    absl::ReaderMutexLock lock(&chunks_[i]->mutex);
    offset = chunks_[i]->on_disk.extent().offset();
    slot.stores_to = chunks_[i]->on_disk.extent().home();
  }
  failed_ = Submit(slot, IoRequest::Kind::kWrite, slot.stores_to, offset);
  if (failed_.ok()) slot.stores_to->BeginWrite(chunks_[i]->state_bytes());
  return failed_;
}

void UpdatePipeline::Poll() {
  if (queue_ == nullptr) return;
  Reap(/*wait=*/false);
  FreeStored(/*may_wait=*/false);
  LoadAhead();
}

absl::Status UpdatePipeline::Drain() {
  if (queue_ == nullptr) return absl::OkStatus();
  next_load_ = chunks_.size();
  if (reads_ != nullptr) reads_->End();
  while (queue_->in_flight() > 0) Wait(RunStage::kWrite);
  for (Flushes& flushes : flushes_) {
    for (const Unsent& unsent : flushes.unsent) (void)flushes.file->EndWrite(unsent.bytes.size(), absl::OkStatus());
    flushes.unsent.clear();  // after an error only
  }
  FreeStored(/*may_wait=*/true);
  return failed_;
}

void UpdatePipeline::LoadAhead() {
  if (reads_ != nullptr) reads_->Start();
  for (Slot& slot : slots_) {
    if (slot.phase != Phase::kFree) continue;
    if (loading_bytes_ >= loading_bytes_max_) return;
    while (next_load_ < chunks_.size() && chunks_[next_load_]->memory.tier() != TierKind::kNvme) ++next_load_;
    if (next_load_ == chunks_.size()) return;
    slot.update = next_load_++;
    slot.status = StartLoad(slot);
    if (!slot.status.ok()) slot.phase = Phase::kLoaded;
  }
}

absl::Status UpdatePipeline::StartLoad(Slot& slot) {
  const Source& source = sources_[slot.update];
  if (source.zero) {
    std::memset(slot.data, 0, chunks_[slot.update]->state_bytes());
    slot.phase = Phase::kLoaded;
    return absl::OkStatus();
  }
  slot.phase = Phase::kLoading;
  BALLAST_RETURN_IF_ERROR(Submit(slot, IoRequest::Kind::kRead, source.file, source.offset));
  loading_bytes_ += chunks_[slot.update]->state_bytes();
  return absl::OkStatus();
}

absl::Status UpdatePipeline::Flush(size_t i) {
  BALLAST_RETURN_IF_ERROR(failed_);
  StoredChunk& chunk = *chunks_[i];
  uint64_t offset = 0;
  NvmeFile* file = nullptr;
  {
    absl::ReaderMutexLock lock(&chunk.mutex);
    offset = chunk.on_disk.extent().offset();
    file = chunk.on_disk.extent().home();
  }
  Flushes& flushes = FlushesOf(file);
  flushes.unsent.push_back({offset, {chunk.memory.state(), chunk.state_bytes()}});
  file->BeginWrite(chunk.state_bytes());
  SendFlush(flushes);
  return failed_;
}

void UpdatePipeline::Release(size_t i) {
  if (Slot* const slot = Find(i); slot != nullptr) slot->phase = Phase::kFree;
}

UpdatePipeline::Flushes& UpdatePipeline::FlushesOf(NvmeFile* file) {
  for (Flushes& flushes : flushes_) {
    if (flushes.file == file) return flushes;
  }
  return flushes_.emplace_back(Flushes{.file = file, .index = flushes_.size()});
}

void UpdatePipeline::SendFlush(Flushes& flushes) {
  if (!failed_.ok() || flushes.in_flight > 0 || flushes.unsent.empty()) return;
  const auto others =
      std::count_if(flushes_.begin(), flushes_.end(), [](const Flushes& other) { return other.in_flight > 0; });
  if (others >= PipelineStaging::kFlushesMax) return;
  auto& [offset, bytes] = flushes.unsent.front();
  const absl::Span<std::byte> part = bytes.subspan(0, PipelineStaging::kFlushBytesMax);
  failed_ = Transfer(IoRequest::Kind::kWrite, flushes.file, offset, part, kFlushTag | flushes.index);
  if (!failed_.ok()) return;
  flushes.in_flight = part.size();
  offset += part.size();
  bytes.remove_prefix(part.size());
  if (bytes.empty()) flushes.unsent.pop_front();
}

absl::Status UpdatePipeline::DrainStores() {
  const auto storing = [this] {
    return std::any_of(slots_.begin(), slots_.end(), [](const Slot& slot) { return slot.phase == Phase::kStoring; });
  };
  const auto flushing = [this] {
    return std::any_of(flushes_.begin(), flushes_.end(),
                       [](const Flushes& flushes) { return flushes.in_flight > 0 || !flushes.unsent.empty(); });
  };
  while (failed_.ok() && (flushing() || storing())) Wait(RunStage::kWrite);
  return failed_;
}

absl::Status UpdatePipeline::Submit(const Slot& slot, IoRequest::Kind kind, NvmeFile* file, uint64_t offset) {
  return Transfer(kind, file, offset, {slot.data, chunks_[slot.update]->state_bytes()},
                  static_cast<uint64_t>(&slot - slots_.data()));
}

absl::Status UpdatePipeline::Transfer(IoRequest::Kind kind, NvmeFile* file, uint64_t offset,
                                      absl::Span<std::byte> buffer, uint64_t tag) {
  const uint64_t bytes = buffer.size();
  const bool read = kind == IoRequest::Kind::kRead;
  tiers_->CountTraffic(TierKind::kNvme, read ? bytes : 0, read ? 0 : bytes);
  tiers_->CountMove(read ? TierKind::kNvme : TierKind::kDram, read ? TierKind::kDram : TierKind::kNvme,
                    (tag & kFlushTag) != 0 ? MoveReason::kFlush : MoveReason::kUpdate, bytes);
  return queue_->Submit({.kind = kind, .file = &file->file(), .offset = offset, .buffer = buffer, .tag = tag});
}

void UpdatePipeline::Reap(bool wait) {
  completions_.clear();
  queue_->Reap(wait, &completions_);
  for (const IoCompletion& completion : completions_) Complete(completion);
  for (Flushes& flushes : flushes_) SendFlush(flushes);
}

void UpdatePipeline::Wait(RunStage stage) {
  observer_(stage);
  Reap(/*wait=*/true);
  observer_(RunStage::kCompute);
}

void UpdatePipeline::Complete(const IoCompletion& completion) {
  const auto ended = [&](NvmeFile* file, uint64_t bytes) {
    const absl::Status status = file->EndWrite(bytes, completion.status);
    if (!status.ok() && failed_.ok()) failed_ = status;
    return status.ok();
  };
  if ((completion.tag & kFlushTag) != 0) {
    Flushes& flushes = flushes_[completion.tag & ~kFlushTag];
    (void)ended(flushes.file, std::exchange(flushes.in_flight, 0));
    return;
  }
  if ((completion.tag & LogReads::kTag) != 0 && reads_ != nullptr) return reads_->Complete(completion);
  Slot& slot = slots_[completion.tag];
  const uint64_t bytes = chunks_[slot.update]->state_bytes();
  if (slot.phase == Phase::kLoading) {
    slot.status = completion.status;
    slot.phase = Phase::kLoaded;
    loading_bytes_ -= bytes;
  } else if (ended(slot.stores_to, bytes)) {
    slot.phase = Phase::kStored;
  }
}

void UpdatePipeline::FreeStored(bool may_wait) {
  for (Slot& slot : slots_) {
    if (slot.phase != Phase::kStored) continue;
    StoredChunk& chunk = *chunks_[slot.update];
    if (may_wait) {
      chunk.mutex.Lock();
    } else if (!chunk.mutex.TryLock()) {
      continue;
    }
    chunk.on_disk.EndStage();
    chunk.mutex.Unlock();
    slot.phase = Phase::kFree;
  }
}

}  // namespace ballast::storage
