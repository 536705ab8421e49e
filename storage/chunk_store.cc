#include "ballast/storage/chunk_store.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <optional>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "ballast/proto/model/status.h"
#include "ballast/storage/chunk_reader.h"
#include "ballast/storage/pinned_copy.h"
#include "ballast/storage/stored_chunk.h"
#include "ballast/storage/tier/hbm_tier.h"
#include "ballast/storage/update_pipeline.h"

namespace ballast::storage {
namespace {

// Kernels look after the disk this often: at memory speed every 100 microseconds, else it idles behind a long kernel.
constexpr uint64_t kPollElements = uint64_t{1} << 16;

absl::Status Bad(const char* reason, absl::string_view message) {
  return model::Error(absl::StatusCode::kInvalidArgument, reason, message);
}

absl::Status CheckRange(uint64_t chunk, uint64_t elements, uint64_t begin, uint64_t count) {
  if (begin <= elements && count <= elements - begin) return absl::OkStatus();
  return Bad(model::kBadRange, absl::StrCat("elements [", begin, ", ", begin, " + ", count, ") leave chunk ", chunk,
                                            " of ", elements, " elements"));
}

// What the device kernels need of an address; segments start at multiples of 256 elements anyway.
constexpr uint64_t kHbmAlignElements = 8;

absl::Status CheckUpdate(const StoredChunk& chunk, const ChunkUpdate& update) {
  for (const ChunkUpdate::Values& values : update.values) {
    BALLAST_RETURN_IF_ERROR(CheckRange(chunk.index, chunk.elements, values.begin, values.values.size()));
  }
  for (const ChunkUpdate::SegmentUpdate& segment : update.segments) {
    const uint64_t count = segment.end < segment.begin ? ~uint64_t{0} : segment.end - segment.begin;
    BALLAST_RETURN_IF_ERROR(CheckRange(chunk.index, chunk.elements, segment.begin, count));
    if (chunk.placement.state == TierKind::kHbm && segment.begin % kHbmAlignElements != 0) {
      return Bad(model::kBadRange, absl::StrCat("segment at element ", segment.begin, " of chunk ", chunk.index,
                                                ": expected a multiple of ", kHbmAlignElements));
    }
  }
  if (!update.segments.empty() && update.gradient.size() != chunk.elements) {
    return Bad(model::kBadLength, absl::StrCat("gradient of chunk ", chunk.index, " has ", update.gradient.size(),
                                               " elements, expected ", chunk.elements));
  }
  return absl::OkStatus();
}

// Values, then the optimizer, on state in the host's memory.
void ApplyInMemory(const ChunkUpdate& update, StateView state, absl::Span<kernels::bf16> working,
                   UpdatePipeline& pipeline) {
  float* const master = state.array(StateArray::kMaster);
  float* const moment1 = state.array(StateArray::kMoment1);
  float* const moment2 = state.array(StateArray::kMoment2);
  for (const ChunkUpdate::Values& values : update.values) {
    std::copy(values.values.begin(), values.values.end(), master + values.begin);
    kernels::Bf16FromF32(values.values, working.subspan(values.begin, values.values.size()));
  }
  for (const ChunkUpdate::SegmentUpdate& segment : update.segments) {
    for (uint64_t at = segment.begin; at < segment.end; at += kPollElements) {
      const uint64_t n = std::min(kPollElements, segment.end - at);
      kernels::UpdateSpan span{.n = n,
                               .gradient = reinterpret_cast<const std::byte*>(update.gradient.data() + at),
                               .master = master + at,
                               .moments = {},
                               .working = reinterpret_cast<std::byte*>(working.data() + at)};
      span.moments[0].values = reinterpret_cast<std::byte*>(moment1 + at);
      span.moments[1].values = reinterpret_cast<std::byte*>(moment2 + at);
      kernels::Update({}, segment.coefficients, {}, span);
      pipeline.Poll();
    }
  }
}

}  // namespace

struct ChunkStore::Impl {
  explicit Impl(Tiers* t) : tiers(t), reader(t) {}

