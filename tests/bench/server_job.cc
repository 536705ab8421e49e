#include "ballast/tests/bench/server_job.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "ballast/kernels/kernels.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/model/protocol.h"
#include "ballast/proto/model/step_header.h"
#include "ballast/proto/model/tiling.h"
#include "ballast/proto/model/verdict.h"
#include "ballast/services/journal/log_length.h"

namespace ballast::bench {
namespace {

constexpr uint64_t kGradientChunks = 64;
constexpr uint64_t kGradientBytes = ServerJob::kChunkElements * sizeof(uint16_t);
// Below what a server lets wait for updates.
constexpr uint64_t kInFlightBytesMax = uint64_t{48} << 20;
constexpr absl::Duration kTimeout = absl::Minutes(5);

// The answer of one call.
template <typename Response>
class Answer {
 public:
  services::Reply<Response> reply() {
    return [state = state_](absl::StatusOr<Response> response) {
      absl::MutexLock lock(&state->mutex);
      state->response.emplace(std::move(response));
    };
  }
  absl::StatusOr<Response> Wait() {
    absl::MutexLock lock(&state_->mutex);
    const auto there = [this] { return state_->response.has_value(); };
    if (state_->mutex.AwaitWithTimeout(absl::Condition(&there), kTimeout)) return *state_->response;
    return absl::DeadlineExceededError("no answer of the server");
  }

 private:
  struct State {
    absl::Mutex mutex;
    std::optional<absl::StatusOr<Response>> response;
  };
  std::shared_ptr<State> state_ = std::make_shared<State>();
};

// Pushes that were not answered yet.
struct InFlight {
  absl::Mutex mutex;
  uint64_t bytes ABSL_GUARDED_BY(mutex) = 0;
  absl::Status status ABSL_GUARDED_BY(mutex);
  std::vector<uint32_t> busy ABSL_GUARDED_BY(mutex);  // slices to be sent again

  void WaitFor(uint64_t bytes_max) {
    absl::MutexLock lock(&mutex);
    const auto below = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) { return bytes <= bytes_max; };
    mutex.Await(absl::Condition(&below));
  }
};

v1::StepHeader Header(v1::StepKind kind) {
  v1::StepHeader header;
  header.set_kind(kind);
  header.set_gradient_scale(1);
  const std::string all = model::MakeBitmap(1, {0}), none = model::MakeBitmap(1, {});
  const bool update = kind == v1::STEP_KIND_UPDATE;
  header.set_gradient_presence(update ? all : none);
  header.set_value_presence(update ? none : all);
  if (!update) return header;
  v1::GroupHyper* const hyper = header.add_groups();
  hyper->set_learning_rate(1e-3);
  hyper->set_beta1(0.9);
  hyper->set_beta2(0.999);
  hyper->set_epsilon(1e-8);
  hyper->set_weight_decay(0.01);
  return header;
}

}  // namespace

absl::StatusOr<std::shared_ptr<const ChunkGradients>> ChunkGradients::Make() {
  auto gradients = std::make_shared<ChunkGradients>();
  BALLAST_ASSIGN_OR_RETURN(gradients->memory_, storage::Arena::Map(kGradientChunks * kGradientBytes));
  auto* const values = reinterpret_cast<uint16_t*>(gradients->memory_.bytes().data());
  for (uint64_t i = 0; i < kGradientChunks * ServerJob::kChunkElements; ++i) {
    const auto hash = static_cast<uint32_t>(i * 2654435761u);
    values[i] = kernels::ToBf16((static_cast<float>(hash >> 8) / (1 << 24) - 0.5f) * 0.02f);
  }
  gradients->digests_.resize(kGradientChunks);
  for (uint64_t i = 0; i < kGradientChunks; ++i) gradients->digests_[i] = kernels::Crc32c(gradients->Of(i));
  return gradients;
}

absl::Span<const std::byte> ChunkGradients::Of(uint64_t chunk) const {
  return memory_.bytes().subspan(chunk % kGradientChunks * kGradientBytes, kGradientBytes);
}

