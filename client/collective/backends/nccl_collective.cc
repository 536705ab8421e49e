#include "ballast/client/collective/nccl_collective.h"

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "ballast/client/collective/backends/pairwise_collective.h"
#include "ballast/kernels/cuda/outcome.h"
#include "ballast/proto/base/status.h"

namespace ballast::client {
namespace {

using kernels::cuda::Outcome;

// Between two looks at an operation: far below a transfer's time, far above a look's cost.
constexpr absl::Duration kPoll = absl::Microseconds(50);

absl::Status CudaStatus(cudaError_t error, absl::string_view what) {
  if (Outcome(error) == cudaSuccess) return absl::OkStatus();
  return model::Error(absl::StatusCode::kInternal, model::kIo,
                      absl::StrCat(what, " failed: ", cudaGetErrorString(error)));
}

absl::Status NcclStatus(ncclResult_t result, absl::string_view what) {
  if (result == ncclSuccess) return absl::OkStatus();
  // NCCL's errors when a peer, or the way to it, is gone.
  const bool peer = result == ncclRemoteError || result == ncclSystemError;
  return model::Error(peer ? absl::StatusCode::kUnavailable : absl::StatusCode::kInternal,
                      peer ? model::kRankMissing : model::kIo,
                      absl::StrCat(what, " failed: ", ncclGetErrorString(result), ": ", ncclGetLastError(nullptr)));
}

class NcclCollective : public PairwiseCollective {
 public:
  NcclCollective(int rank, int world_size, const NcclOptions& options)
      : PairwiseCollective(rank, world_size), options_(options) {}

  ~NcclCollective() override {
    (void)Outcome(cudaSetDevice(options_.device));  // this thread may not be the one that connected
    // Abort, not destroy: destroying waits for peers that may be gone.
    if (comm_ != nullptr) ncclCommAbort(comm_);
    if (stream_ != nullptr) (void)Outcome(cudaStreamDestroy(stream_));
    if (staging_ != nullptr) (void)Outcome(cudaFree(staging_));
  }

  absl::Status Connect(const ncclUniqueId& id, absl::Time deadline) {
    BALLAST_RETURN_IF_ERROR(CudaStatus(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "a CUDA stream"));
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    const ncclResult_t result = ncclCommInitRankConfig(&comm_, world_size(), id, rank(), &config);
    return Finish(result, deadline, "connecting");
  }

 protected:
  absl::Status Transfer(absl::Span<const Source> to, absl::Span<const Target> from) override {
    const absl::Time deadline = absl::Now() + options_.timeout;
    const absl::Status status = Stage(to, from, deadline);
    // Copies to and from the caller's memory must not outlive the call.
    if (!status.ok() && comm_ != nullptr) {
      ncclCommAbort(comm_);
      comm_ = nullptr;
      (void)Outcome(cudaStreamSynchronize(stream_));
    }
    return status;
  }

 private:
  absl::Status Stage(absl::Span<const Source> to, absl::Span<const Target> from, absl::Time deadline) {
    BALLAST_RETURN_IF_ERROR(CudaStatus(cudaSetDevice(options_.device), "cudaSetDevice"));
    uint64_t bytes = 0;
    for (int r = 0; r < world_size(); ++r) bytes += to[r].size() + from[r].size();
    BALLAST_RETURN_IF_ERROR(Grow(bytes));
    std::byte* at = staging_;
    std::vector<std::byte*> send_at, receive_at;
    for (int r = 0; r < world_size(); ++r) {
      send_at.push_back(at);
      if (!to[r].empty()) {
        BALLAST_RETURN_IF_ERROR(CudaStatus(
            cudaMemcpyAsync(at, to[r].data(), to[r].size(), cudaMemcpyHostToDevice, stream_), "copy to the GPU"));
      }
      at += to[r].size();
      receive_at.push_back(at);
      at += from[r].size();
    }
    BALLAST_RETURN_IF_ERROR(NcclStatus(ncclGroupStart(), "ncclGroupStart"));
    absl::Status queued;
    for (int r = 0; r < world_size(); ++r) {
      if (!to[r].empty()) queued.Update(Queued(ncclSend(send_at[r], to[r].size(), ncclInt8, r, comm_, stream_)));
      if (!from[r].empty()) queued.Update(Queued(ncclRecv(receive_at[r], from[r].size(), ncclInt8, r, comm_, stream_)));
    }
    const ncclResult_t result = ncclGroupEnd();
    BALLAST_RETURN_IF_ERROR(queued);
    BALLAST_RETURN_IF_ERROR(Finish(result, deadline, "a transfer"));
    // Before the copies: one to pageable memory may wait for the stream itself, and for a missing peer for ever.
    BALLAST_RETURN_IF_ERROR(WaitForStream(deadline));
    for (int r = 0; r < world_size(); ++r) {
      if (from[r].empty()) continue;
      BALLAST_RETURN_IF_ERROR(
          CudaStatus(cudaMemcpyAsync(from[r].data(), receive_at[r], from[r].size(), cudaMemcpyDeviceToHost, stream_),
                     "copy from the GPU"));
    }
    return WaitForStream(deadline);
  }

