// HBM of a CUDA device. Updates take turns on kHbmLanes streams, copies for pulls and moves have one more, beside the
// updates. A stream's mutex is held while work is queued, not while a thread waits for work.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "ballast/kernels/cuda/cuda_kernels.h"
#include "ballast/kernels/cuda/device_processor.h"
#include "ballast/kernels/cuda/outcome.h"
#include "ballast/proto/base/status.h"
#include "ballast/storage/tier/hbm_tier.h"
#include "ballast/storage/tier/processor_check.h"

namespace ballast::storage {
namespace {

using kernels::ElementBytes;
using kernels::cuda::Outcome;

absl::Status CudaStatus(cudaError_t returned, absl::string_view what) {
  if (Outcome(returned) == cudaSuccess) return absl::OkStatus();
  return model::Error(absl::StatusCode::kInternal, model::kIo,
                      absl::StrCat("hbm: ", what, ": ", cudaGetErrorString(returned)));
}

// The current device belongs to the thread, and is GPU 0 until one is selected: first of all on every thread.
absl::Status UseDevice(int device) { return CudaStatus(cudaSetDevice(device), absl::StrCat("device ", device)); }

absl::Status CheckSpan(uint64_t elements) {
  if (elements <= kHbmSpanElementsMax) return absl::OkStatus();
  return model::Error(absl::StatusCode::kInvalidArgument, model::kBadLength,
                      absl::StrCat("hbm: ", elements, " elements at once, at most ", kHbmSpanElementsMax));
}

// `wait`, and its time.
template <typename Wait>
absl::Status Waited(std::atomic<int64_t>* nanoseconds, const Wait& wait) {
  const auto began = std::chrono::steady_clock::now();
  absl::Status status = CudaStatus(wait(), "waiting for the GPU");
  *nanoseconds += std::chrono::nanoseconds(std::chrono::steady_clock::now() - began).count();
  return status;
}

absl::Status QueueCopyIn(absl::Span<const std::byte> host, std::byte* device, cudaStream_t stream,
                         GpuCounters* counters) {
  ++counters->in.count;
  counters->in.bytes += host.size();
  return CudaStatus(cudaMemcpyAsync(device, host.data(), host.size(), cudaMemcpyHostToDevice, stream),
                    "copy to the GPU");
}

absl::Status QueueCopyOut(const std::byte* device, absl::Span<std::byte> host, cudaStream_t stream,
                          GpuCounters* counters) {
  ++counters->out.count;
  counters->out.bytes += host.size();
  return CudaStatus(cudaMemcpyAsync(host.data(), device, host.size(), cudaMemcpyDeviceToHost, stream),
                    "copy from the GPU");
}

constexpr uint64_t kLaneScratchBytes = kHbmScratchBytes / kHbmLanes;

// Queues on one stream, through scratch memory for a gradient and for working parameters on their way to the host: the
// stream's order keeps each from being overwritten too early.
class CudaQueue : public HbmQueue {
 public:
  CudaQueue(cudaStream_t stream, std::byte* scratch, GpuCounters* counters)
      : stream_(stream), counters_(counters), gradient_(scratch), working_(scratch + kLaneScratchBytes / 2) {}

  absl::Status CopyIn(absl::Span<const std::byte> host, std::byte* device) override {
    return QueueCopyIn(host, device, stream_, counters_);
  }

  // One copy for all gradients: a copy of its own for each small tensor would cost more than the tensor's update.
  absl::Status Update(const kernels::OptimizerSpec& optimizer, absl::Span<const HbmSegment> segments) override {
    if (segments.empty()) return absl::OkStatus();
    if (optimizer.master == kernels::MasterFormat::kLent) {
      return model::Error(absl::StatusCode::kUnimplemented, model::kUnsupported,
                          "hbm: the master is in the trainer's memory, and the GPU updates masters of its own alone");
    }
    const uint64_t gradient_width = ElementBytes(optimizer.gradient);
    const std::byte* gradients = segments.front().span.gradient;
    for (const HbmSegment& segment : segments) gradients = std::min(gradients, segment.span.gradient);
    const auto at = [&](const HbmSegment& segment) {
      return static_cast<uint64_t>(segment.span.gradient - gradients) / gradient_width;
    };
    uint64_t elements = 0;
    for (const HbmSegment& segment : segments) elements = std::max(elements, at(segment) + segment.span.n);
    BALLAST_RETURN_IF_ERROR(CheckSpan(elements));
    BALLAST_RETURN_IF_ERROR(CopyIn({gradients, elements * gradient_width}, gradient_));
    const auto in_working = [&](const HbmSegment& segment) {
      return working_ + kernels::BytesOf(optimizer.working, at(segment));
    };
    std::vector<kernels::cuda::UpdatePart> parts;
    parts.reserve(segments.size());
    for (const HbmSegment& segment : segments) {
      parts.push_back({.coefficients = segment.coefficients, .key = segment.random, .span = segment.span});
      kernels::UpdateSpan& span = parts.back().span;
      span.gradient = gradient_ + at(segment) * gradient_width;
      span.working = segment.working.device != nullptr ? segment.working.device : in_working(segment);
    }
    BALLAST_ASSIGN_OR_RETURN(const uint64_t launches, kernels::cuda::Update(optimizer, parts, stream_));
    counters_->kernels += launches;
    // Delivers neighbours without a gap together: a gap may hold elements that the update does not touch.
    for (size_t first = 0, next = 0; first < segments.size(); first = next) {
      uint64_t n = 0;
      for (next = first; next < segments.size() && at(segments[next]) == at(segments[first]) + n; ++next) {
        n += segments[next].span.n;
      }
      BALLAST_RETURN_IF_ERROR(
          Deliver(in_working(segments[first]), segments[first].working, kernels::BytesOf(optimizer.working, n)));
    }
    return absl::OkStatus();
  }