  absl::StatusOr<StoredChunk*> Find(uint64_t chunk) const;
  absl::Status CheckPlan(absl::Span<const uint64_t> elements, const Plan& plan) const;
  absl::Status TakeStaging(absl::Span<const uint64_t> elements, const Plan& plan);
  absl::StatusOr<std::vector<StoredChunk*>> CheckUpdates(absl::Span<const ChunkUpdate> updates) const;
  absl::Status Apply(size_t i, const ChunkUpdate& update, StoredChunk& chunk, UpdatePipeline& pipeline);
  absl::Status ApplyOnDevice(const ChunkUpdate& update, StoredChunk& chunk) ABSL_EXCLUSIVE_LOCKS_REQUIRED(chunk.mutex);
  void CountUpdate(const ChunkUpdate& update, const StoredChunk& chunk) const;
  bool IsPinned(const StoredChunk& chunk) const;
  absl::Status ReadPinned(int64_t pin, uint64_t chunk, StateArray array, uint64_t begin, uint64_t count,
                          ChunkReader::Sink sink);

  Tiers* const tiers;
  ChunkReader reader;
  // Destroyed in reverse: chunks (which return extents) before the memory they point into.
  std::vector<DramBlock> dram;
  std::vector<HbmBlock> hbm;
  PipelineStaging staging;
  absl::Status failed;  // of the thread that runs: what a disk did wrong is never tried again

