// A device played by the host, with the host's memory and kernels, so that every machine can test the store's use of
// HBM, also under sanitizers. Device pointers point to pages without access, like a GPU's, so following a device
// pointer ends the process. The device reaches the same memory through a second mapping.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "ballast/kernels/kernels.h"
#include "ballast/proto/base/status.h"
#include "ballast/storage/io/block_file.h"
#include "ballast/tests/storage/tier/test_hbm.h"

namespace ballast::storage {
namespace {

class HostHbm : public HbmTier {
 public:
  explicit HostHbm(Ledger* ledger) : ledger_(ledger) {}
  ~HostHbm() override { scratch_ = BudgetLease(); }

  absl::Status Init() {
    BALLAST_ASSIGN_OR_RETURN(scratch_,
                             ledger_->Lease(TierKind::kHbm, kHbmScratchBytes, "scratch memory of the hbm tier"));
    return absl::OkStatus();
  }

  absl::StatusOr<HbmBlock> Allocate(uint64_t bytes, absl::string_view what) override {
    BALLAST_ASSIGN_OR_RETURN(BudgetLease lease, ledger_->Lease(TierKind::kHbm, bytes, what));
    const int file = memfd_create("hbm", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, static_cast<off_t>(bytes)) != 0) return absl::InternalError("memfd");
    void* const device = mmap(nullptr, bytes, PROT_NONE, MAP_SHARED, file, 0);
    void* const host = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (device == MAP_FAILED || host == MAP_FAILED) return absl::InternalError("mmap");
    absl::MutexLock lock(&mutex_);
    blocks_[static_cast<std::byte*>(device)] = {static_cast<std::byte*>(host), bytes};
    return HbmBlock(this, static_cast<std::byte*>(device), std::move(lease));
  }

  absl::Status CopyIn(absl::Span<const std::byte> host, std::byte* device) override {
    absl::MutexLock lock(&mutex_);
    std::memcpy(Reach(device, host.size()), host.data(), host.size());
    return absl::OkStatus();
  }

  absl::Status CopyOut(const std::byte* device, absl::Span<std::byte> host) override {
    absl::MutexLock lock(&mutex_);
    std::memcpy(host.data(), Reach(device, host.size()), host.size());
    return absl::OkStatus();
  }

  absl::StatusOr<HbmWork> Start(absl::FunctionRef<absl::Status(HbmQueue& queue)> work) override {
    Queue queue(this);
    BALLAST_RETURN_IF_ERROR(work(queue));
    return HbmWork(this, nullptr);
  }

 private:
  class Queue : public HbmQueue {
   public:
    explicit Queue(HostHbm* hbm) : hbm_(hbm) {}
    absl::Status CopyIn(absl::Span<const std::byte> host, std::byte* device) override {
      return hbm_->CopyIn(host, device);
    }
    absl::Status Update(const kernels::OptimizerSpec& optimizer, absl::Span<const HbmSegment> segments) override {
      for (const HbmSegment& segment : segments) BALLAST_RETURN_IF_ERROR(hbm_->Update(optimizer, segment));
      return absl::OkStatus();
    }
    absl::Status Round(const float* master, uint64_t elements, kernels::Dtype dtype, HbmWorking working) override {
      if (elements > kHbmSpanElementsMax) return absl::InvalidArgumentError("span");
      absl::MutexLock lock(&hbm_->mutex_);
      kernels::FromF32({hbm_->Reach(master, elements), elements}, dtype,
                       hbm_->Place(working, kernels::BytesOf(dtype, elements)));
      return absl::OkStatus();
    }

   private:
    HostHbm* const hbm_;
  };

  absl::Status Update(const kernels::OptimizerSpec& optimizer, const HbmSegment& segment) {
    const uint64_t n = segment.span.n;
    if (n > kHbmSpanElementsMax) return absl::InvalidArgumentError("span");
    absl::MutexLock lock(&mutex_);
    kernels::UpdateSpan span = segment.span;
    span.master = Reach(span.master, n);
    for (int k = 0; k < kernels::MomentCount(optimizer); ++k) {
      kernels::MomentSpan& moment = span.moments[static_cast<size_t>(k)];
      moment.values = Reach(moment.values, kernels::MomentBytes(optimizer.moments, n));
      if (const uint64_t bytes = kernels::MomentScaleBytes(optimizer.moments, n); bytes > 0) {
        moment.scales = Reach(moment.scales, bytes / sizeof(float));
      }
    }
    span.working = Place(segment.working, kernels::BytesOf(optimizer.working, n));
    kernels::Update(optimizer, segment.coefficients, segment.random, span);
    return absl::OkStatus();
  }

  struct Block {
    std::byte* host = nullptr;
    uint64_t bytes = 0;
  };

  absl::Status Wait(void*) override { return absl::OkStatus(); }

  void Free(std::byte* data) override {
    absl::MutexLock lock(&mutex_);
    const auto found = blocks_.find(data);
    munmap(found->first, found->second.bytes);
    munmap(found->second.host, found->second.bytes);
    blocks_.erase(found);
  }

  // The device's address of `count` elements at `pointer`. Ends the process if no block holds all of them.
  template <typename T>
  T* Reach(const T* pointer, uint64_t count) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    const auto* const at = reinterpret_cast<const std::byte*>(pointer);
    auto block = blocks_.upper_bound(const_cast<std::byte*>(at));
    const uint64_t bytes = count * sizeof(T);
    if (block == blocks_.begin()) std::abort();
    --block;
    const auto offset = static_cast<uint64_t>(at - block->first);
    if (offset > block->second.bytes || bytes > block->second.bytes - offset) std::abort();
    return reinterpret_cast<T*>(block->second.host + offset);
  }

  std::byte* Place(const HbmWorking& working, uint64_t bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return working.device != nullptr ? Reach(working.device, bytes) : working.host;
  }

  Ledger* const ledger_;
  BudgetLease scratch_;
  absl::Mutex mutex_;
  std::map<std::byte*, Block> blocks_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace

HbmOpener TestHbm() {
  return [](int, Ledger* ledger) -> absl::StatusOr<std::unique_ptr<HbmTier>> {
    auto tier = std::make_unique<HostHbm>(ledger);
    BALLAST_RETURN_IF_ERROR(tier->Init());
    return std::unique_ptr<HbmTier>(std::move(tier));
  };
}

}  // namespace ballast::storage
