#include "ballast/storage/chunk_store.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <optional>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "ballast/proto/model/status.h"
#include "ballast/storage/chunk_move.h"
#include "ballast/storage/chunk_reader.h"
#include "ballast/storage/durable_pins.h"
#include "ballast/storage/io/failpoint.h"
#include "ballast/storage/io/seeded_bugs.h"
#include "ballast/storage/pinned_copy.h"
#include "ballast/storage/state_update.h"
#include "ballast/storage/stored_chunk.h"
#include "ballast/storage/tier/hbm_tier.h"
#include "ballast/storage/update_pipeline.h"
#include "ballast/storage/versioned_extents.h"

namespace ballast::storage {
namespace {

absl::Status Bad(const char* reason, absl::string_view message) {
  return model::Error(absl::StatusCode::kInvalidArgument, reason, message);
}

absl::Status CheckRange(uint64_t chunk, uint64_t elements, uint64_t begin, uint64_t count) {
  if (begin <= elements && count <= elements - begin) return absl::OkStatus();
  return Bad(model::kBadRange, absl::StrCat("elements [", begin, ", ", begin, " + ", count, ") leave chunk ", chunk,
                                            " of ", elements, " elements"));
}

// Segments start at whole blocks of moments, whose scales and random bits have one owner.
absl::Status CheckUpdate(const StoredChunk& chunk, const ChunkUpdate& update) {
  for (const ChunkUpdate::Values& values : update.values) {
    BALLAST_RETURN_IF_ERROR(CheckRange(chunk.index, chunk.elements, values.begin, values.values.size()));
  }
  for (const ChunkUpdate::SegmentUpdate& segment : update.segments) {
    const uint64_t count = segment.end < segment.begin ? ~uint64_t{0} : segment.end - segment.begin;
    BALLAST_RETURN_IF_ERROR(CheckRange(chunk.index, chunk.elements, segment.begin, count));
    if (segment.begin % kernels::kMomentBlock != 0) {
      return Bad(model::kBadRange, absl::StrCat("segment at element ", segment.begin, " of chunk ", chunk.index,
                                                ": expected a multiple of ", kernels::kMomentBlock));
    }
  }
  const uint64_t gradient_bytes = chunk.elements * chunk.layout.gradient_element_bytes();
  if (!update.segments.empty() && update.gradient.size() != gradient_bytes) {
    return Bad(model::kBadLength, absl::StrCat("gradient of chunk ", chunk.index, " has ", update.gradient.size(),
                                               " bytes, expected ", gradient_bytes));
  }
  return absl::OkStatus();
}

// `bytes` as whole elements.
absl::StatusOr<uint64_t> ElementsOf(uint64_t bytes, uint64_t width) {
  if (bytes % width == 0) return bytes / width;
  return Bad(model::kBadLength, absl::StrCat("room for ", bytes, " bytes, expected whole elements of ", width));
}

// What an earlier run left must not be freed by an error of this one.
void LeaveKept(absl::Span<const ChunkToAdd> added, std::vector<NvmeExtent>& extents) {
  for (size_t i = 0; i < added.size(); ++i) {
    if (added[i].durable.has_value()) extents[i].Leave();
  }
}

using RawRead = absl::FunctionRef<absl::Status(uint64_t begin, uint64_t count, ChunkReader::Sink sink)>;

// Elements of an array as fp32, from its bytes. A coded moment is read whole, into memory of its own.
absl::Status ReadAsF32(const StoredChunk& chunk, StateArray array, uint64_t begin, absl::Span<float> to, RawRead read) {
  const StateLayout& layout = chunk.layout;
  if (static_cast<int>(array) >= layout.array_count()) {
    return Bad(model::kBadRequest, absl::StrCat("the job's optimizer keeps ", layout.array_count() - 1,
                                                " moment(s), asked for moment ", static_cast<int>(array)));
  }
  if (to.empty()) return absl::OkStatus();
  const auto into = [](std::byte* target) {
    return [target](uint64_t at, absl::Span<const std::byte> bytes) {
      std::memcpy(target + at, bytes.data(), bytes.size());
    };
  };
  const kernels::MomentFormat format = layout.optimizer().moments;
  if (array == StateArray::kMaster || format == kernels::MomentFormat::kF32) {
    const auto sink = into(reinterpret_cast<std::byte*>(to.data()));
    return read(begin * sizeof(float), to.size() * sizeof(float), sink);
  }
  std::vector<std::byte> coded(layout.UsedBytes(array, chunk.elements));
  const auto sink = into(coded.data());
  BALLAST_RETURN_IF_ERROR(read(0, coded.size(), sink));
  const uint64_t first = begin / kernels::kMomentBlock * kernels::kMomentBlock;
  const auto* scales = reinterpret_cast<float*>(coded.data() + layout.ScalesAt(chunk.elements));
  const kernels::MomentSpan moment{.values = coded.data() + kernels::MomentBytes(format, first),
                                   .scales = const_cast<float*>(scales) + first / kernels::kMomentBlock};
  std::vector<float> values(begin + to.size() - first);
  kernels::ReadMoment(layout.optimizer(), static_cast<int>(array) - 1, moment, absl::MakeSpan(values));
  std::copy(values.begin() + static_cast<std::ptrdiff_t>(begin - first), values.end(), to.begin());
  return absl::OkStatus();
}

}  // namespace

struct ChunkStore::Impl {
  Impl(Tiers* t, const kernels::OptimizerSpec& optimizer, kernels::ThreadPool* c, std::optional<DurableOptions> d)
      : tiers(t), compute(c), layout(optimizer), reader(t) {
    if (!d.has_value()) return;
    versions.emplace(t->nvme(), *std::move(d));
    durable_pins.emplace(t->nvme());
  }
  ~Impl();