  mutable absl::Mutex mutex;
  std::deque<StoredChunk> chunks ABSL_GUARDED_BY(mutex);  // addresses stay
  uint64_t runs ABSL_GUARDED_BY(mutex) = 0;
  Residency residency ABSL_GUARDED_BY(mutex);
  struct PinPoint {
    uint64_t runs = 0;    // before the pin
    uint64_t chunks = 0;  // that there were
  };
  absl::flat_hash_map<int64_t, PinPoint> pins ABSL_GUARDED_BY(mutex);
};

ChunkStore::ChunkStore(Tiers* tiers) : impl_(std::make_unique<Impl>(tiers)) {}
ChunkStore::~ChunkStore() = default;

absl::StatusOr<StoredChunk*> ChunkStore::Impl::Find(uint64_t chunk) const {
  absl::ReaderMutexLock lock(&mutex);
  if (chunk >= chunks.size()) {
    return Bad(model::kBadRange, absl::StrCat("chunk ", chunk, " of a store of ", chunks.size(), " chunks"));
  }
  return const_cast<StoredChunk*>(&chunks[chunk]);
}

absl::Status ChunkStore::Impl::CheckPlan(absl::Span<const uint64_t> elements, const Plan& plan) const {
  if (plan.chunks.size() != elements.size()) {
    return Bad(model::kBadRequest, absl::StrCat("a plan of ", plan.chunks.size(), " chunks for ", elements.size()));
  }
  for (size_t i = 0; i < elements.size(); ++i) {
    const auto [state, working] = plan.chunks[i];
    if (elements[i] == 0) return Bad(model::kBadRequest, absl::StrCat("chunk ", i, " is empty"));
    if (working == TierKind::kNvme || (working == TierKind::kHbm && state != TierKind::kHbm)) {
      return Bad(model::kBadRequest, absl::StrCat("working copy of chunk ", i, " cannot be in ", TierName(working),
                                                  " with its state in ", TierName(state)));
    }
    const bool there =
        state == TierKind::kHbm ? tiers->hbm() != nullptr : state != TierKind::kNvme || tiers->nvme() != nullptr;
    if (!there) return Bad(model::kBadConfig, absl::StrCat("this server has no ", TierName(state), " tier"));
    if (state == TierKind::kHbm && elements[i] > kHbmSpanElementsMax) {
      return Bad(model::kBadRequest,
                 absl::StrCat("chunk of ", elements[i], " elements, hbm takes ", kHbmSpanElementsMax));
    }
  }
  return absl::OkStatus();
}

// The pipeline's slots and the readers' buffer are taken together, so that together they are staging_bytes().
absl::Status ChunkStore::Impl::TakeStaging(absl::Span<const uint64_t> elements, const Plan& plan) {
  uint64_t slot_bytes = staging.slot_bytes;
  for (size_t i = 0; i < elements.size(); ++i) {
    if (plan.chunks[i].state == TierKind::kNvme) slot_bytes = std::max(slot_bytes, StateBytes(elements[i]));
  }
  if (slot_bytes == 0) return absl::OkStatus();
  if (tiers->staging_bytes() < slot_bytes + ChunkReader::kStagingBytes) {
    return Bad(model::kBadConfig,
               absl::StrCat("staging of ", tiers->staging_bytes(), " bytes; one chunk's state and a read ",
                            "buffer need ", slot_bytes + ChunkReader::kStagingBytes,
                            ", and three times that lets reads, kernels and writes overlap"));
  }
  BALLAST_RETURN_IF_ERROR(reader.Prepare());
  if (staging.memory.bytes().empty()) {
    BALLAST_ASSIGN_OR_RETURN(
        staging.memory,
        tiers->dram()->Allocate(tiers->staging_bytes() - ChunkReader::kStagingBytes, "buffers for moving nvme state"));
  }
  staging.slot_bytes = slot_bytes;
  return absl::OkStatus();
}

absl::Status ChunkStore::Add(absl::Span<const uint64_t> elements, const Plan& plan) {
  Impl& impl = *impl_;
  BALLAST_RETURN_IF_ERROR(impl.CheckPlan(elements, plan));
  TierBytes state_bytes, working_bytes;
  for (size_t i = 0; i < elements.size(); ++i) {
    state_bytes[plan.chunks[i].state] += StateBytes(elements[i]);
    working_bytes[plan.chunks[i].working] += WorkingBytes(elements[i]);
  }
  DramBlock dram;
  HbmBlock hbm;
  std::vector<NvmeExtent> extents(elements.size());
  if (const uint64_t bytes = state_bytes.dram + working_bytes.dram; bytes > 0) {
    BALLAST_ASSIGN_OR_RETURN(dram, impl.tiers->dram()->Allocate(bytes, "chunk state and working copies"));
  }
  if (const uint64_t bytes = state_bytes.hbm + working_bytes.hbm; bytes > 0) {
    BALLAST_ASSIGN_OR_RETURN(hbm, impl.tiers->hbm()->Allocate(bytes, "chunk state and working copies"));
  }
  for (size_t i = 0; i < elements.size(); ++i) {
    if (plan.chunks[i].state != TierKind::kNvme) continue;
    BALLAST_ASSIGN_OR_RETURN(extents[i], impl.tiers->nvme()->Allocate(StateBytes(elements[i]), "chunk state"));
  }
  BALLAST_RETURN_IF_ERROR(impl.TakeStaging(elements, plan));

  std::byte* next[] = {hbm.data(), dram.bytes().data()};  // by TierKind
  absl::MutexLock lock(&impl.mutex);
  for (size_t i = 0; i < elements.size(); ++i) {
    const ChunkPlacement placement = plan.chunks[i];
    StoredChunk& chunk = impl.chunks.emplace_back(impl.chunks.size(), elements[i], placement);
    if (placement.state == TierKind::kNvme) {
      absl::MutexLock chunk_lock(&chunk.mutex);
      chunk.extent = std::move(extents[i]);
    } else {
      std::byte*& at = next[static_cast<int>(placement.state)];
      chunk.state = std::exchange(at, at + StateBytes(elements[i]));
    }
    std::byte*& at = next[static_cast<int>(placement.working)];
    chunk.working = reinterpret_cast<kernels::bf16*>(std::exchange(at, at + WorkingBytes(elements[i])));
  }
  impl.dram.push_back(std::move(dram));
  impl.hbm.push_back(std::move(hbm));
  for (const TierKind tier : {TierKind::kHbm, TierKind::kDram, TierKind::kNvme}) {
    impl.residency.state[tier] += state_bytes[tier];
    impl.residency.working[tier] += working_bytes[tier];
  }
  return absl::OkStatus();
}

uint64_t ChunkStore::chunk_count() const {
  absl::ReaderMutexLock lock(&impl_->mutex);
  return impl_->chunks.size();
}

uint64_t ChunkStore::staging_bytes_missing() const {
  return impl_->staging.memory.bytes().empty() ? impl_->tiers->staging_bytes() : 0;
}

ChunkStore::Residency ChunkStore::residency() const {
  absl::ReaderMutexLock lock(&impl_->mutex);
  return impl_->residency;
}

absl::StatusOr<std::vector<StoredChunk*>> ChunkStore::Impl::CheckUpdates(absl::Span<const ChunkUpdate> updates) const {
  std::vector<StoredChunk*> targets;
  targets.reserve(updates.size());
  std::vector<bool> seen;
  for (const ChunkUpdate& update : updates) {
    BALLAST_ASSIGN_OR_RETURN(StoredChunk * chunk, Find(update.chunk));
    BALLAST_RETURN_IF_ERROR(CheckUpdate(*chunk, update));
    if (seen.size() <= update.chunk) seen.resize(update.chunk + 1);
    if (seen[update.chunk]) return Bad(model::kBadRequest, absl::StrCat("chunk ", update.chunk, " twice in one run"));
    seen[update.chunk] = true;
    targets.push_back(chunk);
  }
  return targets;
}

absl::Status ChunkStore::Run(absl::Span<const ChunkUpdate> updates, absl::FunctionRef<void(size_t)> done) {
  Impl& impl = *impl_;
  BALLAST_RETURN_IF_ERROR(impl.failed);
  BALLAST_ASSIGN_OR_RETURN(const std::vector<StoredChunk*> chunks, impl.CheckUpdates(updates));
  IoQueue* queue = nullptr;
  if (std::any_of(chunks.begin(), chunks.end(), [](auto* c) { return c->placement.state == TierKind::kNvme; })) {
    BALLAST_ASSIGN_OR_RETURN(queue, impl.staging.Queue());
  }
  {
    absl::MutexLock lock(&impl.mutex);
    ++impl.runs;
  }
  UpdatePipeline pipeline(chunks, &impl.staging, queue, impl.tiers);
  absl::Status status;
  for (size_t i = 0; i < updates.size() && status.ok(); ++i) {
    status = impl.Apply(i, updates[i], *chunks[i], pipeline);
    if (status.ok()) done(i);
  }
  const absl::Status drained = pipeline.Drain();
  if (status.ok()) status = drained;
  // A pin that found no room can be dropped; what a device did wrong cannot be undone.
  if (!drained.ok() || (!status.ok() && status.code() != absl::StatusCode::kResourceExhausted)) impl.failed = status;
  return status;
}

absl::Status ChunkStore::Impl::Apply(size_t i, const ChunkUpdate& update, StoredChunk& chunk,
                                     UpdatePipeline& pipeline) {
  const TierKind tier = chunk.placement.state;
  std::byte* state = chunk.state;
  if (tier == TierKind::kNvme) {
    BALLAST_ASSIGN_OR_RETURN(state, pipeline.Load(i));
  }
  uint64_t run = 0;
  {
    absl::ReaderMutexLock lock(&mutex);
    run = runs;
  }
  std::optional<CopyOnWrite> copy;
  if (IsPinned(chunk)) {
    BALLAST_ASSIGN_OR_RETURN(
        copy, CopyOnWrite::Prepare(tiers, &reader, chunk, run, tier == TierKind::kNvme ? state : nullptr));
  }
  {
    absl::MutexLock lock(&chunk.mutex);
    if (copy.has_value()) (*std::move(copy)).Install(chunk);
    chunk.updated_in = run;
    if (tier == TierKind::kHbm) {
      BALLAST_RETURN_IF_ERROR(ApplyOnDevice(update, chunk));
    } else {
      ApplyInMemory(update, {state, chunk.elements}, {chunk.working, chunk.elements}, pipeline);
    }
    if (tier == TierKind::kNvme) {
      chunk.digests = DigestState(state, chunk.elements);
      chunk.staged = state;
    }
  }
  CountUpdate(update, chunk);
  return tier == TierKind::kNvme ? pipeline.Store(i) : absl::OkStatus();
}

absl::Status ChunkStore::Impl::ApplyOnDevice(const ChunkUpdate& update, StoredChunk& chunk) {
  const StateView state = {chunk.state, chunk.elements};
  const bool on_device = chunk.placement.working == TierKind::kHbm;
  const auto working = [&](uint64_t at) {
    return on_device ? HbmWorking{.device = chunk.working + at} : HbmWorking{.host = chunk.working + at};
  };
  for (const ChunkUpdate::Values& values : update.values) {
    const auto* from = reinterpret_cast<const std::byte*>(values.values.data());
    auto* to = reinterpret_cast<std::byte*>(state.array(StateArray::kMaster) + values.begin);
    BALLAST_RETURN_IF_ERROR(tiers->hbm()->CopyIn({from, values.values.size() * sizeof(float)}, to));
  }
  // The whole chunk: values may begin anywhere, the device kernel may not.
  if (!update.values.empty()) {
    BALLAST_RETURN_IF_ERROR(tiers->hbm()->Round(state.array(StateArray::kMaster), chunk.elements, working(0)));
  }
  for (const ChunkUpdate::SegmentUpdate& segment : update.segments) {
    const uint64_t at = segment.begin;
    BALLAST_RETURN_IF_ERROR(tiers->hbm()->Update(
        segment.coefficients, update.gradient.subspan(at, segment.end - at), state.array(StateArray::kMaster) + at,
        state.array(StateArray::kMoment1) + at, state.array(StateArray::kMoment2) + at, working(at)));
  }
  return absl::OkStatus();
}

void ChunkStore::Impl::CountUpdate(const ChunkUpdate& update, const StoredChunk& chunk) const {
  uint64_t elements = 0;
  for (const ChunkUpdate::SegmentUpdate& segment : update.segments) elements += segment.end - segment.begin;
  // NVMe state passes through DRAM; its way to the disk is counted by the pipeline.
  const TierKind memory = chunk.placement.state == TierKind::kHbm ? TierKind::kHbm : TierKind::kDram;
  const uint64_t state_bytes = elements * kStateArrays * sizeof(float);
  tiers->CountTraffic(memory, state_bytes, state_bytes);
  tiers->CountTraffic(chunk.placement.working, 0, elements * sizeof(kernels::bf16));
}

absl::Status ChunkStore::ReadWorking(uint64_t index, uint64_t begin, absl::Span<kernels::bf16> to) const {
  BALLAST_ASSIGN_OR_RETURN(const StoredChunk* chunk, impl_->Find(index));
  BALLAST_RETURN_IF_ERROR(CheckRange(index, chunk->elements, begin, to.size()));
  const uint64_t bytes = to.size() * sizeof(kernels::bf16);
  impl_->tiers->CountTraffic(chunk->placement.working, bytes, 0);
  absl::ReaderMutexLock lock(&chunk->mutex);
  if (chunk->placement.working == TierKind::kHbm) {
    return impl_->tiers->hbm()->CopyOut(reinterpret_cast<const std::byte*>(chunk->working + begin),
                                        {reinterpret_cast<std::byte*>(to.data()), bytes});
  }
  std::copy_n(chunk->working + begin, to.size(), to.data());
  return absl::OkStatus();
}

absl::Status ChunkStore::ReadState(uint64_t index, StateArray array, uint64_t begin, absl::Span<float> to) const {
  BALLAST_ASSIGN_OR_RETURN(const StoredChunk* chunk, impl_->Find(index));
  BALLAST_RETURN_IF_ERROR(CheckRange(index, chunk->elements, begin, to.size()));
  absl::ReaderMutexLock lock(&chunk->mutex);
  return impl_->reader.Read(*chunk, array, begin, to.size(), [&](uint64_t at, absl::Span<const float> values) {
    std::copy(values.begin(), values.end(), to.begin() + at);
  });
}

absl::Status ChunkStore::Pin(int64_t pin) {
  absl::MutexLock lock(&impl_->mutex);
  impl_->pins.emplace(pin, Impl::PinPoint{impl_->runs, impl_->chunks.size()});
  return absl::OkStatus();
}

void ChunkStore::Unpin(int64_t pin) {
  std::vector<uint64_t> kept;
  std::vector<StoredChunk*> chunks;
  {
    absl::MutexLock lock(&impl_->mutex);
    if (impl_->pins.erase(pin) == 0) return;
    for (const auto& [other, point] : impl_->pins) kept.push_back(point.runs);
    for (StoredChunk& chunk : impl_->chunks) chunks.push_back(&chunk);
  }
  const auto unused = [&](const PinnedCopy& copy) {
    return std::none_of(kept.begin(), kept.end(), [&](uint64_t runs) { return copy.from <= runs && runs < copy.to; });
  };
  for (StoredChunk* chunk : chunks) {
    absl::MutexLock lock(&chunk->mutex);
    chunk->copies.erase(std::remove_if(chunk->copies.begin(), chunk->copies.end(), unused), chunk->copies.end());
  }
}

bool ChunkStore::Impl::IsPinned(const StoredChunk& chunk) const {
  uint64_t updated_in = 0;
  {
    absl::ReaderMutexLock lock(&chunk.mutex);
    updated_in = chunk.updated_in;
  }
  absl::ReaderMutexLock lock(&mutex);
  return std::any_of(pins.begin(), pins.end(),
                     [&](const auto& pin) { return chunk.index < pin.second.chunks && pin.second.runs >= updated_in; });
}

absl::Status ChunkStore::Impl::ReadPinned(int64_t pin, uint64_t index, StateArray array, uint64_t begin, uint64_t count,
                                          ChunkReader::Sink sink) {
  BALLAST_ASSIGN_OR_RETURN(const StoredChunk* chunk, Find(index));
  BALLAST_RETURN_IF_ERROR(CheckRange(index, chunk->elements, begin, count));
  const absl::Status gone =
      model::Error(absl::StatusCode::kFailedPrecondition, model::kVersionGone,
                   absl::StrCat("version ", pin, " of chunk ", index, " is not pinned; pin it while it is current"));
  uint64_t runs_before = 0;
  {
    absl::ReaderMutexLock lock(&mutex);
    const auto found = pins.find(pin);
    if (found == pins.end()) return gone;
    if (index >= found->second.chunks) return gone;
    runs_before = found->second.runs;
  }
  absl::ReaderMutexLock lock(&chunk->mutex);
  if (chunk->updated_in <= runs_before) return reader.Read(*chunk, array, begin, count, sink);
  for (const PinnedCopy& copy : chunk->copies) {
    if (copy.from <= runs_before && runs_before < copy.to) {
      return reader.ReadCopy(*chunk, copy, array, begin, count, sink);
    }
  }
  return gone;  // unpinned since
}

absl::Status ChunkStore::ReadPinnedState(int64_t pin, uint64_t chunk, StateArray array, uint64_t begin,
                                         absl::Span<float> to) const {
  return impl_->ReadPinned(pin, chunk, array, begin, to.size(), [&](uint64_t at, absl::Span<const float> values) {
    std::copy(values.begin(), values.end(), to.begin() + at);
  });
}

// The working copy is the rounded master at all times, so a pin need not keep it.
absl::Status ChunkStore::ReadPinnedWorking(int64_t pin, uint64_t chunk, uint64_t begin,
                                           absl::Span<kernels::bf16> to) const {
  return impl_->ReadPinned(pin, chunk, StateArray::kMaster, begin, to.size(),
                           [&](uint64_t at, absl::Span<const float> values) {
                             kernels::Bf16FromF32(values, to.subspan(at, values.size()));
                           });
}

}  // namespace ballast::storage
