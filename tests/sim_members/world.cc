#include "ballast/tests/sim_members/world.h"

#include "absl/strings/str_cat.h"
#include "ballast/proto/model/protocol.h"
#include "ballast/proto/model/tiling.h"

namespace ballast::sim_members {
namespace {

constexpr uint64_t kChunkElements = 65536;

v1::JobSpec MakeSpec() {
  v1::JobSpec spec;
  spec.set_name(kJob);
  spec.set_chunk_elements(kChunkElements);
  spec.set_optimizer(v1::OPTIMIZER_ADAMW);
  spec.set_gradient_dtype(v1::DTYPE_BF16);
  spec.set_working_dtype(v1::DTYPE_BF16);
  spec.set_durability(v1::DURABILITY_STEP);
  spec.set_group_count(1);
  v1::Registration* const batch = spec.add_registrations();
  batch->set_version(-1);
  const auto add = [batch](const char* name, const char* unit, uint64_t elements) {
    v1::TensorSpec* const tensor = batch->add_tensors();
    tensor->set_name(name);
    tensor->set_unit(unit);
    tensor->add_shape(elements);
  };
  // Unit a takes two chunks, the second shared by two tensors; unit b one.
  add("a.weight", "a", kChunkElements + 512);
  add("a.bias", "a", 300);
  add("b.weight", "b", 700);
  return spec;
}

v1::OpenRequest MakeTemplate(uint32_t world_size) {
  v1::OpenRequest open;
  *open.mutable_spec() = Spec();
  *open.mutable_tiling() = model::EvenTiling(world_size);
  open.set_spec_digest(model::SpecDigest(Spec()));
  open.set_protocol_version(model::kProtocolVersion);
  return open;
}

}  // namespace

std::string ServerName(int server) { return std::string(1, static_cast<char>('A' + server)); }
int ServerOf(const std::string& id) { return id.size() == 1 && id[0] < 'A' + kServers ? id[0] - 'A' : -1; }

const v1::JobSpec& Spec() {
  static const auto* const spec = new v1::JobSpec(MakeSpec());
  return *spec;
}

const model::Layout& JobLayout() {
  static const auto* const layout = new model::Layout(*model::Layout::Make(Spec()));
  return *layout;
}

const v1::OpenRequest& OpenTemplate(uint32_t world_size) {
  static const auto* const opens = new std::vector<v1::OpenRequest>{MakeTemplate(1), MakeTemplate(2)};
  return (*opens)[world_size - 1];
}

uint64_t Intent::FinalAttempt(int64_t step) const { return Mix(seed, group, step, 1) % 10 < 7 ? 0 : 1; }

v1::StepHeader Intent::Header(int64_t step) const {
  const uint64_t chance = Mix(seed, 7, step, 2);
  const auto tensors = static_cast<uint64_t>(JobLayout().tensors().size());
  const uint64_t all = (1 << tensors) - 1;
  v1::StepHeader header;
  uint64_t gradients = 0, values = 0;
  if (step == 0) {
    values = all;
  } else if (chance % 8 == 0) {
    values = uint64_t{1} << (chance / 8 % tensors);
  } else {
    gradients = 1 + chance / 8 % all;
    if (chance / 64 % 4 == 0) values = uint64_t{1} << (chance / 256 % tensors);
  }
  header.set_kind(gradients == 0 ? v1::STEP_KIND_VALUES : v1::STEP_KIND_UPDATE);
  header.set_gradient_presence(std::string(1, static_cast<char>(gradients)));
  header.set_value_presence(std::string(1, static_cast<char>(values)));
  header.set_gradient_scale(1);
  if (gradients != 0) header.add_groups()->set_learning_rate(0.5);
  return header;
}

std::vector<std::string> Intent::Blobs(int64_t step) const {
  std::vector<std::string> blobs;
  for (uint32_t rank = 0; rank < world_size; ++rank) blobs.push_back(absl::StrCat(step, "/", rank));
  return blobs;
}

uint32_t Intent::Digest(int64_t step, uint64_t attempt, v1::SliceKind kind, const model::Slice& slice) const {
  const uint64_t place = slice.rank + 10 * slice.unit + 100 * static_cast<uint64_t>(kind) + 1000 * slice.range.begin;
  return static_cast<uint32_t>(Mix(seed, group, step, attempt, place) >> 32) | 1;
}

uint64_t Evolve(uint64_t content, int64_t step, uint64_t digests, const v1::Verdict& verdict) {
  return verdict.skip() || digests == 0 ? content : Mix(content, step, digests, verdict.factor_bits());
}

}  // namespace ballast::sim_members
