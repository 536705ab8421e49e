// How a job works in a trainer's memory. Lent slices are held like pushed slices, but without bytes: norms are computed
// and values checked where the trainer has them, and the update reads them there.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "ballast/kernels/kernels.h"
#include "ballast/proto/base/lent_memory.h"
#include "ballast/services/job_state/job_mutex.h"
#include "ballast/services/threads/reply.h"
#include "ballast/services/threads/waiting.h"
#include "ballast/v1/state_service.pb.h"

namespace ballast::services {

class HeldChunk;
class JobCore;
class LentMemory;

class Loans {
 public:
  explicit Loans(JobCore* core) : core_(core) {}

  // As StateServer::Lend.
  absl::StatusOr<std::unique_ptr<model::Loan>> Lend(const model::LoanRequest& request) ABSL_LOCKS_EXCLUDED(job_lock);

 private:
  class Loan;
  // Lent slices on their way to be held, and the norms to compute for them.
  struct Slices {
    std::vector<v1::PushRequest> headers;
    struct Segment {
      std::shared_ptr<HeldChunk> chunk;
      uint64_t generation = 0;
      size_t index = 0;
      v1::SliceKind kind = v1::SLICE_KIND_GRADIENT;
      kernels::Dtype dtype = kernels::Dtype::kF32;
      const std::byte* lent = nullptr;
      uint64_t elements = 0;
      kernels::NormResult norm;
    };
    std::vector<Segment> segments;
  };

  absl::Status Check(const model::LoanRequest& request) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  absl::Status Begin(Slices* slices) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  void ComputeNorms(Slices* slices) const;
  absl::Status Finish(const Slices& slices) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // The trainer takes its memory back.
  void End(const std::shared_ptr<LentMemory>& lent) ABSL_LOCKS_EXCLUDED(job_lock);
  void TakeBack(const LentMemory& lent, Replies* replies) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);

  JobCore* const core_;
};

}  // namespace ballast::services