services::StateServerOptions ServerJob::ServerOptions(const Options& options) {
  services::StateServerOptions server;
  server.data_directory = options.directory;
  server.server_id = "bench";
  // Without options.dram_bytes the limits do not matter, only the bytes used.
  server.budget = {0, options.dram_bytes > 0 ? options.dram_bytes : ~uint64_t{0} / 4,
                   options.durability == v1::DURABILITY_STEP ? ~uint64_t{0} / 4 : 0};
  server.compute_threads = options.threads;
  // As long as a log gets by itself when steps follow each other without a pause, so that no round has another.
  server.log_steps = services::kLogStepsMax;
  return server;
}

absl::StatusOr<std::unique_ptr<ServerJob>> ServerJob::Make(const Options& options) {
  std::unique_ptr<ServerJob> job(new ServerJob(options));
  BALLAST_ASSIGN_OR_RETURN(job->server_, services::StateServer::Start(ServerOptions(options)));
  BALLAST_RETURN_IF_ERROR(job->Open());
  BALLAST_RETURN_IF_ERROR(job->Initialise());
  return job;
}

absl::Status ServerJob::Open() {
  spec_.set_name(kName);
  spec_.set_chunk_elements(kChunkElements);
  spec_.set_optimizer(v1::OPTIMIZER_ADAMW);
  spec_.set_gradient_dtype(v1::DTYPE_BF16);
  spec_.set_working_dtype(v1::DTYPE_BF16);
  spec_.set_durability(options_.durability);
  spec_.set_group_count(1);
  v1::Registration* const registration = spec_.add_registrations();
  registration->set_version(-1);
  v1::TensorSpec* const tensor = registration->add_tensors();
  tensor->set_name("weight");
  tensor->set_unit("unit");
  tensor->add_shape(options_.chunks);
  tensor->add_shape(kChunkElements);
  epoch_.set_counter(1);
  epoch_.set_nonce(1);

  v1::FenceRequest fence;
  fence.set_job(kName);
  *fence.mutable_epoch() = epoch_;
  fence.set_protocol_version(model::kProtocolVersion);
  Answer<v1::FenceResponse> fenced;
  server_->Fence(fence, absl::Now() + kTimeout, fenced.reply());
  BALLAST_RETURN_IF_ERROR(fenced.Wait().status());

  v1::OpenRequest open;
  *open.mutable_epoch() = epoch_;
  open.set_base(-1);
  *open.mutable_spec() = spec_;
  open.set_spec_digest(model::SpecDigest(spec_));
  open.set_protocol_version(model::kProtocolVersion);
  BALLAST_ASSIGN_OR_RETURN(const model::Layout layout, model::Layout::Make(spec_));
  *open.mutable_tiling() = model::EvenTiling(1);
  v1::Member* const member = open.add_members();
  member->set_server_id(server_->server_id());
  member->set_weight(1);
  BALLAST_ASSIGN_OR_RETURN(model::EpochPlan plan, model::EpochPlan::Make(open));
  plan_ = std::make_unique<model::EpochPlan>(std::move(plan));
  Answer<v1::OpenResponse> opened;
  server_->Open(open, absl::Now() + kTimeout, opened.reply());
  return opened.Wait().status();
}

absl::Status ServerJob::Initialise() {
  BALLAST_ASSIGN_OR_RETURN(values_, storage::Arena::Map(kChunkElements * sizeof(float)));
  auto* const values = reinterpret_cast<float*>(values_.bytes().data());
  for (uint64_t i = 0; i < kChunkElements; ++i) values[i] = 1e-3f * static_cast<float>(i % 1009);
  std::vector<uint32_t> slices(plan_->slices().size());
  for (uint32_t i = 0; i < slices.size(); ++i) slices[i] = i;
  BALLAST_RETURN_IF_ERROR(PushSlices(v1::SLICE_KIND_VALUE, slices));
  BALLAST_RETURN_IF_ERROR(Finish(Header(v1::STEP_KIND_VALUES)));
  return Settle();
}

