#include "ballast/tests/e2e/job_fixture.h"

#include <thread>

#include "ballast/client/collective/loopback_collective.h"
#include "ballast/client/examples/local_source.h"
#include "ballast/client/examples/master_weights.h"
#include "ballast/client/examples/server_source.h"
#include "ballast/client/grpc_transport.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/model/epoch_plan.h"
#include "ballast/services/counters/counters.h"
#include "ballast/services/gateway/embedded_transport.h"
#include "ballast/storage/placement/placement.h"

namespace ballast {
namespace {

// The buffer for reads and two chunks' state: less than any server's share of the state, since a server that can do
// without staging keeps everything in DRAM.
constexpr char kJob[] = "bits";

// Elements of each chunk that server `index` of `servers` will hold: the routing is a pure function, so a test can know
// it.
std::vector<uint64_t> ChunksOfServer(int index, int servers) {
  v1::JobSpec spec;
  spec.set_name(kJob);
  spec.set_chunk_elements(kChunkElements);
  spec.set_group_count(client::kGroupCount);
  v1::Registration* registration = spec.add_registrations();
  for (const client::ModelTensor& tensor : client::TensorsOf(SmallTrainer().shape)) {
    v1::TensorSpec* out = registration->add_tensors();
    out->set_name(tensor.name);
    out->set_unit(tensor.unit);
    out->set_group(tensor.group);
    for (const uint64_t extent : tensor.shape) out->add_shape(extent);
  }
  std::vector<v1::Member> members(servers);
  for (int i = 0; i < servers; ++i) {
    members[i].set_server_id(absl::StrCat("s", i));
    members[i].set_weight(1);
  }
  const auto layout = model::Layout::Make(spec);
  const std::vector<uint32_t> routes = model::RouteChunks(kJob, *layout, members);
  std::vector<uint64_t> elements;
  for (const model::Chunk& chunk : layout->chunks()) {
    if (routes[chunk.index] == static_cast<uint32_t>(index)) elements.push_back(chunk.range.size());
  }
  return elements;
}

uint64_t StagingBytes(const kernels::OptimizerSpec& optimizer) {
  return (uint64_t{1} << 20) + 2 * storage::StateLayout(optimizer).StateBytes(kChunkElements);
}

storage::TierBytes BudgetFor(Placement placement, const std::vector<uint64_t>& elements,
                             const kernels::OptimizerSpec& optimizer) {
  const storage::StateLayout layout(optimizer);
  storage::TierBytes budget;
  if (placement == Placement::kDram) {
    budget.dram = uint64_t{256} << 20;
    return budget;
  }
  budget.dram = StagingBytes(optimizer);
  uint64_t state = 0;
  for (const uint64_t n : elements) {
    budget.dram += layout.WorkingBytes(n) + std::max<uint64_t>(4, layout.gradient_element_bytes() + 2) * n;
    state += layout.StateBytes(n);
  }
  if (placement == Placement::kMixed) budget.dram += (state - StagingBytes(optimizer)) / 2;
  budget.nvme = uint64_t{256} << 20;
  return budget;
}

absl::StatusOr<uint32_t> TrainRank(std::vector<std::unique_ptr<client::Transport>> transports,
                                   const client::Corpus& corpus, client::Collective* collective, int64_t end,
                                   client::Resume resume, const kernels::OptimizerSpec& optimizer) {
  const client::TrainerOptions options = SmallTrainer(optimizer.kind);
  client::SessionOptions session_options;
  session_options.job = kJob;
  session_options.resume = resume;
  session_options.group_count = client::kGroupCount;
  session_options.chunk_elements = kChunkElements;
  session_options.optimizer = optimizer;
  session_options.durability = v1::DURABILITY_NONE;
  session_options.seed = options.seed;
  BALLAST_ASSIGN_OR_RETURN(auto session, client::Session::Open(session_options, client::SessionTensors(options.shape),
                                                               std::move(transports), collective));
  BALLAST_ASSIGN_OR_RETURN(auto source, client::ServerSource::Create(std::move(session), options.shape, options.seed));
  BALLAST_ASSIGN_OR_RETURN(auto trainer, client::Trainer::Create(options, &corpus, source.get(), collective));
  while (source->version() < end) BALLAST_RETURN_IF_ERROR(trainer->Step().status());
  BALLAST_ASSIGN_OR_RETURN(const uint32_t digest, client::SaveMasterWeights(options.shape, *source, ""));
  // Nobody leaves while another still reads.
  BALLAST_RETURN_IF_ERROR(collective->Exchange("done").status());
  return digest;
}

}  // namespace

client::TrainerOptions SmallTrainer(kernels::OptimizerKind kind) {
  client::TrainerOptions options;
  options.shape = {.layers = 6, .width = 128, .heads = 2, .context = 16, .sequences = 1};
  options.micro_batches = 4;
  options.schedule.total_steps = 6;
  options.schedule.warmup_steps = 2;
  if (kind == kernels::OptimizerKind::kAdemamix) options.beta3 = 0.999, options.alpha = 5;
  if (kind == kernels::OptimizerKind::kAdamwScheduleFree) options.average = 0.25;
  return options;
}

absl::StatusOr<std::unique_ptr<Cluster>> Cluster::Start(int servers, Placement placement, Wire wire,
                                                        const kernels::OptimizerSpec& optimizer) {
  auto cluster = std::make_unique<Cluster>();
  cluster->wire_ = wire;
  for (int i = 0; i < servers; ++i) {
    Server& server = cluster->servers_.emplace_back();
    services::StateServerOptions options;
    options.data_directory = server.directory.path();
    options.server_id = absl::StrCat("s", i);
    options.budget = BudgetFor(placement, ChunksOfServer(i, servers), optimizer);
    options.staging_bytes = StagingBytes(optimizer);
    BALLAST_ASSIGN_OR_RETURN(server.state, services::StateServer::Start(options));
    if (wire != Wire::kEmbedded) {
      services::RpcServerOptions rpc;
      if (wire == Wire::kGrpc) rpc.shared_memory_bytes = 0;
      BALLAST_ASSIGN_OR_RETURN(server.rpc, services::RpcServer::Start(rpc, server.state.get()));
    }
  }
  return cluster;
}

std::vector<std::unique_ptr<client::Transport>> Cluster::Connect() const {
  std::vector<std::unique_ptr<client::Transport>> transports;
  for (const Server& server : servers_) {
    transports.push_back(wire_ == Wire::kEmbedded ? services::MakeEmbeddedTransport(server.state.get(), 3)
                                                  : client::MakeGrpcTransport(server.rpc->address()));
  }
  return transports;
}

uint64_t Cluster::SharedBytes() const {
  uint64_t bytes = 0;
  for (const Server& server : servers_) {
    const services::SharedMemoryCounters& shared = *server.state->counters().shared_memory;
    bytes += shared.in_bytes + shared.out_bytes;
  }
  return bytes;
}

storage::TierBytes Cluster::StateBytes() const {
  storage::TierBytes bytes;
  for (const Server& server : servers_) {
    const v1::GetServerStatusResponse status = server.state->Status();
    for (const v1::TierStatus& tier : status.tiers()) {
      if (tier.tier() == "dram") bytes.dram += tier.state_bytes();
      if (tier.tier() == "nvme") bytes.nvme += tier.state_bytes();
    }
  }
  return bytes;
}

absl::StatusOr<uint32_t> TrainOnServers(const Cluster& cluster, const client::Corpus& corpus, int world_size,
                                        int64_t end, client::Resume resume, const kernels::OptimizerSpec& optimizer) {
  const auto seats = client::MakeLoopbackGroup(world_size);
  std::vector<absl::StatusOr<uint32_t>> results(world_size, absl::UnknownError("did not run"));
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < world_size; ++rank) {
    ranks.emplace_back(
        [&, rank] { results[rank] = TrainRank(cluster.Connect(), corpus, seats[rank].get(), end, resume, optimizer); });
  }
  for (std::thread& rank : ranks) rank.join();
  for (int rank = 0; rank < world_size; ++rank) {
    if (!results[rank].ok()) return model::Annotate(results[rank].status(), absl::StrCat("rank ", rank));
    if (*results[rank] != *results[0]) return absl::InternalError("ranks read different master weights");
  }
  return *results[0];
}

absl::StatusOr<uint32_t> TrainLocally(const client::Corpus& corpus, int threads, int64_t end,
                                      const kernels::OptimizerSpec& optimizer) {
  client::TrainerOptions options = SmallTrainer(optimizer.kind);
  options.threads = threads;
  const auto seats = client::MakeLoopbackGroup(1);
  BALLAST_ASSIGN_OR_RETURN(auto source,
                           client::LocalSource::Create(options.shape, options.seed, kChunkElements, optimizer));
  BALLAST_ASSIGN_OR_RETURN(auto trainer, client::Trainer::Create(options, &corpus, source.get(), seats[0].get()));
  while (source->version() < end) BALLAST_RETURN_IF_ERROR(trainer->Step().status());
  return client::SaveMasterWeights(options.shape, *source, "");
}

}  // namespace ballast
