#include "ballast/tests/sim/intent.h"

#include <map>

#include "absl/strings/str_cat.h"
#include "ballast/proto/model/protocol.h"
#include "ballast/proto/model/step_header.h"
#include "ballast/proto/model/tiling.h"
#include "ballast/tests/sim/random.h"

namespace ballast::sim {
namespace {

constexpr uint64_t kChunkElements = 65536;

struct World {
  std::vector<v1::OpenRequest> templates;  // by world size - 1
  std::vector<model::EpochPlan> plans;
};

v1::OpenRequest MakeTemplate(uint32_t world_size, uint64_t pin_interval) {
  v1::OpenRequest open;
  v1::JobSpec* spec = open.mutable_spec();
  spec->set_name(kJob);
  spec->set_chunk_elements(kChunkElements);
  spec->set_optimizer(v1::OPTIMIZER_ADAMW);
  spec->set_gradient_dtype(v1::DTYPE_BF16);
  spec->set_working_dtype(v1::DTYPE_BF16);
  // To the step machine all but every-K are the same: what is kept is the log's matter.
  spec->set_durability(pin_interval > 0 ? v1::DURABILITY_EVERY_K : v1::DURABILITY_NONE);
  spec->set_pin_interval(pin_interval);
  spec->set_group_count(1);
  v1::Registration* batch = spec->add_registrations();
  batch->set_version(-1);
  const auto add = [batch](const char* name, const char* unit, uint64_t elements) {
    v1::TensorSpec* tensor = batch->add_tensors();
    tensor->set_name(name);
    tensor->set_unit(unit);
    tensor->add_shape(elements);
  };
  // Unit a takes two chunks, the second shared by two tensors; unit b one.
  add("a.weight", "a", kChunkElements + 512);
  add("a.bias", "a", 300);
  add("b.weight", "b", 700);
  for (int server = 0; server < kServers; ++server) {
    v1::Member* member = open.add_members();
    member->set_server_id(ServerName(server));
    member->set_weight(1);
  }
  *open.mutable_tiling() = model::EvenTiling(world_size);
  open.set_spec_digest(model::SpecDigest(*spec));
  open.set_protocol_version(model::kProtocolVersion);
  return open;
}

World*& TheWorld() {
  static World* world = nullptr;
  return world;
}

}  // namespace

void BeginWorld(uint64_t pin_interval) {
  static auto* const worlds = new std::map<uint64_t, World>;
  World& world = (*worlds)[pin_interval];
  for (uint32_t world_size = 1; world.plans.size() < kWorldSizeMax; ++world_size) {
    world.templates.push_back(MakeTemplate(world_size, pin_interval));
    world.plans.push_back(*model::EpochPlan::Make(world.templates.back()));
  }
  TheWorld() = &world;
}

std::string ServerName(int server) { return std::string(1, static_cast<char>('x' + server)); }

const v1::OpenRequest& OpenTemplate(uint32_t world_size) { return TheWorld()->templates[world_size - 1]; }
const model::EpochPlan& PlanOf(uint32_t world_size) { return TheWorld()->plans[world_size - 1]; }
uint64_t PinInterval() { return OpenTemplate(1).spec().pin_interval(); }

uint64_t GroupIntent::FinalAttempt(int64_t step) const {
  const uint64_t chance = Mix(seed, group, step, 1) % 10;
  return chance < 6 ? 0 : chance < 9 ? 1 : 2;
}

v1::StepHeader GroupIntent::Header(int64_t step, uint32_t rank) const {
  const uint64_t chance = Mix(seed, salted ? group + 1 : 0, step, 2);
  const uint32_t tensors = static_cast<uint32_t>(PlanOf(world_size).layout().tensors().size());
  const char all = static_cast<char>((1 << tensors) - 1);
  v1::StepHeader header;
  char gradients = 0;
  char values = 0;
  if (step == 0) {
    values = all;
  } else if (chance % 8 == 0) {
    values = static_cast<char>(1 << (chance / 8 % tensors));
  } else {
    gradients = static_cast<char>(1 + chance / 8 % static_cast<uint64_t>(all));
    if (chance / 64 % 4 == 0) values = static_cast<char>(1 << (chance / 256 % tensors));
  }
  if (step == restore_at) {
    header.set_kind(v1::STEP_KIND_RESTORE);
    header.set_restored_version(restored);
    header.set_gradient_presence(std::string(1, '\0'));
    header.set_value_presence(std::string(1, '\0'));
    header.set_gradient_scale(Mismatched(step) && rank == 1 ? 2 : 1);
    return header;
  }
  header.set_kind(gradients == 0 ? v1::STEP_KIND_VALUES : v1::STEP_KIND_UPDATE);
  if (gradients == 0 && step > 0) ChooseArray(chance, tensors, &header);
  header.set_gradient_presence(std::string(1, gradients));
  header.set_value_presence(std::string(1, values));
  if (gradients != 0) {
    v1::GroupHyper* hyper = header.add_groups();
    hyper->set_learning_rate(0.5 / static_cast<double>(step));
    hyper->set_beta2(0.5);
    header.set_max_norm(static_cast<double>(chance / 1024 % 2));
  }
  header.set_gradient_scale(Mismatched(step) && rank == 1 ? 2 : 1);
  return header;
}

std::vector<std::string> GroupIntent::Blobs(int64_t step) const {
  if (step == restore_at) return restored_blobs;
  std::vector<std::string> blobs;
  for (uint32_t rank = 0; rank < world_size; ++rank) {
    blobs.push_back(absl::StrCat(salted ? group + 1 : 0, "/", step, "/", rank));
  }
  return blobs;
}

std::string GroupIntent::Hash(int64_t step, uint32_t rank) const {
  return model::PlanHash(PlanOf(world_size), step, FinalAttempt(step), Header(step, rank), Blobs(step));
}

uint32_t GroupIntent::Digest(int64_t step, uint64_t attempt, v1::SliceKind kind, const model::Slice& slice,
                             uint32_t life) const {
  const uint64_t place = slice.rank + 10 * slice.unit + 100 * static_cast<uint64_t>(kind) + 1000 * slice.range.begin;
  return static_cast<uint32_t>(Mix(seed, group + 1000 * life, step, attempt, place) >> 32) | 1;
}

v1::ChunkNorm NormOf(const model::EpochPlan& plan, uint64_t chunk, absl::string_view presence,
                     absl::FunctionRef<uint32_t(const model::Slice&)> digest) {
  v1::ChunkNorm norm;
  norm.set_chunk(chunk);
  const model::Chunk& layout = plan.layout().chunks()[chunk];
  for (const model::Segment& segment : layout.segments) {
    if (!model::HasBit(presence, segment.tensor)) continue;
    v1::SegmentNorm* part = norm.add_segments();
    part->set_tensor(segment.tensor);
    double sum = 0;
    for (const uint32_t index : plan.slices_of_chunk(chunk)) {
      const model::Slice& slice = plan.slices()[index];
      const model::Range in_chunk{slice.range.begin - layout.range.begin, slice.range.end - layout.range.begin};
      if (model::Intersect(in_chunk, segment.in_chunk).size() == 0) continue;
      const uint32_t bits = digest(slice);
      if (bits % 64 == 5) norm.set_overflow(true);
      sum += static_cast<double>(bits >> 8) + segment.tensor;
    }
    part->set_squared_norm(sum);
  }
  return norm;
}

}  // namespace ballast::sim
