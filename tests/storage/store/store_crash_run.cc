#include "ballast/tests/storage/store/store_crash_run.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <map>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ballast/kernels/kernels.h"
#include "ballast/proto/base/status.h"
#include "ballast/storage/memory/arena.h"
#include "ballast/storage/store/chunk_store.h"
#include "ballast/tests/sim/random.h"
#include "ballast/tests/sim_disk/sim_disk.h"

namespace ballast::storage {
namespace {

constexpr int kLives = 6;
constexpr int kRunsPerLife = 12;
const std::vector<uint64_t>& Elements() {
  static const std::vector<uint64_t> elements = {256, 2048, 5120, 1280, 9984};
  return elements;
}

class StoreRun {
 public:
  StoreRun(uint64_t seed, const std::string& directory, StoreCrashTally* tally)
      : random_(seed),
        disk_(seed),
        directory_(directory),
        a_(absl::StrCat(directory, "/a")),
        b_(absl::StrCat(directory, "/b")),
        tally_(*tally),
        logs_(seed % 6 == 5),
        scrubs_(seed % 6 == 4),
        devices_(seed % 4 == 2) {
    for (const std::string& device : {a_, b_}) std::filesystem::create_directories(device);
  }

  // Empty, or what was broken.
  std::string Run() {
    for (int life = 0; life < kLives && !refused_; ++life) {
      if (devices_ && life > 0 && random_.Percent(20)) Swap();
      if (devices_ && life > 0 && random_.Percent(20)) Unplug();
      const std::string violation = Live();
      if (!violation.empty()) return absl::StrCat("life ", life, ": ", violation);
      End();
      PlugIn();
      if (rots_ && random_.Percent(50)) Rot();
    }
    tally_.refused += refused_ ? 1 : 0;
    return "";
  }

 private:
  using Values = std::vector<float>;

  std::string Live() {
    failed_ = must_find_ = life_over_ = false;
    if (random_.Percent(50)) disk_.CrashAfter(1 + random_.Below(200));
    if (absl::Status status = Start(); !status.ok()) return Explain(status);
    if (std::string violation = CheckAll("restored "); !violation.empty()) return violation;
    if (random_.Percent(25)) {
      const SimOperation operation = random_.Percent(50) ? SimOperation::kSync : SimOperation::kWrite;
      disk_.SetFaultProbability(operation, SimFault::kEio, 0.1);
    }
    for (int i = 0; i < kRunsPerLife && !refused_ && !life_over_; ++i) {
      if (absl::Status status = Step(); !status.ok()) return Explain(status);
      if (rots_ && random_.Percent(scrubs_ ? 40 : 10)) Rot();
      if (scrubs_) {
        if (std::string violation = ScrubSome(); !violation.empty()) return violation;
      }
      if (random_.Percent(30)) {
        if (std::string violation = CheckAll(""); !violation.empty()) return violation;
      }
    }
    return "";
  }

