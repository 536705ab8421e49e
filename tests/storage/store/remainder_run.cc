#include "ballast/tests/storage/store/remainder_run.h"

#include <algorithm>
#include <map>
#include <memory>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ballast/proto/base/status.h"
#include "ballast/storage/store/chunk_store.h"
#include "ballast/tests/sim/random.h"
#include "ballast/tests/sim_disk/sim_disk.h"
#include "ballast/tests/storage/store/reference_chunks.h"

namespace ballast::storage {
namespace {

constexpr int kEvents = 40;
// Some end amid a byte of carries; the last is more than a block of an update.
constexpr uint64_t kElements[] = {256, 2051, 5120, 1283, 20481};

class RemainderLife {
 public:
  RemainderLife(uint64_t seed, const std::string& directory, RemainderTally* tally)
      : random_(seed), disk_(seed), directory_(directory), tally_(*tally) {}

  std::string Run() {
    if (const absl::Status started = Start(); !started.ok()) return started.ToString();
    if (random_.Percent(30)) disk_.SetFaultProbability(SimOperation::kWrite, SimFault::kEio, 0.01);
    for (int i = 0; i < kEvents; ++i) {
      absl::Status status = Event();
      if (status.ok() && random_.Percent(40)) status = CheckAll();
      if (!status.ok()) return Explain(status);
      if (rots_ && random_.Percent(5)) Rot();
    }
    return Explain(CheckAll());
  }

 private:
  absl::Status Start() {
    const kernels::OptimizerSpec optimizer{.master = kernels::MasterFormat::kRemainder};
    const uint64_t largest = *std::max_element(std::begin(kElements), std::end(kElements));
    const uint64_t staging = kMiB + 2 * StateLayout().StateBytes(largest);
    // Pinned copies find room on the disk, or in DRAM alone.
    const uint64_t nvme = random_.Percent(70) ? 8 * kMiB : kMiB / 2;
    BALLAST_ASSIGN_OR_RETURN(
        tiers_,
        Tiers::Open(
            {.budget = {0, 16 * kMiB, nvme}, .directory = directory_, .staging_bytes = staging, .disk = &disk_}));
    store_ = std::make_unique<ChunkStore>(tiers_.get(), optimizer);
    Plan plan;
    for (const uint64_t elements : kElements) {
      plan.chunks.push_back({.state = random_.Percent(60) ? TierKind::kNvme : TierKind::kDram});
      if (random_.Percent(20)) plan.chunks.back().working = std::nullopt;
      now_.emplace_back(elements);
    }
    plan.pull = store_->pull_memory_missing(largest, std::size(kElements));
    return store_->Add(absl::MakeConstSpan(kElements), plan);
  }

  absl::Status Event() {
    const uint64_t what = random_.Below(100);
    if (what < 55) return Step();
    if (what < 70) {
      const auto pin = static_cast<int64_t>(++tally_.pins);
      pinned_.emplace(pin, now_);
      return store_->Pin(pin);
    }
    if (what < 80 && !pinned_.empty()) {
      store_->Unpin(pinned_.begin()->first);
      pinned_.erase(pinned_.begin());
      return absl::OkStatus();
    }
    if (what < 95) {
      ++tally_.moves;
      const absl::Status moved =
          store_->Move(random_.Below(std::size(kElements)), random_.Percent(50) ? TierKind::kNvme : TierKind::kDram);
      return absl::IsResourceExhausted(moved) ? absl::OkStatus() : moved;
    }
    return store_->DropWorkingCopies().status();
  }

  absl::Status Step() {
    ++tally_.runs;
    StepUpdates step(random_.Next());
    const bool values = random_.Percent(40);
    for (uint64_t chunk = 0; chunk < std::size(kElements); ++chunk) {
      if (!random_.Percent(60)) continue;
      values ? step.AddValues(chunk, kElements[chunk])
             : step.AddSegments(chunk, kElements[chunk], tally_.runs % 50 + 1);
    }
    BALLAST_RETURN_IF_ERROR(store_->Run(step.updates(), [](size_t) {}));
    step.ApplyTo(now_);
    return absl::OkStatus();
  }

  // ABORTED, which no store answers, if a chunk differs.
  absl::Status CheckAll() {
    for (uint64_t chunk = 0; chunk < std::size(kElements); ++chunk) {
      BALLAST_RETURN_IF_ERROR(Check(absl::StrCat("chunk ", chunk), Holds(*store_, chunk, now_[chunk])));
      for (const auto& [pin, then] : pinned_) {
        BALLAST_RETURN_IF_ERROR(
            Check(absl::StrCat("chunk ", chunk, " of a pin"), HoldsPinned(*store_, pin, chunk, then[chunk])));
      }
    }
    return absl::OkStatus();
  }

  static absl::Status Check(const std::string& what, const ::testing::AssertionResult& holds) {
    if (holds) return absl::OkStatus();
    const std::string message = holds.message();
    if (message.find("differs") != std::string::npos) return absl::AbortedError(absl::StrCat(what, ": ", message));
    return message.find("CHECKSUM") != std::string::npos ? absl::DataLossError(message) : absl::InternalError(message);
  }

  // Empty if a fault of the disk explains the error, or a spent budget.
  std::string Explain(const absl::Status& status) {
    if (status.ok()) return "";
    const bool rotten = rotten_ && absl::IsDataLoss(status), full = absl::IsResourceExhausted(status);
    const bool failed = disk_.suffered(SimFault::kEio) > 0 && absl::IsInternal(status);
    tally_.refused += rotten ? 1 : 0;
    tally_.errors += failed ? 1 : 0;
    return rotten || full || failed ? "" : status.ToString();
  }

  // Flips a bit somewhere in the file: in a state, in a pinned copy, or in neither.
  void Rot() {
    const std::string path = absl::StrCat(directory_, "/nvme.tier");
    const uint64_t bytes = disk_.DurableContent(path).size();
    if (bytes == 0 || rotten_) return;
    disk_.FlipBit(path, random_.Below(8 * bytes));
    rotten_ = true;
    ++tally_.rotten_bits;
  }

  sim::Random random_;
  SimDisk disk_;
  const std::string directory_;
  RemainderTally& tally_;
  const bool rots_ = random_.Percent(30);
  bool rotten_ = false;
  std::unique_ptr<Tiers> tiers_;
  std::unique_ptr<ChunkStore> store_;
  std::vector<ReferenceChunk> now_;
  std::map<int64_t, std::vector<ReferenceChunk>> pinned_;
};

}  // namespace

std::string RunRemainderLife(uint64_t seed, const std::string& directory, RemainderTally* tally) {
  return RemainderLife(seed, directory, tally).Run();
}

}  // namespace ballast::storage
