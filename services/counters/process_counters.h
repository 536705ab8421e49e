// Counters of the whole process. The part that knows a figure writes it here.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace ballast::services {

enum class LogKind { kProgram, kAudit };
inline constexpr std::array<const char*, 2> kLogNames = {"program", "audit"};

// Threads: any.
class ProcessCounters {
 public:
  // Connections of the rpc port, and their bound; 0 before there is a port.
  std::atomic<uint64_t> connections{0}, connections_max{0};
  // Connections that the server ended to make room for others, or because they made no call.
  std::atomic<uint64_t> ended_strangers{0};

  // `dropped` tells how many lines a log's queue has dropped; null: its queue is gone, and its count stays.
  void Register(LogKind kind, std::function<uint64_t()> dropped) {
    absl::MutexLock lock(&mu_);
    Log& log = logs_[static_cast<size_t>(kind)];
    if (log.dropped) log.before += log.dropped();
    log.dropped = std::move(dropped);
  }
  uint64_t DroppedLines(LogKind kind) const {
    absl::MutexLock lock(&mu_);
    const Log& log = logs_[static_cast<size_t>(kind)];
    return log.before + (log.dropped ? log.dropped() : 0);
  }

 private:
  struct Log {
    std::function<uint64_t()> dropped;
    uint64_t before = 0;
  };
  mutable absl::Mutex mu_;
  std::array<Log, kLogNames.size()> logs_ ABSL_GUARDED_BY(mu_);
};

inline ProcessCounters& OfProcess() {
  static auto* const counters = new ProcessCounters;
  return *counters;
}

}  // namespace ballast::services
