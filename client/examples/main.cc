// train_bytes_lm: trains a byte-level language model whose state lives on Ballast servers, or, with --reference, in
// this process alone. See README.md.
#include <signal.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <map>
#include <optional>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "ballast/client/collective/file_rendezvous.h"
#include "ballast/client/collective/gloo_collective.h"
#include "ballast/client/collective/loopback_collective.h"
#include "ballast/client/examples/bytes_lm/corpus.h"
#include "ballast/client/examples/local_source.h"
#include "ballast/client/examples/master_weights.h"
#include "ballast/client/examples/report.h"
#include "ballast/client/examples/server_source.h"
#include "ballast/client/examples/trainer.h"
#include "ballast/client/grpc_transport.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/model/protocol.h"

namespace ballast::client {
namespace {

std::atomic<int> stop_signal{0};

void OnSignal(int signal) { stop_signal.store(signal); }

// From here on a signal ends the run between two steps; before, and by a second one, at once.
void CatchSignals() {
  struct sigaction action = {};
  action.sa_handler = OnSignal;
  action.sa_flags = SA_RESETHAND | SA_RESTART;
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
}

struct Flags {
  bool reference = false;
  std::vector<std::string> servers;
  model::Access access;
  int rank = 0;
  int world_size = 1;
  std::string rendezvous;
  std::string host = "127.0.0.1";
  std::string job = "bytes_lm";
  std::string resume = "never";
  double timeout_s = 120;
  uint64_t chunk_elements = uint64_t{1} << 18;
  kernels::OptimizerSpec optimizer;
  std::string durability = "step";
  uint64_t pin_interval = 0;
  uint32_t replicas = 0;
  double failover_after_s = 5;
  std::vector<std::string> text = {kDefaultTextPath};
  uint64_t stop_at = 0;
  std::string json;
  std::string dump_master;
  bool digest = false;
  uint64_t log_every = 10;
  std::optional<double> beta3, alpha;
  TrainerOptions trainer;
};

void AddJobFlags(CLI::App& app, Flags& flags) {
  app.add_flag("--reference", flags.reference, "Keep all state in this process: no servers, no session, the same bits");
  app.add_option("--servers", flags.servers, "State servers, host:port, separated by commas")->delimiter(',');
  app.add_option("--rank", flags.rank, "This trainer's rank")->capture_default_str();
  app.add_option("--world-size", flags.world_size, "Trainers of the group")
      ->capture_default_str()
      ->check(CLI::Range(1, 4096));
  app.add_option("--rendezvous", flags.rendezvous, "Directory where the ranks find each other");
  app.add_option("--host", flags.host, "This machine's name or address, by which the other ranks reach it")
      ->capture_default_str();
  app.add_option("--ca", flags.access.ca, "CAs of the servers (PEM): connections are TLS");
  app.add_option("--certificate", flags.access.certificate, "This trainer's certificate (PEM), with --key");
  app.add_option("--key", flags.access.key, "Its private key (PEM)");
  app.add_option("--token-file", flags.access.token_file, "A bearer token for the servers");
  app.add_option("--job", flags.job, "The job's name on the servers")->capture_default_str();
  app.add_option("--resume", flags.resume, "What to do about an existing job of that name")
      ->capture_default_str()
      ->check(CLI::IsMember({"never", "auto", "must"}));
  app.add_option(
         "--durability", flags.durability,
         "What a decided step survives: killed servers and trainers (step); killed trainers only (none); killed "
         "trainers, while a restarted server goes back at most --pin-interval steps (every-K)")
      ->capture_default_str()
      ->check(CLI::IsMember({"none", "step", "every-K"}));
  app.add_option("--pin-interval", flags.pin_interval, "The K of --durability every-K, in steps");
  app.add_option("--replicas", flags.replicas,
                 "On how many servers each chunk is; more than 1 needs servers that etcd names. 0: as the job has it")
      ->check(CLI::Range(0, 4));
  app.add_option("--failover-after", flags.failover_after_s,
                 "Seconds that a server of a job with copies may be silent before the group goes on without it")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  app.add_option("--timeout", flags.timeout_s, "Seconds to wait for a step or a missing rank")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  app.add_option("--chunk-elements", flags.chunk_elements,
                 "Elements per chunk of a new job: a power of two, 2^16 to 2^20")
      ->capture_default_str();
}

void AddOptimizerFlags(CLI::App& app, Flags& flags) {
  using kernels::Dtype;
  using kernels::MasterFormat;
  using kernels::MomentFormat;
  using kernels::OptimizerKind;
  kernels::OptimizerSpec& o = flags.optimizer;
  // By name alone: CLI11 would also take the numbers.
  const auto named = [&app](const char* flag, auto* value, const auto& names, const char* what) {
    std::vector<std::string> choices;
    std::string initial;
    for (const auto& [name, number] : names) {
      choices.push_back(name);
      if (number == *value) initial = name;
    }
    const auto parse = [value, names](const std::string& text) { *value = names.at(text); };
    app.add_option_function<std::string>(flag, parse, what)->default_str(initial)->check(CLI::IsMember(choices));
  };
  const std::map<std::string, Dtype> dtypes = {{"bf16", Dtype::kBf16}, {"f16", Dtype::kF16}, {"f32", Dtype::kF32}};
  std::map<std::string, Dtype> working = dtypes;
  working["f8"] = Dtype::kE4m3Blocks;
  named("--optimizer", &o.kind,
        std::map<std::string, OptimizerKind>{{"adamw", OptimizerKind::kAdamw},
                                             {"adam", OptimizerKind::kAdam},
                                             {"sgd", OptimizerKind::kSgd},
                                             {"adagrad", OptimizerKind::kAdagrad},
                                             {"lion", OptimizerKind::kLion},
                                             {"ademamix", OptimizerKind::kAdemamix}},
        "Optimizer of the servers");
  named("--moments", &o.moments,
        std::map<std::string, MomentFormat>{{"f32", MomentFormat::kF32},
                                            {"bf16", MomentFormat::kBf16},
                                            {"i8", MomentFormat::kI8},
                                            {"f8", MomentFormat::kF8}},
        "Format of the optimizer's moments");
  named("--master", &o.master,
        std::map<std::string, MasterFormat>{{"f32", MasterFormat::kF32}, {"remainder", MasterFormat::kRemainder}},
        "Format of fp32 masters on servers; remainder needs bf16 working copies");
  named("--gradient-dtype", &o.gradient, dtypes, "Dtype of gradients sent to the servers");
  named("--working-dtype", &o.working, working, "Dtype of parameters that servers send");
  app.add_flag("--amsgrad", o.amsgrad, "AdamW and Adam: keep the largest second moment");
  app.add_flag("--momentum", o.momentum, "SGD: keep a momentum buffer; --beta1 is the momentum");
  app.add_flag("--nesterov", o.nesterov, "SGD with momentum: Nesterov's");
  app.add_option("--beta1", flags.trainer.beta1, "Decay of the first moment")->capture_default_str();
  app.add_option("--beta2", flags.trainer.beta2, "Decay of the second moment")->capture_default_str();
  app.add_option("--beta3", flags.beta3, "AdEMAMix: decay of the slow mean (0.9999)");
  app.add_option("--alpha", flags.alpha, "AdEMAMix: weight of the slow mean (5)");
}

void AddTrainingFlags(CLI::App& app, Flags& flags) {
  TrainerOptions& t = flags.trainer;
  app.add_option("--text", flags.text, "Files and directories to train on")->capture_default_str();
  app.add_option("--steps", t.schedule.total_steps, "Steps of the whole run, which the schedule spans")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  app.add_option("--stop-at", flags.stop_at, "End after this step, before --steps; resume later");
  app.add_option("--seed", t.seed, "Seed of initial values and of the choice of text")->capture_default_str();
  app.add_option("--layers", t.shape.layers, "Transformer layers")->capture_default_str();
  app.add_option("--width", t.shape.width, "Width of the residual stream")->capture_default_str();
  app.add_option("--heads", t.shape.heads, "Attention heads")->capture_default_str();
  app.add_option("--context", t.shape.context, "Bytes per sequence")->capture_default_str();
  app.add_option("--batch", t.shape.sequences, "Sequences per micro-batch")->capture_default_str();
  app.add_option("--micro-batches", t.micro_batches, "Micro-batches per step over all ranks, a power of two")
      ->capture_default_str();
  app.add_option("--lr", t.schedule.peak, "Peak learning rate")->capture_default_str()->check(CLI::NonNegativeNumber);
  app.add_option("--warmup", t.schedule.warmup_steps, "Steps of linear warm-up")->capture_default_str();
  app.add_option("--weight-decay", t.weight_decay, "Weight decay of matrices; norm gains have none")
      ->capture_default_str()
      ->check(CLI::NonNegativeNumber);
  app.add_option("--clip", t.max_norm, "Bound on the gradient's global norm; 0 = none")
      ->capture_default_str()
      ->check(CLI::NonNegativeNumber);
  app.add_option("--prefetch", t.prefetch_units, "Units pulled ahead of use")
      ->capture_default_str()
      ->check(CLI::Range(0, 64));
  app.add_option("--threads", t.threads, "Threads that share this rank's micro-batches")->capture_default_str();
}

void AddOutputFlags(CLI::App& app, Flags& flags) {
  app.add_option("--json", flags.json, "Write this rank's figures to FILE");
  app.add_option("--dump-master", flags.dump_master, "Write the final fp32 master weights to FILE (rank 0)");
  app.add_flag("--digest", flags.digest, "Print the CRC32C of the final master weights (rank 0)");
  app.add_option("--log-every", flags.log_every, "Steps between lines when the output is not a terminal")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
}

absl::Status BadFlag(absl::string_view message) {
  return model::Error(absl::StatusCode::kInvalidArgument, model::kBadConfig, message);
}

absl::Status CheckFlags(const Flags& flags) {
  if (flags.rank < 0 || flags.rank >= flags.world_size) {
    return BadFlag(
        absl::StrCat("--rank must be from 0 to ", flags.world_size - 1, " (--world-size - 1), got ", flags.rank));
  }
  if (flags.reference && flags.world_size > 1)
    return BadFlag("--reference runs in one process; use --threads instead of --world-size");
  if (flags.reference && !flags.servers.empty())
    return BadFlag("--reference uses no servers; leave out one of the two");
  if (!flags.reference && flags.servers.empty()) return BadFlag("--servers host:port,... is needed, or --reference");
  if (flags.world_size > 1 && flags.rendezvous.empty()) {
    return BadFlag("--rendezvous DIR is needed for more than one rank: a directory that all of them see");
  }
  if ((flags.durability == "every-K") != (flags.pin_interval > 0)) {
    return BadFlag(absl::StrCat("--durability every-K and --pin-interval K (at least 1) go together, got --durability ",
                                flags.durability, " and --pin-interval ", flags.pin_interval));
  }
  if (const std::string why = kernels::Unsupported(flags.optimizer); !why.empty()) return BadFlag(why);
  if ((flags.beta3 || flags.alpha) && flags.optimizer.kind != kernels::OptimizerKind::kAdemamix) {
    return BadFlag("--beta3 and --alpha are of --optimizer ademamix");
  }
  return CheckShape(flags.trainer.shape);
}

// This rank's seat in its group. The rendezvous holds the rank as long as it lives.
struct Seat {
  std::unique_ptr<FileRendezvous> rendezvous;
  std::unique_ptr<Collective> collective;
};

absl::StatusOr<Seat> TakeSeat(const Flags& flags) {
  Seat seat;
  if (flags.world_size == 1) {
    seat.collective = std::move(MakeLoopbackGroup(1).front());
    return seat;
  }
  FileRendezvousOptions rendezvous;
  rendezvous.directory = flags.rendezvous;
  rendezvous.rank = flags.rank;
  rendezvous.world_size = flags.world_size;
  rendezvous.timeout = absl::Seconds(flags.timeout_s);
  BALLAST_ASSIGN_OR_RETURN(seat.rendezvous, FileRendezvous::Join(rendezvous));
  GlooOptions gloo;
  gloo.host = flags.host;
  // Longer than rank 0 waits for servers, so that the others hear from rank 0 which server is down.
  gloo.timeout = absl::Seconds(flags.timeout_s + 10);
  BALLAST_ASSIGN_OR_RETURN(seat.collective, MakeGloo(seat.rendezvous.get(), flags.rank, flags.world_size, gloo));
  return seat;
}

SessionOptions MakeSessionOptions(const Flags& flags) {
  SessionOptions options;
  options.job = flags.job;
  options.resume = flags.resume == "never" ? Resume::kNever : flags.resume == "auto" ? Resume::kAuto : Resume::kMust;
  options.group_count = kGroupCount;
  options.chunk_elements = flags.chunk_elements;
  options.optimizer = flags.optimizer;
  options.durability = flags.durability == "step"   ? v1::DURABILITY_STEP
                       : flags.durability == "none" ? v1::DURABILITY_NONE
                                                    : v1::DURABILITY_EVERY_K;
  options.pin_interval = flags.pin_interval;
  options.replicas = flags.replicas;
  options.failover_after = absl::Seconds(flags.failover_after_s);
  options.seed = flags.trainer.seed;
  options.access = flags.access;
  options.step_timeout = absl::Seconds(flags.timeout_s);
  options.open_timeout = std::min(options.open_timeout, options.step_timeout);
  options.progress = [rank = flags.rank](const std::string& line) {
    absl::FPrintF(stderr, "rank %d: %s\n", rank, line);
  };
  return options;
}

// Trains to the end, or to a signal. Returns the signal's number, else 0.
absl::StatusOr<int> Train(const Flags& flags, const Corpus& corpus, ParameterSource& source, Trainer& trainer) {
  const uint64_t steps = flags.trainer.schedule.total_steps;
  const int64_t end = static_cast<int64_t>(flags.stop_at == 0 ? steps : std::min(steps, flags.stop_at));
  ReportOptions options;
  options.quiet = flags.rank != 0;
  options.live = isatty(STDOUT_FILENO) != 0;
  options.log_every = flags.log_every;
  options.steps_total = steps;
  options.start_version = source.version();
  options.tokens_per_step = uint64_t(flags.trainer.shape.tokens()) * flags.trainer.micro_batches;
  options.unigram_entropy = corpus.UnigramEntropy();
  Report report(options);

  CatchSignals();
  int signal = 0;
  while (source.version() < end && signal == 0) {
    const absl::StatusOr<TrainerStep> step = trainer.Step();
    if (!step.ok()) {
      // Writes the figures so far. A failure to write is ignored: the training's error says more.
      if (!flags.json.empty()) (void)report.WriteJson(flags.json, std::nullopt);
      return step.status();
    }
    report.Add(*step);
    signal = step->stop_signal;
  }
  std::optional<uint32_t> digest;
  if (signal == 0 && flags.rank == 0 && (flags.digest || !flags.dump_master.empty())) {
    BALLAST_ASSIGN_OR_RETURN(digest, SaveMasterWeights(flags.trainer.shape, source, flags.dump_master));
  }
  report.Summarise(digest);
  if (signal != 0 && flags.rank == 0) {
    absl::PrintF("stopped by signal %d after step %d%s\n", signal, source.version(),
                 flags.reference ? "" : "; --resume must continues the job");
  }
  if (!flags.json.empty()) BALLAST_RETURN_IF_ERROR(report.WriteJson(flags.json, digest));
  return signal;
}

absl::StatusOr<int> RunReference(const Flags& flags, const Corpus& corpus) {
  BALLAST_ASSIGN_OR_RETURN(const auto source, LocalSource::Create(flags.trainer.shape, flags.trainer.seed,
                                                                  flags.chunk_elements, flags.optimizer));
  const std::unique_ptr<Collective> collective = std::move(MakeLoopbackGroup(1).front());
  BALLAST_ASSIGN_OR_RETURN(const auto trainer, Trainer::Create(flags.trainer, &corpus, source.get(), collective.get()));
  return Train(flags, corpus, *source, *trainer);
}

absl::StatusOr<int> RunOnServers(const Flags& flags, const Corpus& corpus) {
  TuneProgram();
  BALLAST_ASSIGN_OR_RETURN(const Seat seat, TakeSeat(flags));
  BALLAST_ASSIGN_OR_RETURN(
      auto session, Session::Connect(MakeSessionOptions(flags), SessionTensors(flags.trainer.shape), flags.servers,
                                     seat.collective.get()));
  const std::vector<std::string> blobs = session->resumed_blobs();
  const int64_t resumed = session->version();
  BALLAST_ASSIGN_OR_RETURN(const auto source,
                           ServerSource::Create(std::move(session), flags.trainer.shape, flags.trainer.seed));
  BALLAST_ASSIGN_OR_RETURN(const auto trainer,
                           Trainer::Create(flags.trainer, &corpus, source.get(), seat.collective.get()));
  if (resumed > 0) {
    const int64_t step = blobs.empty() ? 0 : Trainer::StepOf(blobs[0]);
    source->SetAhead(resumed - step);
    // The first values of a job have none.
    for (const std::string& blob : blobs) {
      if (!blob.empty()) BALLAST_RETURN_IF_ERROR(trainer->CheckBlob(blob, step));
    }
    if (flags.rank == 0) absl::PrintF("job '%s' continues after step %d\n", flags.job, step);
  }
  return Train(flags, corpus, *source, *trainer);
}

absl::StatusOr<int> Run(const Flags& flags) {
  BALLAST_RETURN_IF_ERROR(CheckFlags(flags));
  BALLAST_ASSIGN_OR_RETURN(const Corpus corpus, Corpus::Load(flags.text));
  if (flags.rank == 0) {
    uint64_t parameters = 0;
    for (const ModelTensor& tensor : TensorsOf(flags.trainer.shape)) parameters += tensor.elements();
    absl::PrintF("%d parameters in %d layers; %d bytes of text in %d files, unigram entropy %.4f nats per byte\n",
                 parameters, flags.trainer.shape.layers, corpus.text().size(), corpus.file_count(),
                 corpus.UnigramEntropy());
  }
  return flags.reference ? RunReference(flags, corpus) : RunOnServers(flags, corpus);
}

int Main(int argc, char** argv) {
  Flags flags;
  flags.trainer.stop_signal = &stop_signal;
  CLI::App app("Trains a byte-level language model whose state lives on Ballast servers.", "train_bytes_lm");
  app.set_version_flag("--version", std::string("train_bytes_lm ") + model::Version());
  AddJobFlags(app, flags);
  AddOptimizerFlags(app, flags);
  AddTrainingFlags(app, flags);
  AddOutputFlags(app, flags);
  CLI11_PARSE(app, argc, argv);
  const GroupHyper defaults = DefaultHyper(flags.optimizer.kind);
  flags.trainer.beta3 = flags.beta3.value_or(defaults.beta3);
  flags.trainer.alpha = flags.alpha.value_or(defaults.alpha);

  const absl::StatusOr<int> signal = Run(flags);
  if (!signal.ok()) {
    absl::FPrintF(stderr, "train_bytes_lm: rank %d: %s [%s]\n", flags.rank, signal.status().message(),
                  model::ReasonOf(signal.status()));
    return 1;
  }
  return *signal == 0 ? 0 : 128 + *signal;
}

}  // namespace
}  // namespace ballast::client

int main(int argc, char** argv) { return ballast::client::Main(argc, argv); }