  absl::StatusOr<StoredChunk*> Find(uint64_t chunk) const;
  absl::Status CheckPlan(absl::Span<const ChunkToAdd> added, const Plan& plan) const;
  // So that states of this size can be moved; 0: none need be.
  absl::Status TakeStaging(uint64_t state_bytes, DramTier::Limit limit);
  absl::Status MoveState(StoredChunk& chunk, TierKind to);
  absl::StatusOr<std::vector<NvmeExtent>> TakeExtents(absl::Span<const ChunkToAdd> added, const Plan& plan);
  // States that an earlier run left, into the tiers where the chunks live now; `staging`: of one on NVMe, room for it.
  absl::Status RestoreAll(absl::Span<const ChunkToAdd> added, const std::vector<StoredChunk*>& chunks);
  absl::Status Restore(StoredChunk& chunk, const DurableChunk& durable, std::byte* staging);
  // The same, of any extent: into `state`, in host memory, or into the chunk's if that is on a device; and the working
  // copy from it.
  absl::Status ReadDurable(const StoredChunk& chunk, const DurableChunk& durable, std::byte* state) const;
  absl::Status CheckRestored(const StoredChunk& chunk, const DurableChunk& durable, const std::byte* state) const;
  // Durable: room for one more version of the chunk.
  absl::StatusOr<NvmeExtent> MakeRoom(const StoredChunk& chunk, UpdatePipeline& pipeline);
  // `fresh`: empty if the chunk's extent is fresh already.
  absl::Status StartVersion(StoredChunk& chunk, std::byte* state, int64_t version, NvmeExtent fresh)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(chunk.mutex);
  absl::StatusOr<std::vector<StoredChunk*>> CheckUpdates(absl::Span<const ChunkUpdate> updates) const;
  absl::Status Apply(size_t i, const ChunkUpdate& update, StoredChunk& chunk, UpdatePipeline& pipeline);
  absl::Status ApplyOnDevice(const ChunkUpdate& update, StoredChunk& chunk) ABSL_EXCLUSIVE_LOCKS_REQUIRED(chunk.mutex);
  void CountUpdate(const ChunkUpdate& update, const StoredChunk& chunk) const;
  bool IsPinned(const StoredChunk& chunk) const;
  // Bytes of an array as the pin sees it.
  absl::Status ReadPinned(int64_t pin, const StoredChunk& chunk, StateArray array, uint64_t begin, uint64_t count,
                          ChunkReader::Sink sink);

  Tiers* const tiers;
  kernels::ThreadPool* const compute;
  const StateLayout layout;
  ChunkReader reader;
  // Destroyed in reverse: chunks (which return extents) before the memory they point into.
  std::deque<DramBlock> dram;  // addresses stay
  std::vector<HbmBlock> hbm;
  PipelineStaging staging;
  std::optional<VersionedExtents> versions;  // of a durable store
  std::optional<DurablePins> durable_pins;   // of the same
  bool discarded = false;
  absl::Status failed;  // of the thread that runs: what a disk did wrong is never tried again

