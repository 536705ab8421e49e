// A trainer whose durable server is in its process, for embedded_failpoint_test to kill: it holds leases while it
// steps, or lends its parameters, and lends its gradients. Its gradients depend on the parameters that it reads, so
// wrong ones show in the end.
//
//   embedded_trainer DIRECTORY step|every-k leases|loans STEPS
//
// Prints "continued after N" of the data, "step N" after each step, and "digest X" of all state in the end.
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "ballast/client/collective/loopback_collective.h"
#include "ballast/client/session.h"
#include "ballast/kernels/kernels.h"
#include "ballast/proto/base/status.h"
#include "ballast/services/gateway/embedded_transport.h"
#include "ballast/services/server/state_server.h"

namespace ballast {
namespace {

using kernels::bf16;

constexpr uint64_t kChunk = uint64_t{1} << 16;
constexpr uint64_t kMiB = uint64_t{1} << 20;
// A unit is a tensor: one of two chunks, and one that ends amid its second. Leases of the first are held over a step.
constexpr std::array<uint64_t, 2> kElements = {2 * kChunk, kChunk + kChunk / 2};
constexpr std::array<const char*, 2> kTensors = {"held", "free"};
// So long that the update waits for a lease that is given back after it.
constexpr absl::Duration kHeld = absl::Milliseconds(5);

struct Flags {
  std::string directory;
  v1::Durability durability = v1::DURABILITY_STEP;
  bool lends_parameters = false;
  int64_t steps = 0;
};

float Value(int64_t step, uint32_t unit, uint64_t i) {
  const uint64_t mixed = (i + 1) * 0x9e3779b97f4a7c15u + static_cast<uint64_t>(step * 2 + unit) * 0xbf58476d1ce4e5b9u;
  return static_cast<float>((mixed >> 40) % 2048) / 65536.0f - 1.0f / 64;
}

using Memory = std::shared_ptr<std::vector<bf16>>;

// Half of the parameter, and what belongs to the step.
Memory GradientOf(int64_t step, uint32_t unit, absl::Span<const std::byte> parameters) {
  auto gradient = std::make_shared<std::vector<bf16>>(kElements[unit]);
  for (uint64_t i = 0; i < gradient->size(); ++i) {
    bf16 parameter;
    std::memcpy(&parameter, &parameters[i * sizeof(parameter)], sizeof(parameter));
    (*gradient)[i] = kernels::ToBf16(kernels::FromBf16(parameter) / 2 + Value(step, unit, i));
  }
  return gradient;
}

class EmbeddedTrainer {
 public:
  explicit EmbeddedTrainer(Flags flags) : flags_(std::move(flags)) {}
  absl::Status Run();

 private:
  absl::Status Open();
  absl::Status StepWithLeases(int64_t step);
  absl::Status StepWithLoans(int64_t step);
  absl::Status Push(int64_t step, uint32_t unit, absl::Span<const std::byte> parameters);
  absl::Status PullParameters();
  absl::Status PrintDigest();
  static client::StepOptions OptionsOf(int64_t step) {
    client::StepOptions options;
    options.groups.resize(1);
    options.max_norm = 4;
    options.blob = absl::StrCat(step);
    return options;
  }
  absl::Span<std::byte> parameters(uint32_t unit) {
    return {reinterpret_cast<std::byte*>(parameters_[unit].data()), parameters_[unit].size() * sizeof(bf16)};
  }

