#include "ballast/services/server/estimate.h"

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <future>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/model/epoch_plan.h"
#include "ballast/proto/model/optimizer.h"
#include "ballast/proto/model/protocol.h"
#include "ballast/proto/model/tiling.h"
#include "ballast/storage/placement/state_layout.h"

namespace ballast::services {
namespace {

class TemporaryDirectory {
 public:
  static absl::StatusOr<TemporaryDirectory> Make() {
    std::error_code error;
    std::string path = (std::filesystem::temp_directory_path(error) / "ballast-plan-XXXXXX").string();
    if (error || mkdtemp(path.data()) == nullptr) {
      return model::Error(absl::StatusCode::kInternal, model::kIo,
                          absl::StrCat("no temporary directory for the plan ('", path, "'); set TMPDIR"));
    }
    return TemporaryDirectory(path);
  }
  TemporaryDirectory(TemporaryDirectory&& other) noexcept : path_(std::exchange(other.path_, {})) {}
  ~TemporaryDirectory() {
    std::error_code ignored;
    if (!path_.empty()) std::filesystem::remove_all(path_, ignored);
  }
  const std::string& path() const { return path_; }

 private:
  explicit TemporaryDirectory(std::string path) : path_(std::move(path)) {}
  std::string path_;
};

constexpr uint32_t kServersMax = 1 << 12;

template <typename Response, typename Call>
absl::StatusOr<Response> Await(const Call& call) {
  std::promise<absl::StatusOr<Response>> answered;
  call([&](absl::StatusOr<Response> answer) { answered.set_value(std::move(answer)); });
  return answered.get_future().get();
}

std::string MemberName(uint32_t i) { return absl::StrCat("server-", i); }

// The member with most elements, and their number.
std::pair<uint32_t, uint64_t> Fullest(const model::EpochPlan& plan) {
  std::vector<uint64_t> elements(static_cast<size_t>(plan.members().size()));
  for (const model::Chunk& chunk : plan.layout().chunks()) {
    for (const uint32_t holder : plan.holders_of(chunk.index)) elements[holder] += chunk.range.size();
  }
  const auto most = std::max_element(elements.begin(), elements.end());
  return {static_cast<uint32_t>(most - elements.begin()), *most};
}

absl::StatusOr<v1::OpenResponse> AskServer(const StateServerOptions& like, const v1::OpenRequest& open,
                                           const std::string& id) {
  BALLAST_ASSIGN_OR_RETURN(const TemporaryDirectory directory, TemporaryDirectory::Make());
  StateServerOptions options = like;
  options.data_directory = directory.path();
  options.server_id = id;
  BALLAST_ASSIGN_OR_RETURN(const auto server, StateServer::Start(options));
  v1::FenceRequest fence;
  fence.set_job(open.spec().name());
  *fence.mutable_epoch() = open.epoch();
  fence.set_protocol_version(model::kProtocolVersion);
  BALLAST_RETURN_IF_ERROR(
      Await<v1::FenceResponse>([&](auto reply) { server->Fence(fence, absl::InfiniteFuture(), reply); }).status());
  return Await<v1::OpenResponse>([&](auto reply) { server->Open(open, absl::InfiniteFuture(), reply); });
}

uint64_t Share(uint64_t bytes, uint64_t ranks) { return (bytes + ranks - 1) / ranks; }

std::string Show(uint64_t bytes) { return absl::StrFormat("%.2f GiB", static_cast<double>(bytes) / (1 << 30)); }

std::string Row(const std::string& what, const TrainerBytes& bytes) {
  return absl::StrFormat("  %-42s %11s %11s %11s %11s\n", what, Show(bytes.parameters), Show(bytes.gradients),
                         Show(bytes.optimizer), Show(bytes.all()));
}

}  // namespace

absl::StatusOr<Estimate> EstimateJob(const EstimateRequest& request) {
  if (request.ranks < 1 || request.servers < 1) {
    return model::Error(
        absl::StatusCode::kInvalidArgument, model::kBadConfig,
        absl::StrCat("expected at least one rank and one server, got ", request.ranks, " and ", request.servers));
  }
  uint64_t tensors = 0;
  for (const v1::Registration& registration : request.spec.registrations()) {
    tensors += static_cast<uint64_t>(registration.tensors_size());
  }
  if (request.ranks > model::kRanksMax || request.servers > kServersMax ||
      request.ranks * tensors > model::kRangesMax) {
    return model::Error(absl::StatusCode::kInvalidArgument, model::kBadConfig,
                        absl::StrCat("expected at most ", model::kRanksMax, " ranks, ", kServersMax, " servers and ",
                                     model::kRangesMax, " parts of tensors, got ", request.ranks, ", ", request.servers,
                                     " and ", request.ranks * tensors));
  }
  v1::OpenRequest open;
  open.mutable_epoch()->set_counter(1);
  open.mutable_epoch()->set_nonce(1);
  open.set_base(-1);
  open.set_dry_run(true);
  *open.mutable_spec() = request.spec;
  open.set_spec_digest(model::SpecDigest(request.spec));
  open.set_protocol_version(model::kProtocolVersion);
  BALLAST_ASSIGN_OR_RETURN(const kernels::OptimizerSpec optimizer, model::OptimizerOf(request.spec));
  BALLAST_ASSIGN_OR_RETURN(const model::Layout layout, model::Layout::Make(request.spec));
  *open.mutable_tiling() = model::EvenTiling(request.ranks);
  for (uint32_t i = 0; i < request.servers; ++i) {
    v1::Member* member = open.add_members();
    member->set_server_id(MemberName(i));
    member->set_weight(1);
  }
  BALLAST_ASSIGN_OR_RETURN(const model::EpochPlan plan, model::EpochPlan::Make(open));

  Estimate estimate;
  uint64_t trained = 0, assisted = 0;
  for (const model::Tensor& tensor : layout.tensors()) {
    if (tensor.assist == v1::ASSIST_STATE) continue;  // no parameter
    estimate.parameters += tensor.range.size();
    if (tensor.frozen == v1::FROZEN_UNSPECIFIED) trained += tensor.range.size();
    if (tensor.assist == v1::ASSIST_UPDATE) assisted += tensor.range.size();
  }
  // Trainers decode blocks of f8 to bf16.
  const bool decodes = kernels::GrainOf(optimizer.working) > 1;
  const uint64_t working = kernels::ElementBytes(decodes ? kernels::Dtype::kBf16 : optimizer.working),
                 gradient = kernels::ElementBytes(optimizer.gradient);
  for (const model::Unit& unit : layout.units()) {
    estimate.largest_unit_bytes = std::max(estimate.largest_unit_bytes, unit.elements * working);
  }
  const uint64_t p = estimate.parameters, ranks = request.ranks;
  // Without servers an fp32 parameter is its own master.
  kernels::OptimizerSpec plain = optimizer;
  plain.master = plain.working == kernels::Dtype::kF32 ? kernels::MasterFormat::kLent : kernels::MasterFormat::kF32;
  // The trainer's optimizer has one fp32 array of an assisted parameter, as Muon's momentum, and its master.
  const uint64_t of_assisted = assisted * sizeof(float) * (plain.master == kernels::MasterFormat::kLent ? 1 : 2);
  const uint64_t state = storage::StateLayout(plain).StateBytes(trained - assisted) + of_assisted,
                 gradients = trained * gradient;
  estimate.whole = {p * working, gradients, 0};
  estimate.sharded = {Share(p * working, ranks), Share(gradients, ranks), 0};
  estimate.zero[0] = {p * working, gradients, state};
  estimate.zero[1] = {p * working, gradients, Share(state, ranks)};
  estimate.zero[2] = {p * working, Share(gradients, ranks), Share(state, ranks)};
  estimate.zero[3] = {Share(p * working, ranks), Share(gradients, ranks), Share(state, ranks)};

  const auto [fullest, elements] = Fullest(plan);
  estimate.server_parameters = elements;
  absl::StatusOr<v1::OpenResponse> answer = AskServer(request.server, open, MemberName(fullest));
  if (answer.ok()) {
    estimate.server = *std::move(answer);
  } else if (absl::IsResourceExhausted(answer.status())) {
    estimate.fits = answer.status();
  } else {
    return answer.status();
  }
  return estimate;
}

std::string Estimate::Explain(const EstimateRequest& request) const {
  const storage::TierBytes& budget = request.server.budget;
  std::string text =
      absl::StrFormat("%d parameters, %d rank(s), %d state server(s); the fullest of these has %d of them.\n",
                      parameters, request.ranks, request.servers, server_parameters);
  if (!fits.ok()) {
    absl::StrAppend(&text, "It does not fit: ", fits.message(), "\n");
  } else {
    absl::StrAppendFormat(&text, "\n  %-6s %11s %11s %11s %11s\n", "server", "state", "working", "other", "budget");
    for (const v1::PlannedTier& tier : server.tiers()) {
      const uint64_t of = tier.tier() == "hbm" ? budget.hbm : tier.tier() == "dram" ? budget.dram : budget.nvme;
      if (of == 0 && tier.state_bytes() == 0) continue;
      absl::StrAppendFormat(&text, "  %-6s %11s %11s %11s %11s\n", tier.tier(), Show(tier.state_bytes()),
                            Show(tier.working_bytes()), Show(tier.other_bytes()), Show(of));
    }
    absl::StrAppend(&text, "\n", server.plan(), "\n");
    if (!server.has_prediction()) {
      absl::StrAppend(&text, "No step time: there is no machine profile; `ballastctl iotune` writes one.\n");
    }
  }
  absl::StrAppendFormat(&text, "\n  %-42s %11s %11s %11s %11s\n", "each rank", "parameters", "gradients", "optimizer",
                        "all");
  absl::StrAppend(&text, Row("state on servers, parameters whole (DDP)", whole),
                  Row("state on servers, parameters sharded", sharded));
  for (int stage = 0; stage < 4; ++stage)
    absl::StrAppend(&text, Row(absl::StrCat("without: ZeRO stage ", stage), zero[stage]));
  if (request.ranks > 1) {
    absl::StrAppend(&text, "  Sharded parameters are gathered unit by unit: ", Show(largest_unit_bytes),
                    " more at a time.\n");
  }
  return text;
}

}  // namespace ballast::services
