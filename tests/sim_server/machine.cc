#include "ballast/tests/sim_server/machine.h"

#include <algorithm>
#include <filesystem>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ballast/kernels/kernels.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/model/optimizer.h"
#include "ballast/services/job_state/job_entry.h"
#include "ballast/storage/placement/profile_file.h"
#include "ballast/tests/sim_server/bits.h"

namespace ballast::sim {
namespace {

// For value slices of small tensors beside gradients; less than any chunk's state, so that none is placed there.
constexpr uint64_t kSlackBytes = 12 << 10;
// The least that works: a read buffer and one chunk's state.
constexpr uint64_t kReadBufferBytes = uint64_t{1} << 20;
constexpr uint64_t kNvmeBytes = uint64_t{256} << 20;
// The shortest log, a new one's length, and the longest to which a log grows by itself.
constexpr uint64_t kLogSteps[] = {3, 6, 16};

}  // namespace

Machine::Machine(int index, uint64_t seed, std::string directory)
    : index_(index),
      directory_(std::move(directory)),
      devices_(Mix(seed, index, 3) % 3 == 0),
      log_steps_(kLogSteps[Mix(seed, index, 4) % std::size(kLogSteps)]),
      disk_(Mix(seed, index, 1)),
      catalog_(Mix(seed, index, 2)) {
  for (const char* device : {"/a", "/b"}) std::filesystem::create_directories(directory_ + device);
}

Machine::~Machine() { End(); }

storage::TierBytes Machine::Budget(Random* random, bool hbm) const {
  const model::EpochPlan& plan = PlanOf(1);
  const storage::StateLayout layout(*model::OptimizerOf(plan.open().spec()));
  uint64_t working = 0, slices = 0, shared = 0, state = 0;
  std::vector<uint64_t> states;
  for (const model::Chunk& chunk : plan.layout().chunks()) {
    if (plan.holders_of(chunk.index)[0] != static_cast<uint32_t>(index_)) continue;
    const uint64_t n = chunk.range.size();
    states.push_back(layout.StateBytes(n));
    working += layout.WorkingBytes(n);
    slices += 4 * n;
    if (PlanOf(2).slices_of_chunk(chunk.index).size() > 1) shared += 2 * n;
    state += layout.StateBytes(n);
  }
  uint64_t fixed = working + slices;
  storage::TierBytes budget{0, 0, kNvmeBytes};
  if (hbm) {
    budget.hbm = storage::kHbmScratchBytes + random->Below(state + working + 1);
  }
  if (random->Percent(30)) {
    budget.dram = 2 * (fixed + state) + (uint64_t{8} << 20);
    return budget;
  }
  const uint64_t staging = kReadBufferBytes + layout.StateBytes(model::kChunkElementsMin);
  // Slices read back from the log need at least two slices of values and a gradient.
  const uint64_t read_back = 10 * model::kChunkElementsMin + shared;
  // Working copies are left out where they take more than the memory for pulls without them; beside a GPU they stay.
  const uint64_t pull = std::max<uint64_t>(states.size() / 4, 1) * layout.WorkingBytes(model::kChunkElementsMin);
  if (!hbm && pull < working && random->Percent(40)) {
    const uint64_t least = pull + std::min(read_back, slices) + staging + kSlackBytes;
    budget.dram = least + random->Below(working - pull);
    return budget;
  }
  if (read_back + kSlackBytes < slices && random->Percent(80)) {
    budget.dram = working + read_back + random->Below(slices - read_back - kSlackBytes) + staging;
    return budget;
  }
  const uint64_t in_dram = random->Below(states.size() + 1);
  for (uint64_t i = 0; i < in_dram; ++i) fixed += states[i];
  budget.dram = fixed + staging + kSlackBytes;
  return budget;
}

// A disk as fast as the kernels, and a slow link to the GPU: plans by these figures spread chunks, read slices back to
// give state their DRAM, and leave HBM empty. Every other start has them, so that chunks come back under another plan.
absl::Status Machine::ChangeProfile() {
  const std::string path = directory_ + "/" + services::kMachineProfile;
  std::error_code error;
  if (++starts_ % 2 == 1) {
    std::filesystem::remove(path, error);
    return absl::OkStatus();
  }
  storage::MachineProfile profile;
  profile.threads = 1;
  profile.update_f32_elements_per_s = {100'000'000, 100'000'000};
  profile.digest_bytes_per_s = {100'000'000'000, 100'000'000'000};
  profile.disk_read_bytes_per_s = profile.disk_write_bytes_per_s = profile.disk_mixed_bytes_per_s = 1'000'000'000;
  profile.gpu_in_bytes_per_s = profile.gpu_out_bytes_per_s = starts_ % 4 == 0 ? 100'000'000 : 10'000'000'000;
  std::filesystem::create_directories(directory_, error);
  return storage::WriteProfile(profile, path);
}

// The number that the table has of it.
absl::Status Machine::SettleDisk() {
  const std::unique_ptr<storage::Catalog> catalog = catalog_.Open();
  BALLAST_ASSIGN_OR_RETURN(const auto stored, catalog->Get(services::kCatalogDisk));
  if (stored.has_value()) return absl::OkStatus();
  return catalog->Put(services::kCatalogDisk, absl::StrCat(absl::Hex(DiskOf(index_), absl::kZeroPad16)));
}

absl::Status Machine::Start(Random* random) {
  BALLAST_RETURN_IF_ERROR(ChangeProfile());
  if (PlanOf(1).open().has_table()) BALLAST_RETURN_IF_ERROR(SettleDisk());
  const storage::StateLayout layout(*model::OptimizerOf(PlanOf(1).open().spec()));
  services::StateServerOptions options;
  options.budget = Budget(random, /*hbm=*/random->Percent(30));
  if (devices_) {
    options.nvme_devices = {
        {directory_, kNvmeBytes / 2}, {directory_ + "/a", kNvmeBytes / 4}, {directory_ + "/b", kNvmeBytes / 4}};
  }
  options.log_steps = log_steps_;
  options.staging_bytes = kReadBufferBytes + layout.StateBytes(model::kChunkElementsMin);
  return Start(std::move(options));
}

absl::Status Machine::Start(services::StateServerOptions options) {
  options.data_directory = directory_;
  options.server_id = ServerName(index_);
  options.read_threads = 2;
  options.answer_threads = 2;
  has_hbm_ = options.budget.hbm > 0;
  foundation_ = std::make_unique<SimFoundation>(&disk_, &catalog_);
  options.foundation = foundation_.get();
  alive_ = std::make_shared<bool>(true);
  auto started = services::StateServer::Start(options);
  if (!started.ok()) {
    End();
    return started.status();
  }
  server_ = *std::move(started);
  return absl::OkStatus();
}

void Machine::End() {
  if (alive_ != nullptr) *alive_ = false;
  if (foundation_ != nullptr) foundation_->Die();
  catalog_.Close();
  server_.reset();
  foundation_.reset();
  answers_.clear();
}

void Machine::Stop() {
  server_->Stop();
  server_.reset();
  foundation_.reset();
  catalog_.Close();
  *alive_ = false;
}

void Machine::Kill() { End(); }

void Machine::PowerCut() {
  if (!disk_.off()) {
    disk_.CrashAfter(1);
    (void)disk_.Remove("/nothing");
  }
  catalog_.Crash();
  End();
  disk_.Crash();
}

void Machine::PowerCutAtCatalogWrite(uint64_t writes, SimCatalog::Count count) {
  const auto lose = [this] {
    disk_.CrashAfter(1);
    (void)disk_.Remove("/nothing");
  };
  catalog_.CrashAfter(writes, lose, count);
}

std::vector<Response> Machine::TakeAnswers() { return std::exchange(answers_, {}); }

template <typename Body>
services::Reply<Body> Machine::ReplyTo(const Request& request) {
  return [this, request, alive = alive_](absl::StatusOr<Body> result) {
    if (!*alive || disk_.off()) return;
    Response response{request, result.status(), {}};
    if (result.ok()) response.body = std::make_shared<const Body>(*std::move(result));
    answers_.push_back(std::move(response));
  };
}

void Machine::Handle(const Request& request, bool damage, Random* random) {
  const absl::Time never = absl::InfiniteFuture();
  if (const auto* fence = std::get_if<std::shared_ptr<const v1::FenceRequest>>(&request.body)) {
    return server_->Fence(**fence, never, ReplyTo<v1::FenceResponse>(request));
  }
  if (const auto* open = std::get_if<std::shared_ptr<const v1::OpenRequest>>(&request.body)) {
    return server_->Open(**open, never, ReplyTo<v1::OpenResponse>(request));
  }
  if (const auto* norm = std::get_if<std::shared_ptr<const v1::NormRequest>>(&request.body)) {
    return server_->Norm(**norm, ReplyTo<v1::NormResponse>(request));
  }
  if (const auto* seal = std::get_if<std::shared_ptr<const v1::SealRequest>>(&request.body)) {
    const auto reply = ReplyTo<v1::SealResponse>(request);
    return server_->Seal(**seal, never, [reply](absl::StatusOr<model::SealAnswer> answer) {
      answer.ok() ? reply(***answer) : reply(answer.status());
    });
  }
  if (const auto* commit = std::get_if<std::shared_ptr<const v1::CommitRequest>>(&request.body)) {
    return server_->Commit(**commit, ReplyTo<v1::CommitResponse>(request));
  }
  if (const auto* pin = std::get_if<std::shared_ptr<const v1::PinRequest>>(&request.body)) {
    return server_->Pin(**pin, never, ReplyTo<v1::PinResponse>(request));
  }
  if (const auto* unpin = std::get_if<std::shared_ptr<const v1::UnpinRequest>>(&request.body)) {
    return server_->Unpin(**unpin, ReplyTo<v1::UnpinResponse>(request));
  }
  const auto& push = *std::get<std::shared_ptr<const v1::PushRequest>>(request.body);
  // A copy of its own, gone with the reply: whoever looks at it later is caught by a sanitizer.
  auto payload = std::make_shared<std::vector<std::byte>>(*PayloadOf(push.crc32c()));
  if (damage) (*payload)[random->Below(payload->size())] ^= std::byte{1} << random->Below(8);
  server_->Push(
      push, absl::MakeConstSpan(*payload), never,
      [payload, reply = ReplyTo<v1::PushResponse>(request)](absl::StatusOr<v1::PushResponse> response) mutable {
        payload->clear();
        payload->shrink_to_fit();
        reply(std::move(response));
      });
}

absl::StatusOr<v1::GetJobResponse> Machine::Describe() {
  v1::GetJobRequest request;
  request.set_job(kJob);
  absl::StatusOr<v1::GetJobResponse> answer = absl::UnknownError("GetJob did not answer at once");
  server_->GetJob(request, [&](absl::StatusOr<v1::GetJobResponse> response) { answer = std::move(response); });
  if (answer.ok() && !answer->exists()) answer->set_committed(-1);
  return answer;
}

absl::Status Machine::Cause() {
  v1::NormRequest request;
  request.set_job(kJob);
  absl::Status cause;
  server_->Norm(request, [&](const absl::StatusOr<v1::NormResponse>& response) { cause = response.status(); });
  return cause;
}

void Machine::Pull(const v1::PullRequest& request, PullReply reply) {
  auto bits = std::make_shared<std::vector<std::byte>>();
  const auto allocate = [bits](uint64_t bytes, const services::AnswerRoom::Lease&) {
    bits->resize(bytes);
    return absl::MakeSpan(*bits);
  };
  server_->Pull(request, absl::InfiniteFuture(), allocate,
                [this, bits, alive = alive_, reply = std::move(reply)](absl::StatusOr<uint32_t> crc) {
                  if (!*alive || disk_.off()) return;
                  if (!crc.ok()) return reply(crc.status());
                  if (*crc != kernels::Crc32c(*bits)) return reply(absl::UnknownError("a pull's CRC32C is wrong"));
                  reply(std::move(*bits));
                });
}

absl::StatusOr<std::vector<std::byte>> Machine::PullNow(const v1::PullRequest& request, Random* random) {
  auto answer = std::make_shared<std::optional<absl::StatusOr<std::vector<std::byte>>>>();
  Pull(request, [answer](absl::StatusOr<std::vector<std::byte>> bits) { *answer = std::move(bits); });
  while (!answer->has_value() && RunTask(random)) {
  }
  if (answer->has_value()) return **std::move(answer);
  return absl::DeadlineExceededError("no answer to a pull although nothing is left to do");
}

bool Machine::LacksCopies() const {
  const v1::GetServerStatusResponse status = server_->Status();
  uint64_t copies = 0;
  for (const v1::TierStatus& tier : status.tiers()) copies += tier.working_bytes();
  const storage::StateLayout layout(*model::OptimizerOf(PlanOf(1).open().spec()));
  uint64_t all = 0;
  for (const model::Chunk& chunk : PlanOf(1).layout().chunks()) {
    if (PlanOf(1).holders_of(chunk.index)[0] == static_cast<uint32_t>(index_))
      all += layout.WorkingBytes(chunk.range.size());
  }
  return copies < all;
}

void Machine::ChangeBudget(Random* random, std::function<void(uint64_t)> moves) {
  v1::SetBudgetRequest request;
  const storage::TierBytes budget = Budget(random, has_hbm_);
  request.set_hbm_bytes(budget.hbm);
  request.set_dram_bytes(budget.dram);
  server_->SetBudget(request, [alive = alive_, moves = std::move(moves)](absl::StatusOr<v1::SetBudgetResponse> answer) {
    if (!*alive || !answer.ok()) return;
    uint64_t count = 0;
    for (const v1::JobMoves& job : answer->jobs())
      count += job.chunks_to_nvme() + job.chunks_to_dram() + job.chunks_to_hbm();
    moves(count);
  });
}

}  // namespace ballast::sim
