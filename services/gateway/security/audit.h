// The audit log: a line per fence, Open, drop, new budget and refusal.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "ballast/services/threads/log_queue.h"

namespace spdlog {
class logger;
}

namespace ballast::services {

// A call, as the audit log tells it.
struct AuditedCall {
  const char* call = "";
  std::string identity;  // empty: nobody's
  // Token, certificate or none: a token's name and a certificate's may be the same, and their rights differ.
  const char* kind = "none";
  std::string peer;  // as gRPC spells it: "ipv4:10.0.0.3:4711"
  std::string job;   // empty: the whole server's
};

// Threads: any. None waits for whoever reads the log.
class AuditLog {
 public:
  // A path, "stderr", or "none".
  explicit AuditLog(std::string target);
  ~AuditLog();

  // Opens the file, anew if it is open: whoever rotates logs moves the file away before. INVALID_ARGUMENT (BAD_CONFIG)
  // if it cannot be opened; an open one is written on then.
  absl::Status Open();
  // The call's end: `verdict` is "ok", or the code with its reason.
  void Ended(const AuditedCall& call, const absl::Status& status);
  // A refusal. At most kDenialsPerSecond are written; the next line of a later second tells how many were left out.
  void Denied(const AuditedCall& call, absl::string_view why, absl::string_view message);

  // Waits until all lines so far are written; false if that takes longer than `patience`.
  bool Drain(absl::Duration patience);

  static constexpr int kDenialsPerSecond = 100;

 private:
  void Write(const AuditedCall& call, const std::string& verdict) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const std::string target_;
  std::unique_ptr<LogQueue> queue_;  // null: none. Made by the first Open, before there are threads
  absl::Mutex mu_;
  std::shared_ptr<spdlog::logger> logger_ ABSL_GUARDED_BY(mu_);  // null: none
  int64_t second_ ABSL_GUARDED_BY(mu_) = 0;
  int denials_ ABSL_GUARDED_BY(mu_) = 0;  // in this second
  uint64_t left_out_ ABSL_GUARDED_BY(mu_) = 0;
};

}  // namespace ballast::services
