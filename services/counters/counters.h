// Counters of a state server since its start. services/monitoring turns them into Prometheus families.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "ballast/storage/io/duration_histogram.h"

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
  kExport,
  kGetServerStatus,
  kGetSteps,
  kDropJob,
  kSetBudget
};
inline constexpr int kCalls = 16;
inline constexpr std::array<const char*, kCalls> kCallNames = {
    "Identify", "GetJob", "Fence",           "Open",     "Push",    "Norm",     "Seal", "Commit", "Pull", "Pin",
    "Unpin",    "Export", "GetServerStatus", "GetSteps", "DropJob", "SetBudget"};

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

// Memory that clients on this host share with the server, and payloads that went through it.
struct SharedMemoryCounters {
  std::atomic<uint64_t> mapped_bytes{0};
  std::atomic<uint64_t> mapped_bytes_max{0};
  std::atomic<uint64_t> in_bytes{0};
  std::atomic<uint64_t> out_bytes{0};
};

struct ServerCounters {
  std::array<storage::DurationHistogram, kCalls> calls;
  ErrorCounts errors;
  // Looks at a seal, be it new or waiting, and answers that tell what a step waits for: tests hold how few they are.
  std::atomic<uint64_t> evaluated_seals{0};
  std::atomic<uint64_t> told_pending{0};
  std::atomic<uint64_t> waiting_requests{0};
  std::atomic<uint64_t> waiting_request_bytes{0};  // without payloads of pushes
  std::atomic<uint64_t> waiting_push_bytes{0};
  // A client's memory, which counts itself, may outlive the server.
  const std::shared_ptr<SharedMemoryCounters> shared_memory = std::make_shared<SharedMemoryCounters>();
};

}  // namespace ballast::services