absl::Status ServerJob::PushSlices(v1::SliceKind kind, absl::Span<const uint32_t> slices) {
  const bool value = kind == v1::SLICE_KIND_VALUE;
  const uint32_t values_crc32c = value ? kernels::Crc32c(values_.bytes()) : 0;
  std::vector<uint32_t> todo(slices.begin(), slices.end());
  InFlight in_flight;
  while (!todo.empty()) {
    for (const uint32_t index : todo) {
      const model::Slice& slice = plan_->slices()[index];
      if (slice.range.size() != kChunkElements) return absl::InternalError("a slice is not a chunk");
      const absl::Span<const std::byte> payload = value ? values_.bytes() : options_.gradients->Of(slice.chunk);
      v1::PushRequest header;
      header.set_job(kName);
      *header.mutable_epoch() = epoch_;
      header.set_step(step_);
      header.set_rank(slice.rank);
      header.set_kind(kind);
      header.set_unit(slice.unit);
      header.set_begin(slice.range.begin);
      header.set_end(slice.range.end);
      header.set_crc32c(value ? values_crc32c : options_.gradients->crc32c(slice.chunk));
      in_flight.WaitFor(kInFlightBytesMax - payload.size());
      {
        absl::MutexLock lock(&in_flight.mutex);
        in_flight.bytes += payload.size();
      }
      server_->Push(header, payload, absl::Now() + kTimeout,
                    [&in_flight, index, bytes = payload.size()](const absl::StatusOr<v1::PushResponse>& response) {
                      absl::MutexLock lock(&in_flight.mutex);
                      in_flight.bytes -= bytes;
                      if (absl::IsUnavailable(response.status())) {
                        in_flight.busy.push_back(index);
                      } else {
                        in_flight.status.Update(response.status());
                      }
                    });
    }
    in_flight.WaitFor(0);
    absl::MutexLock lock(&in_flight.mutex);
    BALLAST_RETURN_IF_ERROR(in_flight.status);
    todo = std::exchange(in_flight.busy, {});
  }
  return absl::OkStatus();
}

absl::Status ServerJob::Finish(const v1::StepHeader& header) {
  const std::vector<std::string> blobs(1);
  v1::SealRequest seal;
  seal.set_job(kName);
  *seal.mutable_epoch() = epoch_;
  seal.set_step(step_);
  seal.set_plan_hash(model::PlanHash(*plan_, step_, /*attempt=*/0, header, blobs));
  *seal.mutable_header() = header;
  seal.add_blobs(blobs[0]);
  seal.set_wait_ms(static_cast<uint32_t>(absl::ToInt64Milliseconds(kTimeout)));
  Answer<model::SealAnswer> sealed;
  server_->Seal(seal, absl::Now() + kTimeout, sealed.reply());
  BALLAST_ASSIGN_OR_RETURN(const model::SealAnswer answer, sealed.Wait());
  const v1::SealResponse& response = **answer;
  if (!response.has_prepared()) return absl::InternalError(absl::StrCat("not prepared: ", response.DebugString()));
  const std::vector<v1::PreparedRecord> records = {response.prepared()};
  v1::CommitRequest commit;
  commit.set_job(kName);
  BALLAST_ASSIGN_OR_RETURN(*commit.mutable_decision(), model::Decide(records));
  Answer<v1::CommitResponse> committed;
  server_->Commit(commit, committed.reply());
  BALLAST_RETURN_IF_ERROR(committed.Wait().status());
  ++step_;
  return absl::OkStatus();
}

absl::Status ServerJob::Push(uint64_t chunks) {
  std::vector<uint32_t> slices;
  for (uint32_t i = 0; i < plan_->slices().size(); ++i) {
    if (plan_->slices()[i].chunk < chunks) slices.push_back(i);
  }
  return PushSlices(v1::SLICE_KIND_GRADIENT, slices);
}

absl::Status ServerJob::Commit() { return Finish(Header(v1::STEP_KIND_UPDATE)); }

absl::Status ServerJob::Step() {
  BALLAST_RETURN_IF_ERROR(Push(options_.chunks));
  return Commit();
}

absl::Status ServerJob::Settle() const {
  for (;;) {
    const v1::GetServerStatusResponse status = server_->Status();
    if (status.jobs_size() != 1) return absl::InternalError("the server has not the one job");
    if (!status.jobs(0).failure().empty()) return absl::InternalError(status.jobs(0).failure());
    if (status.jobs(0).oldest_chunk_version() >= committed()) return absl::OkStatus();
    absl::SleepFor(absl::Milliseconds(1));
  }
}

}  // namespace ballast::bench
