// Log lines on their way to a file or to standard error. The reader of those may stop, but threads that log never wait
// for it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/time/time.h"
#include "ballast/services/counters/process_counters.h"

namespace spdlog {
class logger;
namespace details {
class thread_pool;
}
namespace sinks {
class sink;
}
}  // namespace spdlog

namespace ballast::services {

// Threads: any. Has a thread that writes.
class LogQueue {
 public:
  static constexpr size_t kLinesMax = 4096;  // beyond, the oldest are dropped and counted

  // Throws std::system_error if the system makes no thread.
  explicit LogQueue(LogKind kind);
  // Writes the waiting lines, for up to a second. If the reader is stuck, leaves the queue and the thread behind.
  ~LogQueue();
  LogQueue(const LogQueue&) = delete;
  LogQueue& operator=(const LogQueue&) = delete;

  // A logger; the queue keeps the order of lines of all its loggers.
  std::shared_ptr<spdlog::logger> MakeLogger(const std::string& name, std::shared_ptr<spdlog::sinks::sink> sink);
  // Waits until all lines so far are written; false: not within `patience`.
  bool Drain(absl::Duration patience);

 private:
  const LogKind kind_;
  std::shared_ptr<spdlog::details::thread_pool> pool_;
  std::shared_ptr<spdlog::logger> marker_;  // its flush comes after all lines before
};

}  // namespace ballast::services
