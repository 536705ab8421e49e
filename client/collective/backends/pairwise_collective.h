// Shared by all backends: every collective as one exchange of bytes between all pairs of ranks.
#pragma once

#include <string>
#include <vector>

#include "ballast/client/collective/collective.h"

namespace ballast::client {

// A backend provides Transfer; this class checks arguments and copies own parts. After a failed transfer every further
// call returns the same error.
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
  // to[r] goes to rank r, rank r fills from[r]; own entries are empty, and the rest may be empty. Blocks. Spans are
  // borrowed until return, also on an error.
  virtual absl::Status Transfer(absl::Span<const Source> to, absl::Span<const Target> from) = 0;

 private:
  absl::Status Run(absl::Span<const Source> to, absl::Span<const Target> from);

  const int rank_;
  const int world_size_;
  absl::Status broken_;
};

}  // namespace ballast::client