  absl::Status Start() {
    std::vector<ExtentPlace> kept;
    for (const auto& [id, chunk] : catalog_) kept.push_back({chunk.offset, chunk.bytes, chunk.file});
    const uint64_t staging = (uint64_t{1} << 20) + 2 * StateLayout().StateBytes(Elements().back());
    TiersOptions options{.budget = {0, uint64_t{16} << 20, uint64_t{8} << 20},
                         .directory = directory_,
                         .staging_bytes = staging,
                         .disk = &disk_,
                         .kept = kept};
    if (devices_) {
      options.devices = {{directory_, uint64_t{4} << 20}, {a_, uint64_t{2} << 20}, {b_, uint64_t{2} << 20}};
      options.known.paths = known_;
      options.known.remember = [this](NvmeFileId id, const std::string& path) {
        known_[id] = path;
        return absl::OkStatus();
      };
    }
    absl::StatusOr<std::unique_ptr<Tiers>> tiers = Tiers::Open(options);
    if (!tiers.ok()) return tiers.status();
    tiers_ = *std::move(tiers);
    const auto record = [this](absl::Span<const DurableChunk> chunks) { return Record(chunks); };
    store_ = std::make_unique<ChunkStore>(tiers_.get(), kernels::OptimizerSpec(), nullptr,
                                          DurableOptions{.job = "job", .record = record});
    std::vector<ChunkToAdd> added;
    Plan plan;
    on_nvme_.clear();
    stored_.clear();
    for (uint64_t id = 0; id < Elements().size(); ++id) {
      ChunkToAdd& chunk = added.emplace_back(ChunkToAdd{.elements = Elements()[id], .id = id, .durable = {}});
      const auto found = catalog_.find(id);
      if (found != catalog_.end()) chunk.durable = found->second;
      on_nvme_.push_back(random_.Percent(50));
      plan.chunks.push_back({.state = on_nvme_.back() ? TierKind::kNvme : TierKind::kDram});
      if (random_.Percent(30)) plan.chunks.back().working = std::nullopt;
      const int64_t version = found == catalog_.end() ? -1 : found->second.version;
      if (version < kept_[id])
        return absl::AbortedError(
            absl::StrCat("chunk ", id, " is at version ", version, ", and ", kept_[id], " was said to be kept"));
      applied_[id] = {version};
      const auto values = history_.find({id, version});
      now_[id] = values == history_.end() ? Values(Elements()[id]) : values->second;
      tally_.restored += version >= 0 ? 1 : 0;
    }
    if (logs_) {
      BALLAST_ASSIGN_OR_RETURN(log_, disk_.Open(directory_ + "/log", Disk::Mode::kEmptied));
      log_end_ = 0;
    }
    plan.pull = store_->pull_memory_missing(*std::max_element(Elements().begin(), Elements().end()), Elements().size());
    return store_->Add(added, plan);
  }

  // In some seeds some values are read back from a log, which may rot too.
  absl::Status MoveToLog(ChunkUpdate* update) {
    const ChunkUpdate::Values values = update->values[0];
    const absl::Span<const std::byte> bytes(reinterpret_cast<const std::byte*>(values.values.data()),
                                            values.values.size() * sizeof(float));
    BALLAST_ASSIGN_OR_RETURN(Arena blocks, Arena::Map(AlignUp(bytes.size())));
    std::copy(bytes.begin(), bytes.end(), blocks.bytes().begin());
    BALLAST_RETURN_IF_ERROR(log_->Write(log_end_, blocks.bytes()));
    const PayloadPlace place{log_end_, bytes.size(), kernels::Crc32c(bytes)};
    log_end_ += blocks.bytes().size();
    update->values.clear();
    update->logged_values = {{.place = place, .begin = 0, .parts = {{0, values.values.size()}}}};
    if (!rots_ || rotten_ || !random_.Percent(10)) return absl::OkStatus();
    BALLAST_RETURN_IF_ERROR(log_->Sync());  // what lies on the disk rots
    disk_.FlipBit(directory_ + "/log", (place.offset + random_.Below(bytes.size())) * 8 + random_.Below(8));
    rotten_ = true;
    ++tally_.rotten_bits;
    return absl::OkStatus();
  }

  // All or none of them, unless the machine dies on the way.
  absl::Status Record(absl::Span<const DurableChunk> chunks) {
    const absl::Status broken = absl::InternalError("the catalog cannot be written");
    if (disk_.off() || failed_) return broken;
    const bool dies = random_.Percent(3);
    failed_ = dies || random_.Percent(3);
    if (!failed_ || (dies && random_.Percent(50))) {
      for (const DurableChunk& chunk : chunks) catalog_[chunk.id] = chunk;
    }
    if (!dies) return failed_ ? broken : absl::OkStatus();
    disk_.CrashAfter(1);
    (void)disk_.Remove("nothing");
    return broken;
  }