  absl::Status Round(const float* master, uint64_t elements, kernels::Dtype dtype, HbmWorking working) override {
    BALLAST_RETURN_IF_ERROR(CheckSpan(elements));
    ++counters_->kernels;
    BALLAST_RETURN_IF_ERROR(kernels::cuda::FromF32(master, dtype, working.device != nullptr ? working.device : working_,
                                                   elements, stream_));
    return Deliver(working_, working, kernels::BytesOf(dtype, elements));
  }

 private:
  absl::Status Deliver(const std::byte* from, const HbmWorking& working, uint64_t bytes) {
    if (working.device != nullptr) return absl::OkStatus();
    return QueueCopyOut(from, {working.host, bytes}, stream_, counters_);
  }

  const cudaStream_t stream_;
  GpuCounters* const counters_;
  std::byte* const gradient_;
  std::byte* const working_;
};

// Blocks come from the device's memory pool, since cudaMalloc rounds each block up to 2 MiB. The pool returns free
// memory to the device when a thread waits for a stream.
class CudaHbmTier : public HbmTier {
 public:
  CudaHbmTier(int device, Ledger* ledger) : device_(device), ledger_(ledger) {}

  ~CudaHbmTier() override {
    (void)UseDevice(device_);
    scratch_ = HbmBlock();
    for (const cudaEvent_t event : events_) (void)Outcome(cudaEventDestroy(event));
    for (const Stream& lane : lanes_) Destroy(lane);
    Destroy(copies_);
  }

  absl::Status Init() {
    BALLAST_RETURN_IF_ERROR(UseDevice(device_));
    BALLAST_RETURN_IF_ERROR(CheckPools());
    for (Stream& lane : lanes_) BALLAST_RETURN_IF_ERROR(Create(&lane));
    BALLAST_RETURN_IF_ERROR(Create(&copies_));
    BALLAST_ASSIGN_OR_RETURN(scratch_, Allocate(kHbmScratchBytes, "scratch memory of the hbm tier"));
    scratch_.Mark(TierPart::kBuffers);
    absl::Status tested;
    const absl::Status checked = CheckProcessor(kernels::cuda::DeviceProcessor(&tested), absl::StrCat("GPU ", device_));
    if (!tested.ok())
      return model::Error(absl::StatusCode::kInternal, model::kIo, absl::StrCat("hbm: ", tested.message()));
    return checked;
  }

  absl::StatusOr<HbmBlock> Allocate(uint64_t bytes, absl::string_view what) override {
    BALLAST_ASSIGN_OR_RETURN(BudgetLease lease, ledger_->Lease(TierKind::kHbm, bytes, what));
    BALLAST_RETURN_IF_ERROR(UseDevice(device_));
    HbmBlock block;
    {
      absl::MutexLock lock(&copies_.mutex);
      void* data = nullptr;
      const cudaError_t error = Outcome(cudaMallocAsync(&data, bytes, copies_.cuda));
      if (error == cudaErrorMemoryAllocation) {
        return model::Error(absl::StatusCode::kResourceExhausted, model::kBudget,
                            absl::StrCat("the GPU refused ", bytes, " bytes for ", what, ": ",
                                         cudaGetErrorString(error), "; lower the hbm budget"));
      }
      BALLAST_RETURN_IF_ERROR(CudaStatus(error, absl::StrCat(bytes, " bytes for ", what)));
      block = HbmBlock(this, static_cast<std::byte*>(data), std::move(lease));
    }
    BALLAST_RETURN_IF_ERROR(Copy(
        [&](cudaStream_t stream) { return CudaStatus(cudaMemsetAsync(block.data(), 0, bytes, stream), "zeroing"); }));
    return block;
  }

  absl::Status CopyIn(absl::Span<const std::byte> host, std::byte* device) override {
    return Copy([&](cudaStream_t stream) { return QueueCopyIn(host, device, stream, &counters_); });
  }

  absl::Status CopyOut(const std::byte* device, absl::Span<std::byte> host) override {
    return Copy([&](cudaStream_t stream) { return QueueCopyOut(device, host, stream, &counters_); });
  }

