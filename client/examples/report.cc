#include "ballast/client/examples/report.h"

#include <sys/resource.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "ballast/proto/base/status.h"

namespace ballast::client {
namespace {

constexpr size_t kMeanSteps = 10;

double CpuSeconds() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_usec) * 1e-6;
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

template <typename Iterator>
double MeanOf(Iterator begin, Iterator end) {
  return begin == end ? 0 : std::accumulate(begin, end, 0.0) / static_cast<double>(end - begin);
}

std::string Shares(const StepTimes& times) {
  const double percent = times.total() > 0 ? 100 / times.total() : 0;
  return absl::StrFormat("pull %2.0f%% compute %2.0f%% push %2.0f%% update %2.0f%% waiting %2.0f%%",
                         times.pull * percent, times.compute * percent, times.push * percent, times.update * percent,
                         times.waiting * percent);
}

// JSON knows neither NaN nor infinity.
std::string JsonNumber(double value) { return std::isfinite(value) ? absl::StrFormat("%.9g", value) : "null"; }

}  // namespace

Report::Report(const ReportOptions& options)
    : options_(options), start_(std::chrono::steady_clock::now()), version_(options.start_version) {}

void Report::Add(const TrainerStep& step) {
  losses_.push_back(step.loss);
  times_.Add(step.times);
  line_times_.Add(step.times);
  ++line_steps_;
  skipped_ += step.skipped;
  version_ = step.version;
  const uint64_t version = static_cast<uint64_t>(step.version);
  const bool due =
      options_.live || version % options_.log_every == 0 || version == options_.steps_total || step.skipped;
  if (options_.quiet || !due) return;
  PrintStep(step, line_times_.total(), line_steps_);
  line_times_ = StepTimes();
  line_steps_ = 0;
}

void Report::PrintStep(const TrainerStep& step, double seconds, uint64_t steps) const {
  const double rate = seconds > 0 ? static_cast<double>(steps * options_.tokens_per_step) / seconds : 0;
  const std::string line =
      absl::StrFormat("step %d/%d  loss %.4f (unigram %.4f)  norm %.3f  %.0f tokens/s  %s%s", step.version,
                      options_.steps_total, step.loss, options_.unigram_entropy, step.norm, rate, Shares(line_times_),
                      step.skipped ? "  SKIPPED: Inf or NaN" : "");
  // Back to the start, and clear what a longer line left.
  absl::FPrintF(options_.stream, "%s%s%s", options_.live ? "\r" : "", line, options_.live ? "\x1b[K" : "\n");
  std::fflush(options_.stream);
}

double Report::FirstLoss() const {
  return MeanOf(losses_.begin(), losses_.begin() + static_cast<ptrdiff_t>(std::min(losses_.size(), kMeanSteps)));
}

double Report::LastLoss() const {
  return MeanOf(losses_.end() - static_cast<ptrdiff_t>(std::min(losses_.size(), kMeanSteps)), losses_.end());
}

double Report::Seconds() const {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
}

void Report::Summarise(std::optional<uint32_t> digest) const {
  if (options_.quiet) return;
  if (options_.live) absl::FPrintF(options_.stream, "\n");
  absl::FPrintF(options_.stream,
                "%d steps to version %d in %.1f s: loss %.4f -> %.4f, unigram entropy %.4f nats per byte; %s\n",
                losses_.size(), version_, Seconds(), FirstLoss(), LastLoss(), options_.unigram_entropy, Shares(times_));
  if (skipped_ > 0) absl::FPrintF(options_.stream, "%d steps were skipped: some gradient was Inf or NaN\n", skipped_);
  if (digest.has_value()) absl::FPrintF(options_.stream, "master weights CRC32C %08x\n", *digest);
  std::fflush(options_.stream);
}

absl::Status Report::WriteJson(const std::string& path, std::optional<uint32_t> digest) const {
  std::string json = "{\n";
  const auto add = [&](absl::string_view key, absl::string_view value) {
    absl::StrAppend(&json, json.size() > 2 ? ",\n" : "", "  \"", key, "\": ", value);
  };
  add("loss_first", losses_.empty() ? "null" : JsonNumber(FirstLoss()));
  add("loss_last", losses_.empty() ? "null" : JsonNumber(LastLoss()));
  add("unigram_entropy", JsonNumber(options_.unigram_entropy));
  add("seconds", JsonNumber(Seconds()));
  add("steps", absl::StrCat(losses_.size()));
  add("version", absl::StrCat(version_));
  add("skipped", absl::StrCat(skipped_));
  add("tokens", absl::StrCat(losses_.size() * options_.tokens_per_step));
  add("cpu_seconds", JsonNumber(CpuSeconds()));
  add("step_seconds",
      absl::StrFormat("{\"pull\": %.6f, \"compute\": %.6f, \"push\": %.6f, \"update\": %.6f, \"waiting\": %.6f}",
                      times_.pull, times_.compute, times_.push, times_.update, times_.waiting));
  if (digest.has_value()) add("master_digest", absl::StrFormat("\"%08x\"", *digest));
  json += "\n}\n";
  std::ofstream file(path, std::ios::trunc);
  file << json;
  file.close();
  if (!file) {
    return model::Error(absl::StatusCode::kInternal, model::kIo,
                        absl::StrCat("figures could not be written to '", path, "'"));
  }
  return absl::OkStatus();
}

}  // namespace ballast::client