  absl::Status Step() {
    ++version_;
    ++tally_.runs;
    std::vector<std::pair<uint64_t, Values>> changed;
    std::vector<uint64_t> ends;
    std::vector<ChunkUpdate> updates;
    for (uint64_t id = 0; id < Elements().size(); ++id) {
      if (!random_.Percent(60)) continue;
      Values& values = changed.emplace_back(id, now_[id]).second;
      // A part of it: the rest is what the last version left.
      const uint64_t end = 1 + random_.Below(values.size());
      for (uint64_t i = 0; i < end; ++i) {
        values[i] = static_cast<float>(static_cast<int32_t>(random_.Next() >> 32)) * 0x1p-31f;
      }
      ends.push_back(end);
      history_[{id, version_}] = values;
    }
    for (const auto& [id, values] : changed) {
      ChunkUpdate& update = updates.emplace_back();
      update.chunk = id;
      update.values = {{0, absl::MakeConstSpan(values).first(ends[updates.size() - 1])}};
      update.version = version_;
      update.flush = random_.Percent(50);
      if (logs_ && random_.Percent(60)) BALLAST_RETURN_IF_ERROR(MoveToLog(&update));
    }
    BALLAST_ASSIGN_OR_RETURN(const Arena memory, Arena::Map(AlignUp(4 * Elements().back())));
    const absl::Status status = store_->Run(updates, [](size_t) {}, {.log = log_.get(), .memory = memory.bytes()});
    if (!status.ok()) return status;
    for (size_t i = 0; i < updates.size(); ++i) {
      const uint64_t id = updates[i].chunk;
      now_[id] = std::move(changed[i].second);
      applied_[id].insert(version_);
      stored_[id] = updates[i].flush || on_nvme_[id];
    }
    NoteKept();
    if (!random_.Percent(15)) return absl::OkStatus();
    const absl::Status hardened = store_->Harden();
    if (!hardened.ok()) return hardened;
    for (const auto& [id, stored] : stored_) {
      if (stored && store_->recoverable_from(id).has_value()) {
        return absl::AbortedError(absl::StrCat("chunk ", id, " is not kept although the store was hardened"));
      }
    }
    NoteKept();
    return absl::OkStatus();
  }

  // Notes the version that, by the store's word, survives a crash: the last one before a log would be needed.
  void NoteKept() {
    for (uint64_t id = 0; id < Elements().size(); ++id) {
      const int64_t until = store_->recoverable_from(id).value_or(version_);
      const auto behind = applied_[id].upper_bound(until);
      if (behind != applied_[id].begin()) kept_[id] = std::max(kept_[id], *std::prev(behind));
    }
  }

  std::string CheckAll(const char* what) {
    for (uint64_t id = 0; id < Elements().size(); ++id) {
      Values master(Elements()[id]);
      const absl::Status read = store_->ReadState(id, StateArray::kMaster, 0, absl::MakeSpan(master));
      if (!read.ok()) return Explain(read);
      std::vector<kernels::bf16> working(master.size()), expected(master.size());
      const absl::Status copied =
          store_->ReadWorking(id, 0, {reinterpret_cast<std::byte*>(working.data()), 2 * working.size()});
      if (!copied.ok()) return Explain(copied);
      kernels::Bf16FromF32(now_[id], absl::MakeSpan(expected));
      Values moment(master.size());
      const auto which = random_.Percent(50) ? StateArray::kMoment1 : StateArray::kMoment2;
      const absl::Status moments = store_->ReadState(id, which, 0, absl::MakeSpan(moment));
      if (!moments.ok()) return Explain(moments);
      if (std::any_of(moment.begin(), moment.end(), [](float value) { return value != 0; })) {
        return absl::StrCat(what, "chunk ", id, " has moments that nobody wrote");
      }
      if (std::memcmp(master.data(), now_[id].data(), 4 * master.size()) != 0 ||
          std::memcmp(working.data(), expected.data(), 2 * working.size()) != 0) {
        return absl::StrCat(what, "chunk ", id, " is not what was written");
      }
    }
    return "";
  }

