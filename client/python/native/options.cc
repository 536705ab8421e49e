#include "ballast/client/python/native/options.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdio>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "ballast/client/python/native/status_error.h"
#include "ballast/client/tensors.h"
#include "ballast/proto/model/names.h"
#include "ballast/proto/model/optimizer.h"
#include "ballast/proto/model/placement.h"

namespace ballast::python {
namespace {

namespace nb = nanobind;
using client::Content;
using client::Resume;
using kernels::OptimizerSpec;
using nb::literals::operator""_a;

template <typename Value>
using Names = std::vector<std::pair<const char*, Value>>;

// The entry of that name; else BAD_CONFIG, naming all.
template <typename Value>
Value Named(const char* what, const std::string& name, const Names<Value>& all) {
  std::vector<std::string> names;
  for (const auto& [known, value] : all) {
    if (name == known) return value;
    names.emplace_back(*known == '\0' ? "''" : known);
  }
  throw StatusError(model::Error(absl::StatusCode::kInvalidArgument, model::kBadConfig,
                                 absl::StrCat(what, " '", name, "': expected one of ", absl::StrJoin(names, ", "))));
}

template <typename Value>
std::string NameIn(Value value, const Names<Value>& all) {
  for (const auto& [name, its] : all) {
    if (its == value) return name;
  }
  return "";
}

const Names<Resume> kResume = {{"never", Resume::kNever}, {"auto", Resume::kAuto}, {"must", Resume::kMust}};
const Names<v1::Assist> kAssist = {
    {"", v1::ASSIST_UNSPECIFIED}, {"update", v1::ASSIST_UPDATE}, {"state", v1::ASSIST_STATE}};
const Names<v1::Frozen> kFrozen = {
    {"", v1::FROZEN_UNSPECIFIED}, {"working", v1::FROZEN_WORKING}, {"q8", v1::FROZEN_Q8}};

// The mesh by strides, if its ranks are a grid, else as a list.
v1::MeshCuts MeshCutsOf(const std::vector<uint32_t>& ranks, const std::vector<uint32_t>& sizes,
                        const std::vector<std::pair<uint32_t, uint32_t>>& cuts) {
  v1::MeshCuts part;
  v1::Mesh& mesh = *part.mutable_mesh();
  const size_t axes = sizes.size();
  uint64_t behind = 1;
  std::vector<uint32_t> strides(axes, 0);
  for (size_t axis = axes; axis-- > 0; behind *= sizes[axis]) {
    // Ranks that descend make no grid: the comparison below finds that.
    if (sizes[axis] > 1 && behind < ranks.size() && ranks[behind] > ranks[0]) strides[axis] = ranks[behind] - ranks[0];
  }
  for (const uint32_t size : sizes) mesh.add_size(size);
  if (!ranks.empty()) mesh.set_first(ranks[0]);
  for (const uint32_t stride : strides) mesh.add_stride(stride);
  if (model::RanksOf(mesh) != ranks) {
    mesh.clear_first();
    mesh.clear_stride();
    for (const uint32_t rank : ranks) mesh.add_ranks(rank);
  }
  for (const auto& [axis, dimension] : cuts) {
    v1::Cut* cut = part.add_cuts();
    cut->set_axis(axis);
    cut->set_dimension(dimension);
  }
  return part;
}

// Begin and end of each dimension of the part of a tensor that the rank at `place` of the placement's ranks has.
std::vector<std::pair<uint64_t, uint64_t>> BoxOf(const v1::MeshCuts& part, const std::vector<uint64_t>& shape,
                                                 uint64_t place) {
  Check(model::CheckMesh(part, model::kRanksMax));
  std::vector<std::pair<uint64_t, uint64_t>> box;
  for (const model::Range& range : Take(model::BoxAt(part, shape, place))) box.emplace_back(range.begin, range.end);
  return box;
}

// A property that Python reads and writes as a name; setting another throws BAD_CONFIG.
template <typename Class, typename Value>
void Property(nb::class_<Class>& of, const char* name, Value Class::*field,
              absl::StatusOr<Value> (*named)(const std::string&)) {
  of.def_prop_rw(
      name, [field](const Class& object) { return std::string(model::NameOf(object.*field)); },
      [field, named](Class& object, const std::string& text) { object.*field = Take(named(text)); });
}

void BindOptimizer(nb::module_& m) {
  nb::class_<client::GroupHyper>(m, "GroupHyper")
      .def(nb::init<>())
      .def_rw("learning_rate", &client::GroupHyper::learning_rate)
      .def_rw("beta1", &client::GroupHyper::beta1)
      .def_rw("beta2", &client::GroupHyper::beta2)
      .def_rw("epsilon", &client::GroupHyper::epsilon)
      .def_rw("weight_decay", &client::GroupHyper::weight_decay)
      .def_rw("dampening", &client::GroupHyper::dampening)
      .def_rw("learning_rate_decay", &client::GroupHyper::learning_rate_decay)
      .def_rw("initial_accumulator", &client::GroupHyper::initial_accumulator)
      .def_rw("maximize", &client::GroupHyper::maximize)
      .def_rw("beta3", &client::GroupHyper::beta3)
      .def_rw("alpha", &client::GroupHyper::alpha)
      .def_rw("average", &client::GroupHyper::average);
  nb::class_<OptimizerSpec> optimizer(m, "Optimizer");
  optimizer.def("__init__", [](OptimizerSpec* spec) { new (spec) OptimizerSpec(OpenOptions().optimizer); })
      .def_rw("amsgrad", &OptimizerSpec::amsgrad)
      .def_rw("momentum", &OptimizerSpec::momentum)
      .def_rw("nesterov", &OptimizerSpec::nesterov);
  Property(optimizer, "kind", &OptimizerSpec::kind, &model::OptimizerNamed);
  Property(optimizer, "moments", &OptimizerSpec::moments, &model::MomentsNamed);
  Property(optimizer, "master", &OptimizerSpec::master, &model::MasterNamed);
  Property(optimizer, "gradient", &OptimizerSpec::gradient, &model::DtypeNamed);
  Property(optimizer, "working", &OptimizerSpec::working, &model::DtypeNamed);
}

void BindOpenOptions(nb::module_& m) {
  nb::class_<model::Access>(m, "Access")
      .def(nb::init<>())
      .def_rw("ca", &model::Access::ca)
      .def_rw("certificate", &model::Access::certificate)
      .def_rw("key", &model::Access::key)
      .def_rw("token_file", &model::Access::token_file);
  nb::class_<OpenOptions>(m, "OpenOptions")
      .def(nb::init<>())
      .def_rw("job", &OpenOptions::job)
      .def_prop_rw(
          "resume", [](const OpenOptions& options) { return NameIn(options.resume, kResume); },
          [](OpenOptions& options, const std::string& name) { options.resume = Named("resume", name, kResume); })
      .def_prop_rw(
          "durability", [](const OpenOptions& options) { return std::string(model::NameOf(options.durability)); },
          [](OpenOptions& options, const std::string& name) {
            options.durability = Take(model::DurabilityNamed(name));
          })
      .def_rw("pin_interval", &OpenOptions::pin_interval)
      .def_rw("optimizer", &OpenOptions::optimizer)
      .def_rw("group_count", &OpenOptions::group_count)
      .def_rw("chunk_elements", &OpenOptions::chunk_elements)
      .def_rw("seed", &OpenOptions::seed)
      .def_rw("replicas", &OpenOptions::replicas)
      // Each rank has the parts of tensors that their placements say, not whole tensors.
      .def_prop_rw(
          "placed", [](const OpenOptions& options) { return options.split == client::Split::kPlaced; },
          [](OpenOptions& options, bool placed) {
            options.split = placed ? client::Split::kPlaced : client::Split::kEven;
          })
      .def_rw("servers", &OpenOptions::servers)
      .def_rw("access", &OpenOptions::access)
      .def_rw("rank", &OpenOptions::rank)
      .def_rw("world_size", &OpenOptions::world_size)
      .def_rw("host", &OpenOptions::host)
      .def_prop_rw(
          "step_timeout", [](const OpenOptions& options) { return absl::ToDoubleSeconds(options.step_timeout); },
          [](OpenOptions& options, double seconds) { options.step_timeout = absl::Seconds(seconds); })
      .def_prop_rw(
          "open_timeout", [](const OpenOptions& options) { return absl::ToDoubleSeconds(options.open_timeout); },
          [](OpenOptions& options, double seconds) { options.open_timeout = absl::Seconds(seconds); })
      .def_prop_rw(
          "failover_after", [](const OpenOptions& options) { return absl::ToDoubleSeconds(options.failover_after); },
          [](OpenOptions& options, double seconds) { options.failover_after = absl::Seconds(seconds); });
}

void BindTensor(nb::module_& m) {
  nb::class_<v1::MeshCuts>(m, "Placement")
      .def(
          "__init__",
          [](v1::MeshCuts* placement, const std::vector<uint32_t>& ranks, const std::vector<uint32_t>& sizes,
             const std::vector<std::pair<uint32_t, uint32_t>>& cuts) {
            new (placement) v1::MeshCuts(MeshCutsOf(ranks, sizes, cuts));
          },
          "ranks"_a, "sizes"_a, "cuts"_a)
      .def("box", &BoxOf, "shape"_a, "place"_a);
  nb::class_<client::TensorSpec>(m, "Tensor")
      .def(
          "__init__",
          [](client::TensorSpec* tensor, std::string name, std::string unit, std::vector<uint64_t> shape,
             uint32_t group) {
            new (tensor) client::TensorSpec{
                .name = std::move(name), .unit = std::move(unit), .shape = std::move(shape), .group = group};
          },
          "name"_a, "unit"_a, "shape"_a, "group"_a)
      .def_rw("name", &client::TensorSpec::name)
      .def_rw("unit", &client::TensorSpec::unit)
      .def_rw("shape", &client::TensorSpec::shape)
      .def_rw("group", &client::TensorSpec::group)
      .def_rw("placement", &client::TensorSpec::placement)
      .def_prop_rw(
          "parts",
          [](const client::TensorSpec& tensor) { return std::pair(tensor.parts.dimension, tensor.parts.count); },
          [](client::TensorSpec& tensor, std::pair<uint32_t, uint32_t> parts) {
            tensor.parts = {parts.first, parts.second};
          })
      .def_prop_rw(
          "frozen", [](const client::TensorSpec& tensor) { return NameOf(tensor.frozen); },
          [](client::TensorSpec& tensor, const std::string& name) { tensor.frozen = Named("frozen", name, kFrozen); })
      .def_prop_rw(
          "assist", [](const client::TensorSpec& tensor) { return NameIn(tensor.assist, kAssist); },
          [](client::TensorSpec& tensor, const std::string& name) { tensor.assist = Named("assist", name, kAssist); });
}

void BindReports(nb::module_& m) {
  // decided_by: counter and nonce of an epoch, (0, 0) if not known.
  nb::class_<client::KeptVersion>(m, "KeptVersion")
      .def(
          "__init__",
          [](client::KeptVersion* kept, int64_t version, uint64_t life, std::pair<uint64_t, uint64_t> decided_by) {
            new (kept) client::KeptVersion{.version = version, .life = life};
            kept->decided_by.set_counter(decided_by.first);
            kept->decided_by.set_nonce(decided_by.second);
          },
          "version"_a, "life"_a = 0, "decided_by"_a = std::pair<uint64_t, uint64_t>(0, 0))
      .def_ro("version", &client::KeptVersion::version)
      .def_ro("life", &client::KeptVersion::life)
      .def_prop_ro("decided_by", [](const client::KeptVersion& kept) {
        return std::pair(kept.decided_by.counter(), kept.decided_by.nonce());
      });
  nb::class_<client::TensorsReport>(m, "Report")
      .def_prop_ro("version", [](const client::TensorsReport& report) { return report.step.version; })
      .def_prop_ro("skipped", [](const client::TensorsReport& report) { return report.step.skipped; })
      .def_prop_ro("norm", [](const client::TensorsReport& report) { return report.step.norm; })
      .def_ro("push_seconds", &client::TensorsReport::push_seconds)
      .def_ro("seal_seconds", &client::TensorsReport::seal_seconds)
      .def_ro("pull_seconds", &client::TensorsReport::pull_seconds);
}

}  // namespace

OpenOptions::OpenOptions() {
  durability = v1::DURABILITY_NONE;
  optimizer.gradient = optimizer.working = kernels::Dtype::kF32;
  says_whether_new = false;  // ballast.torch does, in steps
  progress = [](const std::string& line) { std::fprintf(stderr, "ballast: %s\n", line.c_str()); };
}

Content ContentNamed(const std::string& name) {
  static const Names<Content> all = {{"working", Content::kWorking},
                                     {"master", Content::kMaster},
                                     {"moment1", Content::kMoment1},
                                     {"moment2", Content::kMoment2},
                                     {"moment3", Content::kMoment3}};
  return Named("content", name, all);
}

std::string NameOf(v1::Frozen frozen) { return NameIn(frozen, kFrozen); }

void BindOptions(nb::module_& m) {
  BindOptimizer(m);
  BindOpenOptions(m);
  BindTensor(m);
  BindReports(m);
}

}  // namespace ballast::python
