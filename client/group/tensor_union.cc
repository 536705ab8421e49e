#include "ballast/client/group/tensor_union.h"

#include <algorithm>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ballast/client/group/job_spec.h"
#include "ballast/proto/base/status.h"

namespace ballast::client {
namespace {

// Adds placements once each, and finds their indices.
class PlacementTable {
 public:
  explicit PlacementTable(v1::Tiling* tiling) : tiling_(tiling) {}
  uint32_t IndexOf(const v1::Placement& placement) {
    const auto [it, is_new] =
        indices_.try_emplace(placement.SerializeAsString(), static_cast<uint32_t>(tiling_->placements_size()));
    if (is_new) *tiling_->add_placements() = placement;
    return it->second;
  }

 private:
  v1::Tiling* const tiling_;
  absl::flat_hash_map<std::string, uint32_t> indices_;
};

v1::MeshCuts WithAxis(v1::MeshCuts part, uint32_t size, uint32_t stride) {
  const v1::Mesh inner = part.mesh();
  v1::Mesh& mesh = *part.mutable_mesh();
  mesh.clear_size();
  mesh.clear_stride();
  mesh.add_size(size);
  mesh.add_stride(stride);
  mesh.MergeFrom([&] {
    v1::Mesh rest = inner;
    rest.clear_first();
    return rest;
  }());
  for (v1::Cut& cut : *part.mutable_cuts()) cut.set_axis(cut.axis() + 1);
  return part;
}

// One pass of Fold. Returns whether the placement has fewer meshes now.
bool FoldOnce(v1::Placement* placement) {
  std::map<std::string, std::vector<v1::MeshCuts>> alike;  // but for the first rank
  for (const v1::MeshCuts& part : placement->meshes()) {
    v1::MeshCuts shape = part;
    shape.mutable_mesh()->clear_first();
    alike[shape.SerializeAsString()].push_back(part);
  }
  const int before = placement->meshes_size();
  placement->clear_meshes();
  for (auto& [shape, parts] : alike) {
    std::sort(parts.begin(), parts.end(),
              [](const auto& a, const auto& b) { return a.mesh().first() < b.mesh().first(); });
    const auto distance = [&parts = parts](size_t i) { return parts[i + 1].mesh().first() - parts[i].mesh().first(); };
    for (size_t first = 0; first < parts.size();) {
      size_t last = first;
      while (parts[first].mesh().ranks_size() == 0 && last + 1 < parts.size() && distance(last) == distance(first)) {
        ++last;
      }
      *placement->add_meshes() = last == first
                                     ? parts[first]
                                     : WithAxis(parts[first], static_cast<uint32_t>(last - first + 1), distance(first));
      first = last + 1;
    }
  }
  return placement->meshes_size() < before;
}

}  // namespace

v1::Placement Fold(v1::Placement placement) {
  while (FoldOnce(&placement)) {
  }
  return placement;
}

v1::OpenRequest Named(const v1::JobSpec& spec, const std::vector<TensorSpec>& tensors) {
  v1::OpenRequest named;
  *named.mutable_spec() = spec;
  PlacementTable table(named.mutable_tiling());
  for (const TensorSpec& tensor : tensors) {
    v1::Placement placement;
    if (tensor.placement.has_value()) *placement.add_meshes() = *tensor.placement;
    named.mutable_tiling()->add_placement_of(table.IndexOf(placement));
  }
  return named;
}

absl::StatusOr<TensorUnion> TensorUnion::Make(absl::Span<const NamedAlike> all) {
  TensorUnion made;
  struct Known {
    size_t place = 0;                            // in the union
    const NamedAlike* first;                     // to name it
    std::map<std::string, v1::MeshCuts> meshes;  // by their bytes
  };
  absl::flat_hash_map<std::string, Known> known;
  for (const NamedAlike& alike : all) {
    v1::Placement alone;
    for (const uint32_t rank : alike.ranks) alone.add_meshes()->mutable_mesh()->set_first(rank);
    alone = Fold(std::move(alone));
    const v1::Tiling& tiling = alike.named.tiling();
    const auto& tensors = alike.named.spec().registrations(0).tensors();
    for (int i = 0; i < tensors.size(); ++i) {
      const auto [it, is_new] = known.try_emplace(tensors[i].name(), Known{made.tensors_.size(), &alike, {}});
      Known& tensor = it->second;
      if (is_new) {
        made.tensors_.push_back(tensors[i]);
      } else if (tensor.first == &alike) {
        return BadSpec(absl::StrCat("rank ", alike.ranks[0], " names tensor '", tensors[i].name(), "' twice"));
      } else if (const v1::TensorSpec& first = made.tensors_[tensor.place]; Show(first) != Show(tensors[i])) {
        return BadSpec(absl::StrCat("tensor '", tensors[i].name(), "' differs: rank ", tensor.first->ranks[0], " has ",
                                    Show(first), ", rank ", alike.ranks[0], " has ", Show(tensors[i]),
                                    "; give different tensors different names"));
      }
      if (made.tensors_[tensor.place].frozen() != tensors[i].frozen()) {
        return BadSpec(absl::StrCat("tensor '", tensors[i].name(), "' is ", v1::Frozen_Name(tensors[i].frozen()),
                                    " on rank ", alike.ranks[0], " and ",
                                    v1::Frozen_Name(made.tensors_[tensor.place].frozen()), " on rank ",
                                    tensor.first->ranks[0], "; expected the same on all ranks"));
      }
      if (made.tensors_[tensor.place].assist() != tensors[i].assist()) {
        return BadSpec(absl::StrCat("tensor '", tensors[i].name(), "' is ", Who(tensors[i].assist()), " on rank ",
                                    alike.ranks[0], " and ", Who(made.tensors_[tensor.place].assist()), " on rank ",
                                    tensor.first->ranks[0], "; expected the same on all ranks"));
      }
      const v1::Placement& said = tiling.placements(static_cast<int>(tiling.placement_of(i)));
      for (const v1::MeshCuts& part : (said.meshes().empty() ? alone : said).meshes()) {
        tensor.meshes.try_emplace(part.SerializeAsString(), part);
      }
    }
  }
  for (auto& [name, tensor] : known) {
    v1::Placement placement;
    for (auto& [bytes, part] : tensor.meshes) *placement.add_meshes() = std::move(part);
    made.placements_[name] = Fold(std::move(placement));
  }
  return made;
}

void TensorUnion::AddPlacementsOf(const v1::OpenRequest& open, const model::Layout& layout) {
  for (const model::Tensor& tensor : layout.tensors()) {
    if (!layout.live(tensor.index)) continue;
    const uint32_t placement = open.tiling().placement_of(static_cast<int>(tensor.index));
    placements_.try_emplace(tensor.name, open.tiling().placements(static_cast<int>(placement)));
  }
}

v1::Tiling TensorUnion::TilingOf(const model::Layout& layout, uint32_t world_size) const {
  v1::Tiling tiling;
  tiling.set_world_size(world_size);
  tiling.set_division(v1::DIVISION_PLACED);
  PlacementTable table(&tiling);
  for (const model::Tensor& tensor : layout.tensors()) {
    tiling.add_placement_of(layout.live(tensor.index) ? table.IndexOf(placements_.at(tensor.name)) : 0);
  }
  return tiling;
}

}  // namespace ballast::client