  // Reads some pieces, and mends what is found.
  std::string ScrubSome() {
    const absl::StatusOr<Arena> buffer = Arena::Map(uint64_t{16} << 10);
    if (!buffer.ok()) return buffer.status().ToString();
    for (uint64_t left = 1 + random_.Below(40); left > 0; --left) {
      const ScrubPiece piece = store_->ScrubNext(buffer->bytes());
      if (piece.pass_over) {
        ++tally_.passes;
        if (rotten_ && must_find_ && StillThere()) return "a pass of the scrub did not find the rot";
        must_find_ = rotten_;
      }
      if (!piece.checked.has_value() || piece.found.ok()) continue;
      if (!absl::IsDataLoss(piece.found)) return Explain(piece.found);
      if (!rotten_) return absl::StrCat("the scrub found what is not there: ", piece.found.ToString());
      must_find_ = false;
      if (!piece.checked->in_memory || CannotReadMoments(*piece.checked)) continue;
      const absl::Status mended = Mend(*piece.checked);
      if (!mended.ok()) return Explain(mended);
      rotten_ = false;
      ++tally_.mended;
      // The worst moment for a mend that is not durable.
      life_over_ = random_.Percent(50);
      if (life_over_) return "";
    }
    return "";
  }

  // Reads moments that are on the disk alone; they may be what is rotten.
  bool CannotReadMoments(const ScrubbedExtent& extent) {
    return extent.moments_unread && absl::IsDataLoss(store_->LoadMoments(extent.chunk)) &&
           rotten_at_ >= extent.entry.offset + StateLayout().ArrayAt(StateArray::kMoment1, extent.entry.elements);
  }

  absl::Status Mend(const ScrubbedExtent& extent) {
    if (!extent.dirty) return store_->Rewrite(extent);
    ChunkUpdate flush;
    flush.chunk = extent.chunk;
    flush.version = version_;
    flush.flush = true;
    history_[{extent.chunk, version_}] = now_[extent.chunk];
    BALLAST_RETURN_IF_ERROR(store_->Run({&flush, 1}, [](size_t) {}, {}));
    BALLAST_RETURN_IF_ERROR(store_->Harden());
    applied_[extent.chunk].insert(version_);
    stored_[extent.chunk] = true;
    NoteKept();
    return absl::OkStatus();
  }

  // Has the chunk the rotten state still, and is the bit in a part that is checked? Most of a label is padding.
  bool StillThere() const {
    const uint64_t label = rotten_state_.offset + rotten_state_.bytes - StateLayout::kLabelBytes;
    const std::vector<ScrubbedExtent> extents = store_->Extents(rotten_state_.id);
    return rotten_at_ < label && std::any_of(extents.begin(), extents.end(), [this](const ScrubbedExtent& extent) {
             return extent.entry.offset == rotten_state_.offset && extent.entry.version == rotten_state_.version;
           });
  }

  // The id in the file's first block, as storage/tier/device_header.cc lays it out.
  NvmeFileId IdIn(const std::string& directory) const {
    const std::vector<std::byte> content = disk_.DurableContent(TierIn(directory));
    NvmeFileId id = 0;
    if (content.size() >= 24) std::memcpy(&id, content.data() + 16, sizeof(id));
    return id;
  }
  static std::string TierIn(const std::string& directory) { return directory + "/nvme.tier"; }
  // The disks are mounted the other way round.
  void Swap() {
    const auto on_a = disk_.DurableContent(TierIn(a_)), on_b = disk_.DurableContent(TierIn(b_));
    if (on_a.empty() || on_b.empty()) return;
    disk_.SetContent(TierIn(a_), on_b);
    disk_.SetContent(TierIn(b_), on_a);
  }
  // A disk is not mounted: its file is not there.
  void Unplug() {
    unplugged_ = disk_.DurableContent(TierIn(b_));
    if (unplugged_.empty()) return;
    for (const auto& [id, chunk] : catalog_) needed_ = needed_ || (chunk.file != 0 && chunk.file == IdIn(b_));
    disk_.SetContent(TierIn(b_), {});
    ++tally_.unplugged;
  }
  // A disk that had nothing that is wanted does not come back.
  void PlugIn() {
    if (needed_) disk_.SetContent(TierIn(b_), unplugged_);
    needed_ = false;
  }

