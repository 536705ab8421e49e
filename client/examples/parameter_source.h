// Source of a trainer's parameters and destination of its gradients: state servers (server_source.h), or arrays of this
// process (local_source.h). Both give the same bits.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "ballast/client/collective/gradient_tree.h"
#include "ballast/v1/types.pb.h"

namespace ballast::client {

// Threads: one at a time. Errors end the run.
class ParameterSource {
 public:
  virtual ~ParameterSource() = default;

  // The last finished step; 0 after the initial values.
  virtual int64_t version() const = 0;

  // Where tensors lie. `unit`: index as in TensorsOf (bytes_lm/model.h).
  virtual uint64_t unit_elements(uint32_t unit) const = 0;
  virtual absl::StatusOr<uint64_t> Locate(const std::string& tensor) const = 0;  // first element, in its unit
  // The ranges of a unit owned by each rank: a rank pushes the gradients of its ranges.
  using Ranges = std::vector<GradientTree::ElementRange>;
  virtual std::vector<Ranges> OwnedRanges(uint32_t unit) const = 0;

  // A hint that `unit` will be acquired soon.
  virtual void Prefetch(uint32_t unit) = 0;
  // COLLECTIVE. The unit's flat space, widened from the working dtype.
  virtual absl::Status Acquire(uint32_t unit, absl::Span<float> parameters) = 0;
  // Pushes this rank's ranges of the unit's gradient. `gradient`: the ranges one after another, summed over all
  // micro-batches. Copies it and rounds it to the gradient dtype. Call it once per unit and step.
  virtual absl::Status Push(uint32_t unit, absl::Span<const float> gradient) = 0;
  // COLLECTIVE. Ends the step; all units must have been pushed. `header` is the same on all ranks: groups,
  // gradient_scale, max_norm.
  virtual absl::StatusOr<v1::Verdict> FinishStep(const v1::StepHeader& header, const std::string& blob) = 0;

  // fp32 master values of a whole tensor at version().
  virtual absl::Status ReadMaster(const std::string& tensor, absl::Span<float> to) = 0;
};

}  // namespace ballast::client
