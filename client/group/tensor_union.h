// One list of all tensors that the ranks of a group name, and the placement of each tensor over the ranks.
#pragma once

#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "ballast/client/session_types.h"
#include "ballast/proto/model/layout.h"

namespace ballast::client {

// One rank's names. spec() is the job as this rank asks for it, with the rank's tensors as its only registration.
// tiling() has the placement of each tensor, in the same order. If a placement has no meshes, the rank alone has the
// whole tensor.
v1::OpenRequest Named(const v1::JobSpec& spec, const std::vector<TensorSpec>& tensors);

// Ranks that name the same.
struct NamedAlike {
  v1::OpenRequest named;
  std::vector<uint32_t> ranks;  // ascending
};

class TensorUnion {
 public:
  // The union over all ranks. Tensors are in the order of the first rank that names them, then of that rank's list.
  // REQUIRES: `all` is in order of each entry's first rank. INVALID_ARGUMENT (BAD_SPEC) if ranks give one name to
  // different tensors.
  static absl::StatusOr<TensorUnion> Make(absl::Span<const NamedAlike> all);

  const std::vector<v1::TensorSpec>& tensors() const { return tensors_; }
  // Adds the placements of `open`'s live tensors, except for names in the union.
  void AddPlacementsOf(const v1::OpenRequest& open, const model::Layout& layout);
  // DIVISION_PLACED. REQUIRES: the union has a placement of each live tensor of `layout`.
  v1::Tiling TilingOf(const model::Layout& layout, uint32_t world_size) const;

 private:
  std::vector<v1::TensorSpec> tensors_;
  absl::flat_hash_map<std::string, v1::Placement> placements_;  // by name of tensor
};

// The same placement with fewer meshes: meshes with equal axes and cuts, whose first ranks lie at equal distances,
// become one mesh with one more axis.
v1::Placement Fold(v1::Placement placement);

}  // namespace ballast::client