  // Empty if a fault of the disk or the catalog, or a disk that is not there, explains the error.
  std::string Explain(const absl::Status& status) {
    if (needed_ && (absl::IsInternal(status) || absl::IsDataLoss(status))) return "";
    if (rotten_ && absl::IsDataLoss(status)) refused_ = true;
    const bool broken = disk_.off() || failed_ || disk_.suffered(SimFault::kEio) != errors_;
    return refused_ || (broken && absl::IsInternal(status)) ? "" : status.ToString();
  }

  void End() {
    for (const SimOperation operation : {SimOperation::kSync, SimOperation::kWrite}) {
      disk_.SetFaultProbability(operation, SimFault::kEio, 0);
    }
    const bool failed = std::exchange(errors_, disk_.suffered(SimFault::kEio)) != disk_.suffered(SimFault::kEio);
    tally_.errors += failed ? 1 : 0;
    const bool kill = !failed && !disk_.off() && random_.Percent(40);
    if (!kill) disk_.Crash();
    disk_.CrashAfter(0);
    store_.reset();
    tiers_.reset();
    log_.reset();
    ++(kill ? tally_.kills : tally_.power_cuts);
  }

  // Flips a bit in a recorded extent.
  void Rot() {
    if (catalog_.empty() || rotten_) return;
    auto chunk = catalog_.begin();
    std::advance(chunk, static_cast<std::ptrdiff_t>(random_.Below(catalog_.size())));
    // A scrub is to mend more often than a start is to refuse.
    const auto mends = [&](uint64_t id) { return store_ != nullptr && !on_nvme_[id] && !store_->dirty(id); };
    if (scrubs_ && random_.Percent(80) && !mends(chunk->first)) return;
    const uint64_t at = chunk->second.offset + random_.Below(chunk->second.bytes);
    const NvmeFileId file = chunk->second.file;
    disk_.FlipBit(TierIn(file == 0 ? directory_ : file == IdIn(a_) ? a_ : b_), at * 8 + random_.Below(8));
    rotten_ = true;
    rotten_at_ = at;
    rotten_state_ = chunk->second;
    must_find_ = false;
    ++tally_.rotten_bits;
  }

  sim::Random random_;
  SimDisk disk_;
  const std::string directory_, a_, b_;
  StoreCrashTally& tally_;
  const bool rots_ = random_.Percent(30);
  const bool logs_;
  const bool scrubs_;
  DurableChunk rotten_state_;
  uint64_t rotten_at_ = 0;  // in the tier's file
  bool life_over_ = false;
  bool must_find_ = false;  // the pass under way began after the rot
  const bool devices_;      // two of them, beside the data directory
  std::map<NvmeFileId, std::string> known_;
  std::vector<std::byte> unplugged_;
  bool needed_ = false;  // entries name the device that is unplugged
  std::unique_ptr<Tiers> tiers_;
  std::unique_ptr<ChunkStore> store_;
  std::unique_ptr<BlockFile> log_;
  uint64_t log_end_ = 0;
  std::vector<bool> on_nvme_;
  std::map<uint64_t, DurableChunk> catalog_;
  std::map<std::pair<uint64_t, int64_t>, Values> history_;  // values by chunk and version
  std::map<uint64_t, Values> now_;
  std::map<uint64_t, std::set<int64_t>> applied_;  // by id: versions of this life
  std::map<uint64_t, bool> stored_;                // by id: on the disk since the last change
  std::map<uint64_t, int64_t> kept_{{0, -1}, {1, -1}, {2, -1}, {3, -1}, {4, -1}};  // by id: newest promised version
  int64_t version_ = -1;
  uint64_t errors_ = 0;
  bool failed_ = false;  // the catalog, in this life
  bool rotten_ = false;
  bool refused_ = false;
};

}  // namespace

std::string RunStoreLives(uint64_t seed, const std::string& directory, StoreCrashTally* tally) {
  return StoreRun(seed, directory, tally).Run();
}

}  // namespace ballast::storage
