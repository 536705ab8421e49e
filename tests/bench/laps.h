// What benchmarks of pulls and pushes measure of a round, and how they show it.
#pragma once

#include <time.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"

namespace ballast::bench {

inline void Must(const absl::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "the benchmark failed: %s\n", status.ToString().c_str());
  std::exit(1);
}

template <typename T>
T Must(absl::StatusOr<T> value) {
  Must(value.status());
  return *std::move(value);
}

inline double Clock(clockid_t clock) {
  timespec now{};
  clock_gettime(clock, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// Seconds of one round: of the call that starts the work, of the caller's processor in that call, of all of it, and of
// all processors.
struct Lap {
  double call = 0, caller_cpu = 0, all = 0, cpu = 0;
};

// `cpu`: seconds of all processes that work.
template <typename Start, typename Finish>
Lap Time(
    const Start& start, const Finish& finish,
    const std::function<double()>& cpu = [] { return Clock(CLOCK_PROCESS_CPUTIME_ID); }) {
  const double began = Clock(CLOCK_MONOTONIC), spent = cpu(), mine = Clock(CLOCK_THREAD_CPUTIME_ID);
  auto started = start();
  Lap lap{.call = Clock(CLOCK_MONOTONIC) - began, .caller_cpu = Clock(CLOCK_THREAD_CPUTIME_ID) - mine};
  finish(&started);
  lap.all = Clock(CLOCK_MONOTONIC) - began;
  lap.cpu = cpu() - spent;
  return lap;
}

struct Figure {
  double median = 0, least = 0, most = 0;
};

inline Figure FigureOf(const std::vector<Lap>& laps, double Lap::*part) {
  std::vector<double> values;
  for (const Lap& lap : laps) values.push_back(lap.*part);
  std::sort(values.begin(), values.end());
  return {values[values.size() / 2], values.front(), values.back()};
}

inline void PrintHead() {
  std::printf("%-5s %-19s %9s %9s %9s %9s %9s %10s %10s %10s\n", "", "", "CPU s/GB", "least", "of memcpy", "all ms",
              "least", "call us", "least", "call CPU");
}

// `copy`: CPU seconds of a memcpy of `bytes`.
inline void Print(const char* group, const char* what, const std::vector<Lap>& laps, double bytes, double copy) {
  const Figure cpu = FigureOf(laps, &Lap::cpu), all = FigureOf(laps, &Lap::all);
  const Figure call = FigureOf(laps, &Lap::call), mine = FigureOf(laps, &Lap::caller_cpu);
  std::printf("%-5s %-19s %9.3f %9.3f %9.2f %9.2f %9.2f %10.0f %10.0f %10.0f\n", group, what, cpu.median / bytes * 1e9,
              cpu.least / bytes * 1e9, cpu.median / copy, all.median * 1e3, all.least * 1e3, call.median * 1e6,
              call.least * 1e6, mine.median * 1e6);
}

}  // namespace ballast::bench
