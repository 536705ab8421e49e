// What the backends share: every collective as one exchange of bytes between all pairs of ranks.
#pragma once

#include <string>
#include <vector>

#include "ballast/client/collective/collective.h"

namespace ballast::client {

// A backend provides Transfer; arguments are checked and own parts copied here. After a failed transfer every further
// call returns that error.
class PairwiseCollective : public Collective {
 public:
  PairwiseCollective(int rank, int world_size) : rank_(rank), world_size_(world_size) {}
  int rank() const final { return rank_; }
  int world_size() const final { return world_size_; }
  absl::StatusOr<std::vector<std::string>> Exchange(const std::string& mine) final;
  absl::Status AllGather(absl::Span<const uint64_t> offsets, absl::Span<std::byte> all) final;
  absl::Status AllToAll(absl::Span<const absl::Span<const std::byte>> to,
                        absl::Span<const absl::Span<std::byte>> from) final;

 protected:
  using Source = absl::Span<const std::byte>;
  using Target = absl::Span<std::byte>;
  // to[r] goes to rank r, from[r] is filled by rank r; own entries are empty, others may be. Blocks; spans are borrowed
  // until return, also on an error.
  virtual absl::Status Transfer(absl::Span<const Source> to, absl::Span<const Target> from) = 0;

 private:
  absl::Status Run(absl::Span<const Source> to, absl::Span<const Target> from);

  const int rank_;
  const int world_size_;
  absl::Status broken_;
};

}  // namespace ballast::client