  const Flags flags_;
  std::unique_ptr<services::StateServer> server_;
  std::unique_ptr<client::Collective> collective_ = std::move(client::MakeLoopbackGroup(1).front());
  std::array<std::vector<bf16>, kTensors.size()> parameters_;  // the trainer's, where they are lent
  std::unique_ptr<client::Session> session_;
};

absl::Status EmbeddedTrainer::Open() {
  services::StateServerOptions server;
  server.data_directory = flags_.directory;
  server.server_id = "s";
  // Some state is on NVMe; the log is short, so that steps wait for flushes.
  server.budget = {.hbm = 0, .dram = 24 * kMiB, .nvme = 64 * kMiB};
  server.staging_bytes = 4 * kMiB;
  server.log_steps = 3;
  server.compute_threads = 2;
  server.working_copies = !flags_.lends_parameters;
  BALLAST_ASSIGN_OR_RETURN(server_, services::StateServer::Start(server));
  client::SessionOptions options;
  options.job = "job";
  options.resume = client::Resume::kAuto;
  options.chunk_elements = kChunk;
  options.durability = flags_.durability;
  if (flags_.durability == v1::DURABILITY_EVERY_K) options.pin_interval = 2;
  std::vector<std::unique_ptr<client::Transport>> transports;
  transports.push_back(services::MakeEmbeddedTransport(server_.get(), 2));
  std::vector<client::TensorSpec> tensors;
  for (size_t i = 0; i < kTensors.size(); ++i) {
    tensors.push_back({.name = kTensors[i], .unit = kTensors[i], .shape = {kElements[i]}});
  }
  BALLAST_ASSIGN_OR_RETURN(session_, client::Session::Open(options, tensors, std::move(transports), collective_.get()));
  if (!session_->needs_values()) return absl::OkStatus();
  BALLAST_RETURN_IF_ERROR(session_->Initialise(
      [](absl::string_view tensor, uint64_t first, absl::Span<float> values) {
        for (size_t i = 0; i < values.size(); ++i) values[i] = Value(0, tensor == kTensors[0] ? 0 : 1, first + i);
      },
      "0"));
  // A job with every-K that dies before its first pin is lost, and says so.
  return flags_.durability == v1::DURABILITY_EVERY_K ? session_->PinDurably() : absl::OkStatus();
}

absl::Status EmbeddedTrainer::PullParameters() {
  for (uint32_t unit = 0; unit < kTensors.size(); ++unit) {
    parameters_[unit].resize(kElements[unit]);
    BALLAST_ASSIGN_OR_RETURN(client::PendingPull pull,
                             session_->StartPull(unit, {{{.begin = 0, .end = kElements[unit]}, parameters(unit)}}));
    BALLAST_RETURN_IF_ERROR(pull.Await());
  }
  return absl::OkStatus();
}

absl::Status EmbeddedTrainer::Push(int64_t step, uint32_t unit, absl::Span<const std::byte> parameters) {
  const Memory gradient = GradientOf(step, unit, parameters);
  const auto* const bytes = reinterpret_cast<const std::byte*>(gradient->data());
  return session_->PushBorrowed(unit, {{0, {bytes, gradient->size() * sizeof(bf16)}}}, {}, gradient,
                                client::Keep::kUntilApplied);
}

absl::Status EmbeddedTrainer::StepWithLeases(int64_t step) {
  std::optional<client::WorkingCopyLease> held;
  for (uint32_t unit = 0; unit < kTensors.size(); ++unit) {
    BALLAST_ASSIGN_OR_RETURN(client::WorkingCopyLease lease,
                             session_->StartLease(unit, {{.begin = 0, .end = kElements[unit]}}));
    BALLAST_ASSIGN_OR_RETURN(const auto parts, lease.Await());
    std::vector<std::byte> read;
    for (const client::LeasedPart& part : parts) read.insert(read.end(), part.bytes.begin(), part.bytes.end());
    BALLAST_RETURN_IF_ERROR(Push(step, unit, read));
    if (unit == 0) held.emplace(std::move(lease));
  }
  BALLAST_RETURN_IF_ERROR(session_->Step(OptionsOf(step)).status());
  absl::SleepFor(kHeld);
  return absl::OkStatus();
}

absl::Status EmbeddedTrainer::StepWithLoans(int64_t step) {
  std::vector<model::LentTensor> lent(kTensors.size());
  std::array<Memory, kTensors.size()> gradients;
  for (uint32_t unit = 0; unit < kTensors.size(); ++unit) {
    lent[unit].working = parameters(unit).data();
    if (session_->takes_gradients()) {
      gradients[unit] = GradientOf(step, unit, parameters(unit));
      lent[unit].gradient = reinterpret_cast<const std::byte*>(gradients[unit]->data());
    } else {
      BALLAST_RETURN_IF_ERROR(Push(step, unit, parameters(unit)));
    }
  }
  BALLAST_RETURN_IF_ERROR(session_->Lend(lent));
  BALLAST_RETURN_IF_ERROR(session_->Step(OptionsOf(step)).status());
  BALLAST_RETURN_IF_ERROR(session_->AwaitUnit(1));
  return session_->AwaitApplied();
}

absl::Status EmbeddedTrainer::PrintDigest() {
  uint32_t digest = 0;
  for (size_t i = 0; i < kTensors.size(); ++i) {
    for (const client::Content content :
         {client::Content::kWorking, client::Content::kMaster, client::Content::kMoment1, client::Content::kMoment2}) {
      std::vector<float> values(kElements[i]);
      BALLAST_RETURN_IF_ERROR(session_->Read(kTensors[i], content, session_->version(), absl::MakeSpan(values)));
      digest =
          kernels::Crc32c({reinterpret_cast<const std::byte*>(values.data()), values.size() * sizeof(float)}, digest);
    }
  }
  std::printf("digest %08x\n", digest);
  return absl::OkStatus();
}

absl::Status EmbeddedTrainer::Run() {
  BALLAST_RETURN_IF_ERROR(Open());
  int64_t step = 0;
  const std::vector<std::string>& blobs = session_->resumed_blobs();
  if (!blobs.empty() && !absl::SimpleAtoi(blobs[0], &step)) return absl::DataLossError("blob " + blobs[0]);
  std::printf("continued after %ld\n", step);
  if (flags_.lends_parameters) BALLAST_RETURN_IF_ERROR(PullParameters());
  while (step < flags_.steps) {
    ++step;
    BALLAST_RETURN_IF_ERROR(flags_.lends_parameters ? StepWithLoans(step) : StepWithLeases(step));
    std::printf("step %ld\n", step);
    std::fflush(stdout);
  }
  BALLAST_RETURN_IF_ERROR(PrintDigest());
  session_ = nullptr;
  server_->Stop();
  return absl::OkStatus();
}

}  // namespace
}  // namespace ballast

int main(int argc, char** argv) {
  ballast::Flags flags;
  if (argc != 5 || !absl::SimpleAtoi(argv[4], &flags.steps)) {
    std::fprintf(stderr, "usage: embedded_trainer DIRECTORY step|every-k leases|loans STEPS\n");
    return 2;
  }
  flags.directory = argv[1];
  if (std::strcmp(argv[2], "every-k") == 0) flags.durability = ballast::v1::DURABILITY_EVERY_K;
  flags.lends_parameters = std::strcmp(argv[3], "loans") == 0;
  const absl::Status status = ballast::EmbeddedTrainer(flags).Run();
  if (status.ok()) return 0;
  std::fprintf(stderr, "embedded_trainer: %s\n", status.ToString().c_str());
  return 1;
}
