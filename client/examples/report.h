// Output of a run for the user: a line per step while training, a summary, and figures for programs.
#pragma once

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "ballast/client/examples/trainer.h"

namespace ballast::client {

struct ReportOptions {
  std::FILE* stream = stdout;
  bool quiet = false;       // no lines at all: ranks other than 0
  bool live = false;        // rewrite one line each step, for terminals
  uint64_t log_every = 10;  // steps between lines if not `live`
  uint64_t steps_total = 0;
  int64_t start_version = 0;
  uint64_t tokens_per_step = 0;  // over all ranks
  double unigram_entropy = 0;
};

// Threads: one.
class Report {
 public:
  explicit Report(const ReportOptions& options);

  void Add(const TrainerStep& step);
  void Summarise(std::optional<uint32_t> digest) const;
  // Wall and CPU seconds are this process's; wall seconds count from construction. INTERNAL if the file cannot be
  // written.
  absl::Status WriteJson(const std::string& path, std::optional<uint32_t> digest) const;

 private:
  void PrintStep(const TrainerStep& step, double seconds, uint64_t steps) const;
  // Mean over the first / the last ten steps, fewer if there were fewer.
  double FirstLoss() const;
  double LastLoss() const;
  double Seconds() const;

  const ReportOptions options_;
  const std::chrono::steady_clock::time_point start_;
  std::vector<double> losses_;
  StepTimes times_;
  uint64_t skipped_ = 0;
  int64_t version_ = 0;
  // Times since the last line.
  StepTimes line_times_;
  uint64_t line_steps_ = 0;
};

}  // namespace ballast::client