  absl::StatusOr<HbmWork> Start(absl::FunctionRef<absl::Status(HbmQueue& queue)> work) override {
    BALLAST_RETURN_IF_ERROR(UseDevice(device_));
    const uint64_t turn = turns_++ % kHbmLanes;
    Stream& lane = lanes_[turn];
    absl::StatusOr<cudaEvent_t> done = TakeEvent();
    BALLAST_RETURN_IF_ERROR(done.status());
    absl::Status queued;
    {
      absl::MutexLock lock(&lane.mutex);
      CudaQueue queue(lane.cuda, scratch_.data() + turn * kLaneScratchBytes, &counters_);
      queued = work(queue);
      const absl::Status recorded = CudaStatus(cudaEventRecord(*done, lane.cuda), "event");
      if (!recorded.ok()) {
        // Nothing would tell when the host's memory, which is only borrowed, is free again.
        (void)Outcome(cudaStreamSynchronize(lane.cuda));
        ReturnEvent(*done);
        return queued.ok() ? recorded : queued;
      }
    }
    HbmWork begun(this, *done);
    if (queued.ok()) return begun;
    (void)begun.Wait();
    return queued;
  }

 private:
  struct Stream {
    absl::Mutex mutex;
    cudaStream_t cuda = nullptr;  // set once; queued on under the mutex
  };

  static absl::Status Create(Stream* stream) {
    return CudaStatus(cudaStreamCreateWithFlags(&stream->cuda, cudaStreamNonBlocking), "stream");
  }
  static void Destroy(const Stream& stream) {
    if (stream.cuda != nullptr) (void)Outcome(cudaStreamDestroy(stream.cuda));
  }

  // Events are used again: as many exist as there was work under way at once.
  absl::StatusOr<cudaEvent_t> TakeEvent() {
    absl::MutexLock lock(&events_mutex_);
    if (!events_.empty()) {
      const cudaEvent_t event = events_.back();
      events_.pop_back();
      return event;
    }
    cudaEvent_t event = nullptr;
    BALLAST_RETURN_IF_ERROR(CudaStatus(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "event"));
    return event;
  }
  void ReturnEvent(cudaEvent_t event) {
    absl::MutexLock lock(&events_mutex_);
    events_.push_back(event);
  }

  absl::Status Wait(void* done) override {
    auto* const event = static_cast<cudaEvent_t>(done);
    absl::Status status = UseDevice(device_);
    const absl::Status waited = Waited(&counters_.update_wait_nanoseconds, [&] { return cudaEventSynchronize(event); });
    ReturnEvent(event);
    return status.ok() ? waited : status;
  }

  void Free(std::byte* data) override {
    (void)UseDevice(device_);
    absl::MutexLock lock(&copies_.mutex);
    (void)Outcome(cudaFreeAsync(data, copies_.cuda));
  }

  absl::Status Copy(absl::FunctionRef<absl::Status(cudaStream_t)> queue) {
    BALLAST_RETURN_IF_ERROR(UseDevice(device_));
    {
      absl::MutexLock lock(&copies_.mutex);
      BALLAST_RETURN_IF_ERROR(queue(copies_.cuda));
    }
    return Waited(&counters_.copy_wait_nanoseconds, [&] { return cudaStreamSynchronize(copies_.cuda); });
  }

  absl::Status CheckPools() const {
    int supported = 0;
    BALLAST_RETURN_IF_ERROR(CudaStatus(cudaDeviceGetAttribute(&supported, cudaDevAttrMemoryPoolsSupported, device_),
                                       "whether it has memory pools"));
    if (supported != 0) return absl::OkStatus();
    return model::Error(
        absl::StatusCode::kInvalidArgument, model::kBadConfig,
        absl::StrCat("GPU ", device_, " or its driver has no memory pools (cudaMallocAsync), which ",
                     "the hbm tier takes its blocks from; set the hbm budget to 0, or choose another device"));
  }

  const int device_;
  Ledger* const ledger_;
  Stream lanes_[kHbmLanes];  // of updates
  Stream copies_;
  std::atomic<uint64_t> turns_{0};
  HbmBlock scratch_;  // of the lanes, a part each
  absl::Mutex events_mutex_;
  std::vector<cudaEvent_t> events_ ABSL_GUARDED_BY(events_mutex_);  // that nobody waits for
};

}  // namespace

absl::StatusOr<std::unique_ptr<HbmTier>> OpenHbmTier(int device, Ledger* ledger) {
  int devices = 0;
  const cudaError_t error = Outcome(cudaGetDeviceCount(&devices));
  if (error != cudaSuccess || device < 0 || device >= devices) {
    return model::Error(
        absl::StatusCode::kInvalidArgument, model::kBadConfig,
        absl::StrCat(
            "an hbm budget of ", ledger->budget().hbm, " bytes was given for GPU ", device, ", but ",
            error != cudaSuccess ? std::string(cudaGetErrorString(error)) : absl::StrCat(devices, " GPUs are here"),
            "; set the hbm budget to 0, or choose a device that is there"));
  }
  auto tier = std::make_unique<CudaHbmTier>(device, ledger);
  BALLAST_RETURN_IF_ERROR(tier->Init());
  return std::unique_ptr<HbmTier>(std::move(tier));
}

}  // namespace ballast::storage
