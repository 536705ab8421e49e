// The reference: the same state and the same kernels in arrays of this process, with no session, server or network.
//
// Layout, norms, verdict and coefficients come from the functions used by servers and clients, so the master weights
// must equal theirs bit for bit.
#pragma once

#include <array>
#include <memory>
#include <vector>

#include "ballast/client/examples/bytes_lm/model.h"
#include "ballast/client/examples/parameter_source.h"
#include "ballast/kernels/optimizer.h"
#include "ballast/proto/model/layout.h"

namespace ballast::client {

class LocalSource : public ParameterSource {
 public:
  // Starts at version 0 and allocates all state. `seed` determines the initial values and the stochastic rounding.
  // Norms are computed per chunk, so the bits equal a job's only if `chunk_elements` does.
  static absl::StatusOr<std::unique_ptr<LocalSource>> Create(const ModelShape& shape, uint64_t seed,
                                                             uint64_t chunk_elements,
                                                             const kernels::OptimizerSpec& optimizer = {});

  int64_t version() const override { return version_; }
  uint64_t unit_elements(uint32_t unit) const override { return layout_.units()[unit].elements; }
  absl::StatusOr<uint64_t> Locate(const std::string& tensor) const override;
  std::vector<Ranges> OwnedRanges(uint32_t unit) const override;
  void Prefetch(uint32_t unit) override {}
  absl::Status Acquire(uint32_t unit, absl::Span<float> parameters) override;
  absl::Status Push(uint32_t unit, absl::Span<const float> gradient) override;
  absl::StatusOr<v1::Verdict> FinishStep(const v1::StepHeader& header, const std::string& blob) override;
  absl::Status ReadMaster(const std::string& tensor, absl::Span<float> to) override;

 private:
  struct UnitState {
    std::vector<float> master;
    std::array<std::vector<std::byte>, kernels::kMomentsMax> moments;
    std::array<std::vector<float>, kernels::kMomentsMax> scales;
    std::vector<std::byte> working, gradient;
  };

  LocalSource(model::Layout layout, const kernels::OptimizerSpec& optimizer, uint64_t seed);
  absl::Status CheckSize(const char* what, uint32_t unit, size_t size) const;
  v1::ChunkNorm NormOf(const model::Chunk& chunk) const;
  void Update(const model::Chunk& chunk, const v1::StepHeader& header, float factor);

  model::Layout layout_;
  const kernels::OptimizerSpec optimizer_;
  const uint64_t seed_;
  std::vector<UnitState> units_;
  std::vector<uint64_t> tensor_steps_;  // t per tensor: updates so far
  int64_t version_ = 0;
};

}  // namespace ballast::client
