// The job's expected state after each decided step: the authors' payloads run through the kernels, on plain vectors.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "ballast/kernels/optimizer.h"
#include "ballast/tests/sim/intent.h"

namespace ballast::sim {

class Reference {
 public:
  Reference();

  // Applies a decided step, pushed by `author`. Steps come in order; a repeated step is ignored.
  void Decided(const v1::Decision& decision, const GroupIntent& author);
  int64_t last_step() const { return last_step_; }

  // A whole chunk after `version`, up to last_step(), in Pull's format. Empty if older than its last 4 changes.
  absl::Span<const std::byte> Bits(int64_t version, uint64_t chunk, v1::Content content) const;
  // The last step up to `version` that changed the chunk; -1: none, or an older one than Bits has.
  int64_t ChangedAt(int64_t version, uint64_t chunk) const;
  const std::vector<uint64_t>& tensor_steps() const { return tensor_steps_; }
  uint64_t moments_written() const { return moments_written_; }  // transactions with values of moments
  int contents() const { return 2 + kernels::MomentCount(optimizer_); }

 private:
  using Snapshot = std::map<int, std::vector<std::byte>>;  // by content
  struct Chunk {
    std::vector<float> master;
    std::vector<std::vector<std::byte>> moments;
    std::vector<std::vector<float>> scales;
    std::map<int64_t, Snapshot> versions;  // the last 4 versions that changed the chunk
    struct State {
      std::vector<float> master;
      std::vector<std::vector<std::byte>> moments;
      std::vector<std::vector<float>> scales;
    };
    std::map<int64_t, State> states;  // all versions that changed the chunk, in the optimizer's format
  };
  static void Restore(int64_t version, Chunk* chunk);
  void Take(int64_t step, Chunk* chunk) const;
  bool ApplyValues(const v1::Decision& decision, const GroupIntent& author, const v1::StepHeader& header,
                   const model::Chunk& layout, Chunk* chunk) const;
  bool Update(const v1::Decision& decision, const GroupIntent& author, const v1::StepHeader& header,
              const model::Chunk& layout, Chunk* chunk) const;

  kernels::MomentSpan Moment(size_t k, uint64_t at, Chunk* chunk) const;

  kernels::OptimizerSpec optimizer_;
  std::vector<Chunk> chunks_;
  std::vector<uint64_t> tensor_steps_;
  std::map<int64_t, std::vector<uint64_t>> tensor_steps_at_;
  int64_t last_step_ = -1;
  uint64_t moments_written_ = 0;
};

}  // namespace ballast::sim