  mutable absl::Mutex mutex;
  std::deque<StoredChunk> chunks ABSL_GUARDED_BY(mutex);   // addresses stay
  std::vector<PlacedChunk> placed ABSL_GUARDED_BY(mutex);  // as the chunks are, without their locks
  uint64_t runs ABSL_GUARDED_BY(mutex) = 0;
  Residency residency ABSL_GUARDED_BY(mutex);
  struct PinPoint {
    uint64_t runs = 0;    // before the pin
    uint64_t chunks = 0;  // that there were
  };
  absl::flat_hash_map<int64_t, PinPoint> pins ABSL_GUARDED_BY(mutex);
};

ChunkStore::Impl::~Impl() {
  if (!versions.has_value() || discarded) return;
  durable_pins->Leave();
  absl::MutexLock lock(&mutex);
  for (StoredChunk& chunk : chunks) {
    absl::MutexLock chunk_lock(&chunk.mutex);
    // One that never held a version is nobody's.
    if (chunk.newest.version >= 0) chunk.extent.Leave();
    // After a failed run the newest version that is recorded may be in a pin's copy.
    for (PinnedCopy& copy : chunk.copies) copy.extent.Leave();
  }
}

ChunkStore::ChunkStore(Tiers* tiers, const kernels::OptimizerSpec& optimizer, kernels::ThreadPool* compute,
                       std::optional<DurableOptions> durable)
    : impl_(std::make_unique<Impl>(tiers, optimizer, compute, std::move(durable))) {}
ChunkStore::~ChunkStore() = default;
void ChunkStore::Discard() { impl_->discarded = true; }

absl::StatusOr<StoredChunk*> ChunkStore::Impl::Find(uint64_t chunk) const {
  absl::ReaderMutexLock lock(&mutex);
  if (chunk >= chunks.size()) {
    return Bad(model::kBadRange, absl::StrCat("chunk ", chunk, " of a store of ", chunks.size(), " chunks"));
  }
  return const_cast<StoredChunk*>(&chunks[chunk]);
}

absl::Status ChunkStore::Impl::CheckPlan(absl::Span<const ChunkToAdd> added, const Plan& plan) const {
  if (plan.chunks.size() != added.size()) {
    return Bad(model::kBadRequest, absl::StrCat("a plan of ", plan.chunks.size(), " chunks for ", added.size()));
  }
  if (versions.has_value() && tiers->nvme() == nullptr) {
    return Bad(model::kBadConfig, "durable state needs an nvme tier, and this server has none: give an nvme budget");
  }
  for (size_t i = 0; i < added.size(); ++i) {
    const auto [state, working] = plan.chunks[i];
    const uint64_t elements = added[i].elements;
    if (elements == 0) return Bad(model::kBadRequest, absl::StrCat("chunk ", i, " is empty"));
    if (working == TierKind::kNvme || (working == TierKind::kHbm && state != TierKind::kHbm)) {
      return Bad(model::kBadRequest, absl::StrCat("working copy of chunk ", i, " cannot be in ", TierName(working),
                                                  " with its state in ", TierName(state)));
    }
    const bool there =
        state == TierKind::kHbm ? tiers->hbm() != nullptr : state != TierKind::kNvme || tiers->nvme() != nullptr;
    if (!there) return Bad(model::kBadConfig, absl::StrCat("this server has no ", TierName(state), " tier"));
    if (state == TierKind::kHbm && elements > kHbmSpanElementsMax) {
      return Bad(model::kBadRequest, absl::StrCat("chunk of ", elements, " elements, hbm takes ", kHbmSpanElementsMax));
    }
  }
  return absl::OkStatus();
}

// The pipeline's slots and the readers' buffer are taken together, so that together they are staging_bytes().
absl::Status ChunkStore::Impl::TakeStaging(uint64_t state_bytes, DramTier::Limit limit) {
  const uint64_t slot_bytes = std::max(staging.slot_bytes, state_bytes);
  if (slot_bytes == 0) return absl::OkStatus();
  if (tiers->staging_bytes() < slot_bytes + ChunkReader::kStagingBytes) {
    return Bad(model::kBadConfig,
               absl::StrCat("staging of ", tiers->staging_bytes(), " bytes; one chunk's state and a read ",
                            "buffer need ", slot_bytes + ChunkReader::kStagingBytes,
                            ", and three times that lets reads, kernels and writes overlap"));
  }
  BALLAST_RETURN_IF_ERROR(reader.Prepare(limit));
  if (staging.memory.bytes().empty()) {
    BALLAST_ASSIGN_OR_RETURN(DramBlock memory,
                             tiers->dram()->Allocate(tiers->staging_bytes() - ChunkReader::kStagingBytes,
                                                     "buffers for moving nvme state", limit));
    staging.Take(std::move(memory));
  }
  staging.slot_bytes = slot_bytes;
  return absl::OkStatus();
}

// Extents of NVMe state and of what an earlier run left; of a durable store also the budget for the others' first, and
// for new versions of all.
absl::StatusOr<std::vector<NvmeExtent>> ChunkStore::Impl::TakeExtents(absl::Span<const ChunkToAdd> added,
                                                                      const Plan& plan) {
  std::vector<NvmeExtent> extents(added.size());
  uint64_t room = 0, largest = 0;
  for (size_t i = 0; i < added.size(); ++i) {
    const uint64_t bytes = layout.StateBytes(added[i].elements);
    largest = std::max(largest, bytes);
    if (added[i].durable.has_value()) continue;
    if (plan.chunks[i].state == TierKind::kNvme) {
      BALLAST_ASSIGN_OR_RETURN(extents[i], tiers->nvme()->Allocate(bytes, "chunk state"));
    } else {
      room += bytes;
    }
  }
  if (!versions.has_value()) return extents;
  uint64_t count = added.size();
  {
    absl::ReaderMutexLock lock(&mutex);
    count += chunks.size();
  }
  const uint64_t spare = versions->SpareBytesMissing(count, largest);
  if (room + spare > 0) {
    // As an extent first: a disk that is full refuses the job now, not a step later.
    BALLAST_ASSIGN_OR_RETURN(NvmeExtent reserved, tiers->nvme()->Allocate(room + spare, "durable versions of chunks"));
    versions->AddRoom(reserved.TakeLease(), spare);
  }
  for (size_t i = 0; i < added.size(); ++i) {
    if (!added[i].durable.has_value()) continue;
    absl::StatusOr<NvmeExtent> kept = tiers->nvme()->TakeKept(added[i].durable->offset);
    if (!kept.ok()) {
      LeaveKept(added, extents);
      return kept.status();
    }
    extents[i] = *std::move(kept);
  }
  return extents;
}

absl::Status ChunkStore::Add(absl::Span<const uint64_t> elements, const Plan& plan) {
  std::vector<ChunkToAdd> added(elements.size());
  for (size_t i = 0; i < elements.size(); ++i) added[i].elements = elements[i];
  return Add(added, plan);
}

absl::Status ChunkStore::Add(absl::Span<const ChunkToAdd> added, const Plan& plan) {
  Impl& impl = *impl_;
  BALLAST_RETURN_IF_ERROR(impl.CheckPlan(added, plan));
  TierBytes state_bytes, working_bytes;
  for (size_t i = 0; i < added.size(); ++i) {
    state_bytes[plan.chunks[i].state] += impl.layout.StateBytes(added[i].elements);
    working_bytes[plan.chunks[i].working] += impl.layout.WorkingBytes(added[i].elements);
  }
  DramBlock dram;
  HbmBlock hbm;
  if (const uint64_t bytes = state_bytes.dram + working_bytes.dram; bytes > 0) {
    BALLAST_ASSIGN_OR_RETURN(dram, impl.tiers->dram()->Allocate(bytes, "chunk state and working copies"));
  }
  if (const uint64_t bytes = state_bytes.hbm + working_bytes.hbm; bytes > 0) {
    BALLAST_ASSIGN_OR_RETURN(hbm, impl.tiers->hbm()->Allocate(bytes, "chunk state and working copies"));
  }
  BALLAST_ASSIGN_OR_RETURN(std::vector<NvmeExtent> extents, impl.TakeExtents(added, plan));
  uint64_t moving = 0;  // the largest state that goes to NVMe
  for (size_t i = 0; i < added.size(); ++i) {
    if (plan.chunks[i].state == TierKind::kNvme) moving = std::max(moving, impl.layout.StateBytes(added[i].elements));
  }
  if (const absl::Status status = impl.TakeStaging(moving, DramTier::Limit::kBudget); !status.ok()) {
    LeaveKept(added, extents);
    return status;
  }

  std::byte* next[] = {hbm.data(), dram.bytes().data()};  // by TierKind
  std::vector<StoredChunk*> fresh;
  {
    absl::MutexLock lock(&impl.mutex);
    impl.dram.push_back(std::move(dram));
    impl.hbm.push_back(std::move(hbm));
    for (size_t i = 0; i < added.size(); ++i) {
      const ChunkPlacement placement = plan.chunks[i];
      StoredChunk& chunk =
          impl.chunks.emplace_back(&impl.layout, impl.chunks.size(), added[i].elements, placement, added[i].id);
      impl.placed.push_back({added[i].elements, placement});
      fresh.push_back(&chunk);
      absl::MutexLock chunk_lock(&chunk.mutex);
      chunk.extent = std::move(extents[i]);
      // Even if it turns out unreadable: it stays on the disk.
      if (added[i].durable.has_value()) chunk.newest = *added[i].durable;
      if (placement.state != TierKind::kNvme) {
        std::byte*& at = next[static_cast<int>(placement.state)];
        chunk.state = std::exchange(at, at + chunk.state_bytes());
      }
      chunk.shared = &impl.dram.back();
      std::byte*& at = next[static_cast<int>(placement.working)];
      chunk.working = std::exchange(at, at + impl.layout.WorkingBytes(added[i].elements));
    }
    for (const TierKind tier : {TierKind::kHbm, TierKind::kDram, TierKind::kNvme}) {
      impl.residency.state[tier] += state_bytes[tier];
      impl.residency.working[tier] += working_bytes[tier];
    }
    impl.runs = std::max(impl.runs, uint64_t{1});
  }
  impl.failed = impl.RestoreAll(added, fresh);  // on an error the chunks are there, and nobody may use them
  return impl.failed;
}

absl::Status ChunkStore::Impl::RestoreAll(absl::Span<const ChunkToAdd> added, const std::vector<StoredChunk*>& chunks) {
  struct Restored {
    StoredChunk* chunk;
    const DurableChunk* durable;
    std::byte* staging = nullptr;
    absl::Status status;
  };
  // Several at a time: one is checked while others are on their way from the disk. Those that are not to stay in DRAM
  // have the staging slots to go through, or one by one memory of their own.
  std::vector<Restored> restored;
  const uint64_t slots = staging.slot_bytes == 0 ? 0 : staging.memory.bytes().size() / staging.slot_bytes;
  uint64_t staged = 0;
  const auto restore = [&] {
    const auto one = [&](uint64_t i) {
      restored[i].status = Restore(*restored[i].chunk, *restored[i].durable, restored[i].staging);
    };
    if (compute != nullptr) {
      compute->ParallelFor(restored.size(), one);
    } else {
      for (uint64_t i = 0; i < restored.size(); ++i) one(i);
    }
    absl::Status status;
    for (const Restored& r : restored) status.Update(r.status);
    restored.clear();
    staged = 0;
    return status;
  };
  for (size_t i = 0; i < added.size(); ++i) {
    if (!added[i].durable.has_value()) continue;
    const TierKind tier = chunks[i]->placement.state;
    restored.push_back({chunks[i], &*added[i].durable});
    if (tier == TierKind::kNvme)
      restored.back().staging = staging.memory.bytes().data() + staged++ * staging.slot_bytes;
    if (tier == TierKind::kHbm || staged == std::max<uint64_t>(slots, 1)) BALLAST_RETURN_IF_ERROR(restore());
  }
  return restore();
}

absl::Status ChunkStore::Impl::CheckRestored(const StoredChunk& chunk, const DurableChunk& durable,
                                             const std::byte* state) const {
  const BlockFile& file = tiers->nvme()->file();
  DurableChunk found;
  std::string job;
  uint64_t layout_bits = 0;
  const absl::Span<const std::byte> label(state + layout.LabelAt(chunk.elements), StateLayout::kLabelBytes);
  const bool labelled = DecodeLabel(label, &found, &job, &layout_bits) && job == versions->job() &&
                        layout_bits == LayoutBits(layout) && found.Encode() == durable.Encode();
  if (!labelled) {
    return model::Error(absl::StatusCode::kDataLoss, model::kChecksum,
                        absl::StrCat("the state of chunk ", chunk.id, " at version ", durable.version,
                                     " is not at offset ", durable.offset, " of ", file.path(),
                                     ", where the catalog says: its label is damaged or another's. Run `ballastctl "
                                     "verify`"));
  }
  if (Seeded(StorageBug::kRestoreDigestUnchecked)) return absl::OkStatus();
  const ArrayDigests digests = DigestState({&layout, const_cast<std::byte*>(state), chunk.elements}, {nullptr, [] {}});
  return CompareDigests(file, chunk, durable.offset, durable.digests, digests);
}

absl::Status ChunkStore::Impl::Restore(StoredChunk& chunk, const DurableChunk& durable, std::byte* staging) {
  const uint64_t bytes = chunk.state_bytes();
  if (durable.elements != chunk.elements || durable.bytes != bytes || durable.id != chunk.id) {
    return model::Error(absl::StatusCode::kDataLoss, model::kIo,
                        absl::StrCat("the catalog's entry of chunk ", durable.id, " with ", durable.elements,
                                     " elements is for another chunk than ", chunk.id, " with ", chunk.elements));
  }
  const bool on_disk = chunk.placement.state == TierKind::kNvme;
  BALLAST_RETURN_IF_ERROR(ReadDurable(chunk, durable, on_disk ? staging : chunk.state));
  absl::MutexLock lock(&chunk.mutex);
  chunk.updated_in = 1;
  chunk.digests = durable.digests;
  Pass("recovery/chunk_restored");
  return absl::OkStatus();
}

absl::Status ChunkStore::Impl::ReadDurable(const StoredChunk& chunk, const DurableChunk& durable,
                                           std::byte* state) const {
  const uint64_t bytes = chunk.state_bytes();
  Arena bounce;
  if (chunk.placement.state == TierKind::kHbm) {
    BALLAST_ASSIGN_OR_RETURN(bounce, Arena::Map(bytes, /*pin=*/false));
    state = bounce.bytes().data();
  }
  BALLAST_RETURN_IF_ERROR(tiers->nvme()->file().Read(durable.offset, {state, bytes}));
  tiers->CountTraffic(TierKind::kNvme, bytes, 0);
  BALLAST_RETURN_IF_ERROR(CheckRestored(chunk, durable, state));
  const kernels::Dtype working = layout.optimizer().working;
  if (chunk.placement.state == TierKind::kHbm) {
    BALLAST_RETURN_IF_ERROR(tiers->hbm()->CopyIn({state, bytes}, chunk.state));
    const bool on_device = chunk.placement.working == TierKind::kHbm;
    BALLAST_RETURN_IF_ERROR(
        tiers->hbm()->Round(chunk.View(chunk.state).master(), chunk.elements, working,
                            on_device ? HbmWorking{.device = chunk.working} : HbmWorking{.host = chunk.working}));
  } else {
    kernels::FromF32({chunk.View(state).master(), chunk.elements}, working, chunk.working);
  }
  return absl::OkStatus();
}

bool ChunkStore::durable() const { return impl_->versions.has_value(); }

bool ChunkStore::dirty(uint64_t chunk) const {
  const absl::StatusOr<StoredChunk*> found = impl_->Find(chunk);
  return found.ok() && (*found)->dirty;
}

int64_t ChunkStore::durable_version(uint64_t chunk) const {
  const absl::StatusOr<StoredChunk*> found = impl_->Find(chunk);
  return found.ok() ? (*found)->newest.version : -1;
}

int64_t ChunkStore::needed_from(uint64_t chunk) const {
  const absl::StatusOr<StoredChunk*> found = impl_->Find(chunk);
  return found.ok() ? (*found)->needed_from : -1;
}

uint64_t ChunkStore::spare_bytes_missing(absl::Span<const uint64_t> elements) const {
  if (!impl_->versions.has_value() || elements.empty()) return 0;
  const uint64_t largest = *std::max_element(elements.begin(), elements.end());
  return impl_->versions->SpareBytesMissing(chunk_count() + elements.size(), impl_->layout.StateBytes(largest));
}

uint64_t ChunkStore::chunk_count() const {
  absl::ReaderMutexLock lock(&impl_->mutex);
  return impl_->chunks.size();
}

std::vector<PlacedChunk> ChunkStore::placed() const {
  absl::ReaderMutexLock lock(&impl_->mutex);
  return impl_->placed;
}

uint64_t ChunkStore::slot_memory_bytes() const {
  const uint64_t staging = impl_->tiers->staging_bytes();
  return staging - std::min(staging, ChunkReader::kStagingBytes);
}

const StateLayout& ChunkStore::layout() const { return impl_->layout; }

uint64_t ChunkStore::staging_bytes_missing() const {
  return impl_->staging.memory.bytes().empty() ? impl_->tiers->staging_bytes() : 0;
}

ChunkStore::Residency ChunkStore::residency() const {
  absl::ReaderMutexLock lock(&impl_->mutex);
  return impl_->residency;
}

absl::Status ChunkStore::Move(uint64_t index, TierKind to) {
  Impl& impl = *impl_;
  BALLAST_RETURN_IF_ERROR(impl.failed);
  BALLAST_ASSIGN_OR_RETURN(StoredChunk * chunk, impl.Find(index));
  const TierKind from = chunk->placement.state;
  if (from == to) return absl::OkStatus();
  const bool pinned = impl.tiers->hbm() != nullptr;
  if (from == TierKind::kHbm || to == TierKind::kHbm || impl.tiers->nvme() == nullptr || pinned) {
    return Bad(model::kBadRequest,
               absl::StrCat("chunk ", index, " cannot move from ", TierName(from), " to ", TierName(to),
                            ": state moves between dram and nvme, where memory is not pinned for a GPU"));
  }
  BALLAST_RETURN_IF_ERROR(impl.MoveState(*chunk, to));
  absl::MutexLock lock(&impl.mutex);
  impl.placed[index].placement.state = to;
  impl.residency.state[from] -= chunk->state_bytes();
  impl.residency.state[to] += chunk->state_bytes();
  return absl::OkStatus();
}

absl::Status ChunkStore::Impl::MoveState(StoredChunk& chunk, TierKind to) {
  if (to == TierKind::kDram) return MoveToDram(tiers, chunk, /*keep_extent=*/versions.has_value());
  BALLAST_RETURN_IF_ERROR(TakeStaging(chunk.state_bytes(), DramTier::Limit::kBeyond));
  NvmeExtent extent;
  if (!versions.has_value()) {
    BALLAST_ASSIGN_OR_RETURN(extent, tiers->nvme()->Allocate(chunk.state_bytes(), "chunk state that moves down"));
    return MoveToNvme(tiers, chunk, std::move(extent));
  }
  if (chunk.dirty) {
    return model::Error(absl::StatusCode::kFailedPrecondition, model::kBadRequest,
                        absl::StrCat("chunk ", chunk.index, " has changed since it was flushed: flush it first"));
  }
  bool has_extent = false;
  {
    absl::ReaderMutexLock lock(&chunk.mutex);
    has_extent = chunk.extent.bytes() > 0;
  }
  if (!has_extent) {
    // Never updated, so never flushed: its place is part of the room.
    if (!versions->HasRoom(chunk.state_bytes())) {
      return model::Error(absl::StatusCode::kResourceExhausted, model::kBudget,
                          absl::StrCat("no room for the extent of chunk ", chunk.id, " until versions are hardened"));
    }
    BALLAST_ASSIGN_OR_RETURN(extent, versions->Take(chunk.state_bytes()));
  }
  return MoveToNvme(tiers, chunk, std::move(extent));
}

absl::StatusOr<std::vector<StoredChunk*>> ChunkStore::Impl::CheckUpdates(absl::Span<const ChunkUpdate> updates) const {
  std::vector<StoredChunk*> targets;
  targets.reserve(updates.size());
  std::vector<bool> seen;
  for (const ChunkUpdate& update : updates) {
    BALLAST_ASSIGN_OR_RETURN(StoredChunk * chunk, Find(update.chunk));
    BALLAST_RETURN_IF_ERROR(CheckUpdate(*chunk, update));
    if (seen.size() <= update.chunk) seen.resize(update.chunk + 1);
    if (update.restored.has_value() &&
        (!durable_pins.has_value() || durable_pins->Find(*update.restored, update.chunk) == nullptr)) {
      return model::Error(absl::StatusCode::kDataLoss, model::kVersionGone,
                          absl::StrCat("version ", *update.restored, " of chunk ", chunk->id, " is not pinned here"));
    }
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
  const auto moves = [](const StoredChunk* c, const ChunkUpdate& u) {
    return c->placement.state == TierKind::kNvme || u.flush;
  };
  if (!std::equal(chunks.begin(), chunks.end(), updates.begin(),
                  [&](auto* c, const ChunkUpdate& u) { return !moves(c, u); })) {
    BALLAST_ASSIGN_OR_RETURN(queue, impl.staging.Queue(impl.tiers->disk()));
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
  // Also of what was done before an error: a pin that is dropped next must not free what is not recorded yet.
  if (drained.ok() && impl.versions.has_value()) {
    const absl::Status hardened = impl.versions->Harden();
    if (!hardened.ok()) impl.failed = hardened;
    if (status.ok()) status = hardened;
  }
  // A pin that found no room can be dropped; what a device did wrong cannot be undone.
  if (!drained.ok() || (!status.ok() && status.code() != absl::StatusCode::kResourceExhausted)) impl.failed = status;
  return status;
}

absl::Status ChunkStore::Impl::Apply(size_t i, const ChunkUpdate& update, StoredChunk& chunk,
                                     UpdatePipeline& pipeline) {
  const TierKind tier = chunk.placement.state;
  const auto poll = [&pipeline] { pipeline.Poll(); };
  const Compute with{.pool = compute, .poll = poll};
  std::byte* state = chunk.state;
  // What came from the disk is compared with its digests while it is updated: before, it would be read twice.
  bool verified = tier != TierKind::kNvme;
  if (tier == TierKind::kNvme) {
    BALLAST_ASSIGN_OR_RETURN(state, pipeline.Load(i));
    absl::ReaderMutexLock lock(&chunk.mutex);
    verified = chunk.updated_in == 0 || Seeded(StorageBug::kLoadDigestUnchecked);
  }
  uint64_t run = 0;
  {
    absl::ReaderMutexLock lock(&mutex);
    run = runs;
  }
  const bool changes = !update.values.empty() || !update.segments.empty() || update.restored.has_value();
  std::optional<CopyOnWrite> copy;
  if (changes && IsPinned(chunk)) {
    if (!std::exchange(verified, true)) {
      const ArrayDigests found = DigestState(chunk.View(state), with);
      absl::ReaderMutexLock lock(&chunk.mutex);
      BALLAST_RETURN_IF_ERROR(
          CompareDigests(tiers->nvme()->file(), chunk, chunk.extent.offset(), chunk.digests, found));
    }
    const bool kept = durable_pins.has_value() && durable_pins->KeepsNewest(chunk.index);
    BALLAST_ASSIGN_OR_RETURN(
        copy, CopyOnWrite::Prepare(tiers, &reader, chunk, run, tier == TierKind::kNvme ? state : nullptr, kept));
  }
  const bool stores = tier == TierKind::kNvme || (update.flush && versions.has_value());
  NvmeExtent fresh;
  // All that can be short is taken before the chunk changes, or the update would be tried again on top of itself.
  if (stores && versions.has_value() && !(copy.has_value() && copy->takes_extent()) &&
      !(Seeded(StorageBug::kOverwrittenInPlace) && chunk.newest.version >= 0)) {
    BALLAST_ASSIGN_OR_RETURN(fresh, MakeRoom(chunk, pipeline));
    Pass("extent/taken");
  }
  {
    absl::MutexLock lock(&chunk.mutex);
    const ArrayDigests expected = chunk.digests;
    const uint64_t read_from = chunk.extent.offset();
    if (copy.has_value()) (*std::move(copy)).Install(chunk);
    if (changes) chunk.updated_in = run;
    if (update.restored.has_value()) {
      // What cannot be read leaves a chunk that is neither: nobody may use it.
      const DurableChunk& pinned = *durable_pins->Find(*update.restored, chunk.index);
      failed = ReadDurable(chunk, pinned, state);
      BALLAST_RETURN_IF_ERROR(failed);
      if (stores) chunk.digests = pinned.digests;
    } else if (tier == TierKind::kHbm) {
      BALLAST_RETURN_IF_ERROR(ApplyOnDevice(update, chunk));
    } else {
      UpdateDigests digests{.of_old = !verified, .of_new = stores};
      UpdateState(update, chunk.View(state), chunk.working, with, &digests);
      if (!verified) {
        BALLAST_RETURN_IF_ERROR(CompareDigests(tiers->nvme()->file(), chunk, read_from, expected, digests.old_state));
      }
      if (stores) chunk.digests = digests.new_state;
    }
    Pass("chunk/updated");
    if (tier == TierKind::kNvme) chunk.staged = state;
    if (!chunk.dirty) chunk.needed_from = update.version - 1;
    chunk.dirty = versions.has_value() && !stores && !Seeded(StorageBug::kFlushedChunkStaysClean);
    if (stores && versions.has_value()) {
      failed = StartVersion(chunk, state, update.version, std::move(fresh));
      BALLAST_RETURN_IF_ERROR(failed);
    }
  }
  CountUpdate(update, chunk);
  if (!stores || tier == TierKind::kHbm) return absl::OkStatus();
  return tier == TierKind::kNvme ? pipeline.Store(i) : pipeline.Flush(i);
}

absl::StatusOr<NvmeExtent> ChunkStore::Impl::MakeRoom(const StoredChunk& chunk, UpdatePipeline& pipeline) {
  if (chunk.placement.state == TierKind::kHbm) BALLAST_RETURN_IF_ERROR(reader.Prepare());
  if (!versions->HasRoom(chunk.state_bytes())) {
    BALLAST_RETURN_IF_ERROR(pipeline.DrainStores());
    BALLAST_RETURN_IF_ERROR(versions->Harden());
  }
  if (versions->HasRoom(chunk.state_bytes())) return versions->Take(chunk.state_bytes());
  return model::Error(absl::StatusCode::kInternal, model::kBudget,
                      absl::StrCat("no room for a new version of chunk ", chunk.id, " of ", chunk.state_bytes(),
                                   " bytes although all older ones are free"));
}

// Gives the chunk a new extent and labels its state for it.
absl::Status ChunkStore::Impl::StartVersion(StoredChunk& chunk, std::byte* state, int64_t version, NvmeExtent fresh) {
  NvmeExtent old;
  if (fresh.bytes() > 0) old = std::exchange(chunk.extent, std::move(fresh));
  DurableChunk entry{.life = versions->life(),
                     .id = chunk.id,
                     .version = version + (Seeded(StorageBug::kVersionAhead) ? 1 : 0),
                     .offset = chunk.extent.offset(),
                     .bytes = chunk.state_bytes(),
                     .elements = chunk.elements,
                     .digests = {}};
  const uint64_t label_at = layout.LabelAt(chunk.elements);
  if (chunk.placement.state == TierKind::kHbm) {
    absl::StatusOr<ArrayDigests> spilled = reader.Spill(chunk, chunk.extent);
    absl::Status written = spilled.status();
    if (spilled.ok()) {
      entry.digests = *spilled;
      alignas(kIoAlignment) std::array<std::byte, StateLayout::kLabelBytes> label;
      EncodeLabel(entry, layout, versions->job(), absl::MakeSpan(label));
      written = tiers->nvme()->file().Write(entry.offset + label_at, label);
    }
    if (!written.ok()) {
      old.Leave();  // it is the version that a restart will look for
      return written;
    }
  } else {
    entry.digests = chunk.digests;
    EncodeLabel(entry, layout, versions->job(), {state + label_at, StateLayout::kLabelBytes});
    Pass("extent/labelled");
  }
  chunk.newest = entry;
  if (old.bytes() > 0) versions->AddRoom(durable_pins->TakeOver(chunk.index, &old), 0);
  versions->Written(entry, std::move(old));
  return absl::OkStatus();
}

absl::Status ChunkStore::Impl::ApplyOnDevice(const ChunkUpdate& update, StoredChunk& chunk) {
  const StateView state = chunk.View(chunk.state);
  const kernels::OptimizerSpec& optimizer = layout.optimizer();
  const bool on_device = chunk.placement.working == TierKind::kHbm;
  const auto working = [&](uint64_t at) {
    std::byte* const to = chunk.working + at * layout.working_element_bytes();
    return on_device ? HbmWorking{.device = to} : HbmWorking{.host = to};
  };
  for (const ChunkUpdate::Values& values : update.values) {
    const auto* from = reinterpret_cast<const std::byte*>(values.values.data());
    auto* to = reinterpret_cast<std::byte*>(state.master() + values.begin);
    BALLAST_RETURN_IF_ERROR(tiers->hbm()->CopyIn({from, values.values.size() * sizeof(float)}, to));
  }
  // The whole chunk: values may begin anywhere, the device kernel may not.
  if (!update.values.empty()) {
    BALLAST_RETURN_IF_ERROR(tiers->hbm()->Round(state.master(), chunk.elements, optimizer.working, working(0)));
  }
  for (const ChunkUpdate::SegmentUpdate& segment : update.segments) {
    const uint64_t at = segment.begin;
    BALLAST_RETURN_IF_ERROR(tiers->hbm()->Update(optimizer, segment.coefficients, RandomAt(update, at),
                                                 SpanOf(update, state, nullptr, at, segment.end - at), working(at)));
  }
  return absl::OkStatus();
}

void ChunkStore::Impl::CountUpdate(const ChunkUpdate& update, const StoredChunk& chunk) const {
  uint64_t elements = 0;
  for (const ChunkUpdate::SegmentUpdate& segment : update.segments) elements += segment.end - segment.begin;
  // NVMe state passes through DRAM; its way to the disk is counted by the pipeline.
  const TierKind memory = chunk.placement.state == TierKind::kHbm ? TierKind::kHbm : TierKind::kDram;
  const uint64_t state_bytes = elements * layout.StateBytes(chunk.elements) / chunk.elements;
  tiers->CountTraffic(memory, state_bytes, state_bytes);
  tiers->CountTraffic(chunk.placement.working, 0, elements * layout.working_element_bytes());
}

absl::Status ChunkStore::ReadWorking(uint64_t index, uint64_t begin, absl::Span<std::byte> to) const {
  BALLAST_ASSIGN_OR_RETURN(const StoredChunk* chunk, impl_->Find(index));
  const uint64_t width = impl_->layout.working_element_bytes();
  BALLAST_ASSIGN_OR_RETURN(const uint64_t count, ElementsOf(to.size(), width));
  BALLAST_RETURN_IF_ERROR(CheckRange(index, chunk->elements, begin, count));
  impl_->tiers->CountTraffic(chunk->placement.working, to.size(), 0);
  absl::ReaderMutexLock lock(&chunk->mutex);
  const std::byte* const from = chunk->working + begin * width;
  if (chunk->placement.working == TierKind::kHbm) return impl_->tiers->hbm()->CopyOut(from, to);
  std::copy_n(from, to.size(), to.data());
  return absl::OkStatus();
}

absl::Status ChunkStore::ReadState(uint64_t index, StateArray array, uint64_t begin, absl::Span<float> to) const {
  BALLAST_ASSIGN_OR_RETURN(const StoredChunk* chunk, impl_->Find(index));
  BALLAST_RETURN_IF_ERROR(CheckRange(index, chunk->elements, begin, to.size()));
  return ReadAsF32(*chunk, array, begin, to, [&](uint64_t at, uint64_t count, ChunkReader::Sink sink) {
    absl::ReaderMutexLock lock(&chunk->mutex);
    return impl_->reader.Read(*chunk, array, at, count, sink);
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

absl::StatusOr<std::vector<DurableChunk>> ChunkStore::PinDurably(int64_t version) {
  Impl& impl = *impl_;
  BALLAST_RETURN_IF_ERROR(impl.failed);
  std::vector<StoredChunk*> chunks;
  {
    absl::MutexLock lock(&impl.mutex);
    for (StoredChunk& chunk : impl.chunks) {
      // One that was never updated has no state yet, and perhaps no place in the job.
      if (chunk.dirty || chunk.newest.version >= 0) chunks.push_back(&chunk);
    }
  }
  uint64_t bytes = 0;
  std::vector<ChunkUpdate> flushes;
  for (const StoredChunk* chunk : chunks) {
    const bool there = !chunk->dirty;
    if (!there || !impl.durable_pins->KeepsNewest(chunk->index)) bytes += chunk->state_bytes();
    if (there) continue;
    ChunkUpdate& flush = flushes.emplace_back();
    flush.chunk = chunk->index;
    flush.version = version;
    flush.flush = true;
  }
  BALLAST_ASSIGN_OR_RETURN(BudgetLease reserve, impl.durable_pins->Reserve(bytes));
  if (!flushes.empty()) {
    absl::Status flushed = Run(flushes, [](size_t) {});
    // Space was reserved: whatever is short now is no reason to refuse a pin and go on.
    if (absl::IsResourceExhausted(flushed)) {
      flushed = model::Error(absl::StatusCode::kInternal, model::kBudget, flushed.message());
    }
    BALLAST_RETURN_IF_ERROR(flushed);
  }
  std::vector<DurableChunk> kept;
  for (const StoredChunk* chunk : chunks) {
    impl.durable_pins->Keep(version, chunk->index, chunk->newest, &reserve);
    kept.push_back(chunk->newest);
  }
  return kept;
}

absl::Status ChunkStore::TakeBackPin(int64_t version, uint64_t index, const DurableChunk& kept) {
  BALLAST_ASSIGN_OR_RETURN(const StoredChunk* chunk, impl_->Find(index));
  DurablePins& pins = *impl_->durable_pins;
  if (chunk->newest.version < 0 || chunk->newest.offset != kept.offset) return pins.TakeBack(version, index, kept);
  BudgetLease reserve;
  if (!pins.KeepsNewest(index)) {
    BALLAST_ASSIGN_OR_RETURN(reserve, pins.Reserve(kept.bytes));
  }
  pins.Keep(version, index, kept, &reserve);
  return absl::OkStatus();
}

absl::Status ChunkStore::VerifyPin(int64_t version) const {
  const Impl& impl = *impl_;
  Arena memory;
  for (const uint64_t index : impl.durable_pins->ChunksOf(version)) {
    BALLAST_ASSIGN_OR_RETURN(const StoredChunk* chunk, impl.Find(index));
    const DurableChunk& kept = *impl.durable_pins->Find(version, index);
    const uint64_t bytes = chunk->state_bytes();
    if (memory.bytes().size() < bytes) {
      BALLAST_ASSIGN_OR_RETURN(memory, Arena::Map(bytes, /*pin=*/false));
    }
    std::byte* const state = memory.bytes().data();
    BALLAST_RETURN_IF_ERROR(impl.tiers->nvme()->file().Read(kept.offset, {state, bytes}));
    impl.tiers->CountTraffic(TierKind::kNvme, bytes, 0);
    BALLAST_RETURN_IF_ERROR(impl.CheckRestored(*chunk, kept, state));
  }
  return absl::OkStatus();
}

void ChunkStore::UnpinDurably(int64_t version) { impl_->durable_pins->Drop(version); }

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

absl::Status ChunkStore::Impl::ReadPinned(int64_t pin, const StoredChunk& chunk, StateArray array, uint64_t begin,
                                          uint64_t count, ChunkReader::Sink sink) {
  const absl::Status gone = model::Error(
      absl::StatusCode::kFailedPrecondition, model::kVersionGone,
      absl::StrCat("version ", pin, " of chunk ", chunk.index, " is not pinned; pin it while it is current"));
  uint64_t runs_before = 0;
  {
    absl::ReaderMutexLock lock(&mutex);
    const auto found = pins.find(pin);
    if (found == pins.end()) return gone;
    if (chunk.index >= found->second.chunks) return gone;
    runs_before = found->second.runs;
  }
  absl::ReaderMutexLock lock(&chunk.mutex);
  if (chunk.updated_in <= runs_before) return reader.Read(chunk, array, begin, count, sink);
  for (const PinnedCopy& copy : chunk.copies) {
    if (copy.from <= runs_before && runs_before < copy.to) {
      return reader.ReadCopy(chunk, copy, array, begin, count, sink);
    }
  }
  return gone;  // unpinned since
}

absl::Status ChunkStore::ReadPinnedState(int64_t pin, uint64_t index, StateArray array, uint64_t begin,
                                         absl::Span<float> to) const {
  BALLAST_ASSIGN_OR_RETURN(const StoredChunk* chunk, impl_->Find(index));
  BALLAST_RETURN_IF_ERROR(CheckRange(index, chunk->elements, begin, to.size()));
  return ReadAsF32(*chunk, array, begin, to, [&](uint64_t at, uint64_t count, ChunkReader::Sink sink) {
    return impl_->ReadPinned(pin, *chunk, array, at, count, sink);
  });
}

// The working copy is the rounded master at all times, so a pin need not keep it.
absl::Status ChunkStore::ReadPinnedWorking(int64_t pin, uint64_t index, uint64_t begin,
                                           absl::Span<std::byte> to) const {
  BALLAST_ASSIGN_OR_RETURN(const StoredChunk* chunk, impl_->Find(index));
  const uint64_t width = impl_->layout.working_element_bytes();
  BALLAST_ASSIGN_OR_RETURN(const uint64_t count, ElementsOf(to.size(), width));
  BALLAST_RETURN_IF_ERROR(CheckRange(index, chunk->elements, begin, count));
  return impl_->ReadPinned(pin, *chunk, StateArray::kMaster, begin * sizeof(float), count * sizeof(float),
                           [&](uint64_t at, absl::Span<const std::byte> bytes) {
                             const absl::Span<const float> master(reinterpret_cast<const float*>(bytes.data()),
                                                                  bytes.size() / sizeof(float));
                             kernels::FromF32(master, impl_->layout.optimizer().working,
                                              to.data() + at / sizeof(float) * width);
                           });
}

}  // namespace ballast::storage