  static absl::Status Queued(ncclResult_t result) {
    return result == ncclInProgress ? absl::OkStatus() : NcclStatus(result, "ncclSend or ncclRecv");
  }

  // A non-blocking communicator answers later.
  absl::Status Finish(ncclResult_t result, absl::Time deadline, absl::string_view what) {
    while (result == ncclInProgress) {
      BALLAST_RETURN_IF_ERROR(NcclStatus(ncclCommGetAsyncError(comm_, &result), "ncclCommGetAsyncError"));
      if (result == ncclInProgress && absl::Now() >= deadline) return Late(what);
      if (result == ncclInProgress) absl::SleepFor(kPoll);
    }
    return NcclStatus(result, what);
  }

  absl::Status WaitForStream(absl::Time deadline) {
    for (;;) {
      const cudaError_t error = Outcome(cudaStreamQuery(stream_));
      if (error != cudaErrorNotReady) return CudaStatus(error, "a transfer");
      ncclResult_t result = ncclSuccess;
      BALLAST_RETURN_IF_ERROR(NcclStatus(ncclCommGetAsyncError(comm_, &result), "ncclCommGetAsyncError"));
      if (result != ncclInProgress) BALLAST_RETURN_IF_ERROR(NcclStatus(result, "a transfer"));
      if (absl::Now() >= deadline) return Late("a transfer");
      absl::SleepFor(kPoll);
    }
  }

  absl::Status Late(absl::string_view what) const {
    return model::Error(absl::StatusCode::kDeadlineExceeded, model::kRankMissing,
                        absl::StrCat("rank ", rank(), " of ", world_size(), ": ", what, " took longer than ",
                                     absl::FormatDuration(options_.timeout),
                                     ": some rank did not come; stop the group and start it again"));
  }

  absl::Status Grow(uint64_t bytes) {
    if (bytes <= staging_bytes_) return absl::OkStatus();
    if (staging_ != nullptr) (void)Outcome(cudaFree(staging_));
    staging_ = nullptr;
    staging_bytes_ = 0;
    void* memory = nullptr;
    if (Outcome(cudaMalloc(&memory, bytes)) != cudaSuccess) {
      return model::Error(absl::StatusCode::kResourceExhausted, model::kBudget,
                          absl::StrCat("no ", bytes, " bytes of GPU memory for staging"));
    }
    staging_ = static_cast<std::byte*>(memory);
    staging_bytes_ = bytes;
    return absl::OkStatus();
  }

  const NcclOptions options_;
  ncclComm_t comm_ = nullptr;
  cudaStream_t stream_ = nullptr;
  std::byte* staging_ = nullptr;
  uint64_t staging_bytes_ = 0;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Collective>> MakeNccl(Rendezvous* rendezvous, int rank, int world_size,
                                                     const NcclOptions& options) {
  const absl::Time deadline = absl::Now() + options.timeout;
  if (const cudaError_t error = Outcome(cudaSetDevice(options.device)); error != cudaSuccess) {
    return model::Error(absl::StatusCode::kFailedPrecondition, model::kUnsupported,
                        absl::StrCat("rank ", rank, " cannot use GPU ", options.device, ": ", cudaGetErrorString(error),
                                     "; use the Gloo collective, or name another GPU"));
  }
  ncclUniqueId id;
  if (rank == 0) {
    BALLAST_RETURN_IF_ERROR(NcclStatus(ncclGetUniqueId(&id), "ncclGetUniqueId"));
    BALLAST_RETURN_IF_ERROR(rendezvous->Set("nccl/id", absl::string_view(id.internal, sizeof(id.internal))));
  } else {
    BALLAST_ASSIGN_OR_RETURN(const std::string text, rendezvous->Get("nccl/id", deadline));
    if (text.size() != sizeof(id.internal)) {
      return model::Error(absl::StatusCode::kInvalidArgument, model::kBadLength,
                          absl::StrCat("rank 0's NCCL id has ", text.size(), " bytes; expected ", sizeof(id.internal),
                                       ": do all ranks run the same version?"));
    }
    std::copy(text.begin(), text.end(), id.internal);
  }
  auto collective = std::make_unique<NcclCollective>(rank, world_size, options);
  BALLAST_RETURN_IF_ERROR(collective->Connect(id, deadline));
  return collective;
}

}  // namespace ballast::client
