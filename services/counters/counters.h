// Counters of a state server since its start. services/metrics turns them into Prometheus families.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace ballast::services {

enum class Call {
  kIdentify,
  kGetJob,
  kFence,
  kOpen,
  kPush,
  kNorm,
  kSeal,
  kCommit,
  kPull,
  kPin,
  kUnpin,
  kGetServerStatus,
  kDropJob,
  kSetBudget
};
inline constexpr int kCalls = 14;
inline constexpr std::array<const char*, kCalls> kCallNames = {
    "Identify", "GetJob", "Fence",           "Open",    "Push",     "Norm", "Seal", "Commit", "Pull",
    "Pin",      "Unpin",  "GetServerStatus", "DropJob", "SetBudget"};

// Threads: any.
class DurationHistogram {
 public:
  // Three bounds per decade from 100 us to 100 s, so that a step of a small model and a stuck disk both fall inside.
  static constexpr std::array<double, 19> kBoundsSeconds = {
      0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100};

  void Observe(absl::Duration duration) {
    const double seconds = absl::ToDoubleSeconds(duration);
    size_t bucket = 0;
    while (bucket < kBoundsSeconds.size() && seconds > kBoundsSeconds[bucket]) ++bucket;
    counts_[bucket].fetch_add(1, std::memory_order_relaxed);
    sum_nanoseconds_.fetch_add(absl::ToInt64Nanoseconds(duration), std::memory_order_relaxed);
  }
  // Observations in bucket `i` alone; the last bucket is above all bounds.
  uint64_t count(size_t i) const { return counts_[i].load(std::memory_order_relaxed); }
  double sum_seconds() const { return 1e-9 * static_cast<double>(sum_nanoseconds_.load(std::memory_order_relaxed)); }

 private:
  std::array<std::atomic<uint64_t>, kBoundsSeconds.size() + 1> counts_{};
  std::atomic<int64_t> sum_nanoseconds_{0};
};

// Errors by (call, reason). Reasons come from a fixed list, so the map is bounded.
class ErrorCounts {
 public:
  void Add(Call call, const std::string& reason) {
    absl::MutexLock lock(&mu_);
    ++counts_[{call, reason}];
  }
  std::map<std::pair<Call, std::string>, uint64_t> Get() const {
    absl::MutexLock lock(&mu_);
    return counts_;
  }

 private:
  mutable absl::Mutex mu_;
  std::map<std::pair<Call, std::string>, uint64_t> counts_ ABSL_GUARDED_BY(mu_);
};

struct ServerCounters {
  std::array<DurationHistogram, kCalls> calls;
  ErrorCounts errors;
  std::atomic<uint64_t> received_bytes{0};  // payloads of pushes
  std::atomic<uint64_t> sent_bytes{0};      // payloads of pulls
  std::atomic<uint64_t> waiting_requests{0};
  std::atomic<uint64_t> waiting_request_bytes{0};  // without payloads of pushes
  std::atomic<uint64_t> waiting_push_bytes{0};
  DurationHistogram step;       // from one decision to the next of a job
  DurationHistogram update;     // applying a decided step to this server's chunks
  DurationHistogram seal_wait;  // from a seal to its prepared answer
};

}  // namespace ballast::services
