// tests/sim/intent.h for a job with durability `step` or every-K whose slices have bits.
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <unordered_map>

#include "absl/strings/str_cat.h"
#include "ballast/kernels/kernels.h"
#include "ballast/proto/model/protocol.h"
#include "ballast/proto/model/step_header.h"
#include "ballast/proto/model/tiling.h"
#include "ballast/tests/sim/random.h"
#include "ballast/tests/sim_server/bits.h"

namespace ballast::sim {
namespace {

constexpr uint32_t kABias = 1, kBWeight = 2;  // of kEditedElementsMax or less, with their neighbours in the chunk

struct World {
  bool large = false;
  std::vector<v1::OpenRequest> templates;  // by world size - 1
  std::vector<model::EpochPlan> plans;
  std::unordered_map<uint32_t, Payload> payloads;
  std::map<std::vector<uint64_t>, uint32_t> digests;
};

// All servers have all there is of their shards, for good.
v1::Table MakeTable() {
  v1::Table table;
  for (int server = 0; server < kServers; ++server) {
    v1::Member* member = table.add_members();
    member->set_server_id(ServerName(server));
    member->set_weight(1);
    member->set_disk(DiskOf(server));
    table.add_shards()->add_holders(static_cast<uint32_t>(server));
  }
  table.set_replicas(1);
  table.set_life(5);
  return table;
}

v1::OpenRequest MakeTemplate(uint32_t world_size, v1::MomentFormat moments, bool large, uint64_t pin_interval,
                             bool table) {
  v1::OpenRequest open;
  v1::JobSpec* spec = open.mutable_spec();
  spec->set_name(kJob);
  spec->set_chunk_elements(model::kChunkElementsMin);
  spec->set_optimizer(v1::OPTIMIZER_ADAMW);
  spec->set_gradient_dtype(v1::DTYPE_BF16);
  spec->set_working_dtype(v1::DTYPE_BF16);
  spec->set_moment_format(moments);
  spec->set_seed(99);
  spec->set_durability(pin_interval > 0 ? v1::DURABILITY_EVERY_K : v1::DURABILITY_STEP);
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
  // Unit a's last chunk is shared by two tensors.
  add("a.weight", "a", (large ? 12 : 1) * model::kChunkElementsMin + 256);
  add("a.bias", "a", 300);
  add("b.weight", "b", 700);
  add("c.weight", "c", 3000);
  add("d.weight", "d", 9000);
  add("d.bias", "d", 100);
  add("e.weight", "e", 5000);
  if (table) *open.mutable_table() = MakeTable();
  for (int server = 0; server < kServers && !table; ++server) {
    v1::Member* member = open.add_members();
    member->set_server_id(ServerName(server));
    member->set_weight(1);
  }
  *open.mutable_tiling() = model::EvenTiling(world_size);
  open.set_spec_digest(model::SpecDigest(*spec));
  open.set_protocol_version(model::kProtocolVersion);
  return open;
}

World& TheWorld() {
  static World world;
  return world;
}

float Uniform(uint32_t bits) { return static_cast<float>(static_cast<int32_t>(bits)) * 0x1p-31f; }

// Padding is filled too: servers must not look at it.
Payload MakePayload(uint64_t seed, v1::SliceKind kind, uint64_t elements, bool magnitudes) {
  Random random(seed);
  std::vector<float> values(elements);
  for (uint64_t i = 0; i < elements; i += 2) {
    const uint64_t bits = random.Next();
    values[i] = Uniform(static_cast<uint32_t>(bits));
    if (i + 1 < elements) values[i + 1] = Uniform(static_cast<uint32_t>(bits >> 32));
  }
  if (magnitudes) {
    for (float& value : values) value = std::fabs(value);
  }
  const bool value = kind == v1::SLICE_KIND_VALUE;
  if (!value && random.Below(64) == 5) values[random.Below(elements)] = std::numeric_limits<float>::infinity();
  auto payload = std::make_shared<std::vector<std::byte>>(elements * (value ? 4 : 2));
  kernels::FromF32(values, value ? kernels::Dtype::kF32 : kernels::Dtype::kBf16, payload->data());
  return payload;
}

}  // namespace

void BeginWorld(v1::MomentFormat moments, bool large, uint64_t pin_interval, bool table) {
  World& world = TheWorld();
  if (world.templates.empty() || world.large != large || world.templates[0].spec().moment_format() != moments ||
      world.templates[0].spec().pin_interval() != pin_interval || world.templates[0].has_table() != table) {
    world.large = large;
    world.templates = {MakeTemplate(1, moments, large, pin_interval, table),
                       MakeTemplate(2, moments, large, pin_interval, table)};
    world.plans = {*model::EpochPlan::Make(world.templates[0]), *model::EpochPlan::Make(world.templates[1])};
  }
  world.payloads.clear();
  world.digests.clear();
}

Payload PayloadOf(uint32_t digest) {
  const auto found = TheWorld().payloads.find(digest);
  return found == TheWorld().payloads.end() ? nullptr : found->second;
}

uint64_t PinInterval() { return OpenTemplate(1).spec().pin_interval(); }
std::string ServerName(int server) { return std::string(1, static_cast<char>('x' + server)); }
const v1::OpenRequest& OpenTemplate(uint32_t world_size) { return TheWorld().templates[world_size - 1]; }
const model::EpochPlan& PlanOf(uint32_t world_size) { return TheWorld().plans[world_size - 1]; }

uint64_t GroupIntent::FinalAttempt(int64_t step) const {
  if (one_attempt) return 0;
  const uint64_t chance = Mix(seed, family, step, 1) % 10;
  return chance < 7 ? 0 : chance < 9 ? 1 : 2;
}

v1::StepHeader GroupIntent::Header(int64_t step, uint32_t rank) const {
  const uint64_t chance = Mix(seed, salted ? family + 1 : 0, step, 2);
  const uint32_t tensors = static_cast<uint32_t>(PlanOf(world_size).layout().tensors().size());
  const char all = static_cast<char>((1 << tensors) - 1);
  const char edited = static_cast<char>(1 << (chance / 256 % 2 == 0 ? kABias : kBWeight));
  v1::StepHeader header;
  char gradients = 0;
  char values = 0;
  if (step == 0) {
    values = all;
  } else if (chance % 8 == 0) {
    values = edited;
  } else {
    gradients = static_cast<char>(1 + chance / 8 % static_cast<uint64_t>(all));
    if (chance / 64 % 4 == 0) values = edited;
  }
  if (step == restore_at) {
    header.set_kind(v1::STEP_KIND_RESTORE);
    header.set_restored_version(restored);
    gradients = values = 0;
  } else {
    header.set_kind(gradients == 0 ? v1::STEP_KIND_VALUES : v1::STEP_KIND_UPDATE);
    if (gradients == 0 && step > 0) ChooseArray(chance, tensors, &header);
  }
  header.set_gradient_presence(std::string(1, gradients));
  header.set_value_presence(std::string(1, values));
  if (gradients != 0) {
    v1::GroupHyper* hyper = header.add_groups();
    hyper->set_learning_rate(0.5 / static_cast<double>(step));
    hyper->set_beta1(0.9);
    hyper->set_beta2(0.95);
    hyper->set_epsilon(1e-8);
    hyper->set_weight_decay(0.1);
    header.set_max_norm(static_cast<double>(chance / 1024 % 2));
  }
  header.set_gradient_scale(Mismatched(step) && rank == 1 ? 2 : 1);
  return header;
}

std::vector<std::string> GroupIntent::Blobs(int64_t step) const {
  if (step == restore_at) return restored_blobs;
  std::vector<std::string> blobs;
  for (uint32_t rank = 0; rank < world_size; ++rank) {
    blobs.push_back(absl::StrCat(salted ? family + 1 : 0, "/", step, "/", rank));
  }
  return blobs;
}

std::string GroupIntent::Hash(int64_t step, uint32_t rank) const {
  return model::PlanHash(PlanOf(world_size), step, FinalAttempt(step), Header(step, rank), Blobs(step));
}

uint32_t GroupIntent::Digest(int64_t step, uint64_t attempt, v1::SliceKind kind, const model::Slice& slice,
                             uint32_t life) const {
  World& world = TheWorld();
  const auto key = std::vector<uint64_t>{
      family, static_cast<uint64_t>(step), attempt, static_cast<uint64_t>(kind), slice.unit, slice.range.begin};
  const auto found = world.digests.find(key);
  if (found != world.digests.end()) return found->second;
  const uint64_t place = slice.unit + 10 * static_cast<uint64_t>(kind) + 100 * slice.range.begin;
  const bool second_moment = kind == v1::SLICE_KIND_VALUE && Header(step, 0).value_array() == 2;
  const Payload payload = MakePayload(Mix(seed, family, step, attempt, place), kind, slice.range.size(), second_moment);
  const uint32_t digest = kernels::Crc32c(*payload);
  world.payloads[digest] = payload;
  world.digests[key] = digest;
  return digest;
}

// As the servers compute it, from the bits.
v1::ChunkNorm NormOf(const model::EpochPlan& plan, uint64_t chunk, absl::string_view presence,
                     absl::FunctionRef<uint32_t(const model::Slice&)> digest) {
  v1::ChunkNorm norm;
  norm.set_chunk(chunk);
  const model::Chunk& layout = plan.layout().chunks()[chunk];
  std::vector<std::byte> gradient;
  for (const model::Segment& segment : layout.segments) {
    if (!model::HasBit(presence, segment.tensor)) continue;
    if (gradient.empty()) {
      gradient.resize(2 * layout.range.size());
      for (const uint32_t index : plan.slices_of_chunk(chunk)) {
        const model::Slice& slice = plan.slices()[index];
        const Payload payload = PayloadOf(digest(slice));
        std::memcpy(gradient.data() + 2 * (slice.range.begin - layout.range.begin), payload->data(), payload->size());
      }
    }
    const kernels::NormResult part = kernels::SquaredNorm(
        kernels::Dtype::kBf16, gradient.data() + 2 * segment.in_chunk.begin, segment.in_chunk.size());
    v1::SegmentNorm* out = norm.add_segments();
    out->set_tensor(segment.tensor);
    if (part.finite) {
      out->set_squared_norm(part.squared_norm);
    } else {
      norm.set_overflow(true);
    }
  }
  return norm;
}

}  // namespace ballast::sim
