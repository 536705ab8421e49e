// The cost, in loss, of keeping AdamW's moments in fewer bytes: trains the example in one process with each format,
// from the same initial values on the same text. Usage: moment_formats_bench [--steps N] [--threads N] [--json FILE];
// takes minutes.
//
// The loss compared is the mean over the last tenth of the steps, because the loss of a single step is noisy. ratio:
// loss with fp32 / loss, higher is better. Exit code 1 if any ratio is below 0.99.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <fstream>

#include "ballast/client/collective/loopback_collective.h"
#include "ballast/client/examples/bytes_lm/corpus.h"
#include "ballast/client/examples/local_source.h"
#include "ballast/client/examples/trainer.h"
#include "ballast/proto/base/status.h"

namespace ballast::bench {
namespace {

// Mean loss of the last tenth.
absl::StatusOr<double> LastLoss(const client::TrainerOptions& options, const client::Corpus& corpus,
                                kernels::MomentFormat format, const char* name) {
  BALLAST_ASSIGN_OR_RETURN(const auto source, client::LocalSource::Create(options.shape, options.seed,
                                                                          uint64_t{1} << 18, {.moments = format}));
  const auto collective = std::move(client::MakeLoopbackGroup(1).front());
  BALLAST_ASSIGN_OR_RETURN(const auto trainer,
                           client::Trainer::Create(options, &corpus, source.get(), collective.get()));
  const uint64_t steps = options.schedule.total_steps, tail = std::max<uint64_t>(1, steps / 10);
  double sum = 0;
  for (uint64_t step = 1; step <= steps; ++step) {
    BALLAST_ASSIGN_OR_RETURN(const client::TrainerStep result, trainer->Step());
    if (step > steps - tail) sum += result.loss;
    if (step % std::max<uint64_t>(1, steps / 10) == 0)
      std::printf("  %s: step %lu of %lu, loss %.4f\n", name, step, steps, result.loss);
    std::fflush(stdout);
  }
  return sum / static_cast<double>(tail);
}

int Main(int argc, char** argv) {
  client::TrainerOptions options;
  options.schedule.total_steps = 300;
  options.threads = 2;
  std::string json;
  CLI::App app("Loss after training the example with each moment format");
  app.add_option("--steps", options.schedule.total_steps, "Steps per format")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  app.add_option("--threads", options.threads, "Threads that share the micro-batches")->capture_default_str();
  app.add_option("--json", json, "Also write the rows to this file");
  CLI11_PARSE(app, argc, argv);
  const absl::StatusOr<client::Corpus> corpus = client::Corpus::Load({client::kDefaultTextPath});
  if (!corpus.ok()) {
    std::fprintf(stderr, "moment_formats_bench: %s\n", std::string(corpus.status().message()).c_str());
    return 1;
  }
  double reference = 0;
  bool good = true;
  std::string rows;
  for (const auto& [name, format] : {std::pair{"f32", kernels::MomentFormat::kF32},
                                     {"bf16", kernels::MomentFormat::kBf16},
                                     {"i8", kernels::MomentFormat::kI8},
                                     {"f8", kernels::MomentFormat::kF8}}) {
    const absl::StatusOr<double> loss = LastLoss(options, *corpus, format, name);
    if (!loss.ok()) {
      std::fprintf(stderr, "moment_formats_bench: %s\n", std::string(loss.status().message()).c_str());
      return 1;
    }
    if (reference == 0) reference = *loss;
    constexpr uint64_t kMany = uint64_t{1} << 20;
    const double bytes = 2 * static_cast<double>(MomentBytes(format, kMany) + MomentScaleBytes(format, kMany)) / kMany;
    char row[160];
    std::snprintf(row, sizeof(row),
                  "{\"name\": \"%s\", \"bytes_per_parameter\": %.4f, \"loss\": %.6f, \"ratio\": %.6f}", name, bytes,
                  *loss, reference / *loss);
    std::printf("%s\n", row);
    good = good && reference / *loss >= 0.99;
    rows += std::string(rows.empty() ? "  " : ",\n  ") + row;
  }
  if (!json.empty()) std::ofstream(json) << "{\"rows\": [\n" << rows << "\n]}\n";
  return good ? 0 : 1;
}

}  // namespace
}  // namespace ballast::bench

int main(int argc, char** argv) { return ballast::bench::Main(argc, argv); }
