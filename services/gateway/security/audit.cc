#include "ballast/services/gateway/security/audit.h"

#include <spdlog/pattern_formatter.h>
#include <spdlog/sinks/basic_file_sink.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "ballast/proto/base/status.h"

namespace ballast::services {
namespace {

constexpr size_t kFieldBytesMax = 512;  // of what a peer chose: names of jobs, messages

// Nothing that a peer sent can end the line, or look like another field.
std::string AuditField(absl::string_view text) {
  return absl::StrCat("\"", absl::CEscape(text.substr(0, kFieldBytesMax)), "\"");
}

}  // namespace

AuditLog::AuditLog(std::string target) : target_(std::move(target)) {}
AuditLog::~AuditLog() = default;

absl::Status AuditLog::Open() {
  if (target_ == "none") return absl::OkStatus();
  spdlog::sink_ptr sink;
  try {
    if (target_ == "stderr") {
      sink = std::make_shared<spdlog::sinks::stderr_sink_mt>();
    } else {
      sink = std::make_shared<spdlog::sinks::basic_file_sink_mt>(target_);
    }
  } catch (const spdlog::spdlog_ex& error) {
    return model::Error(absl::StatusCode::kInvalidArgument, model::kBadConfig,
                        absl::StrCat("audit_log: expected a path that can be written, stderr or none, got '", target_,
                                     "' (", error.what(), ")"));
  }
  if (queue_ == nullptr) queue_ = std::make_unique<LogQueue>(LogKind::kAudit);
  auto logger = queue_->MakeLogger("audit", std::move(sink));
  logger->set_formatter(
      std::make_unique<spdlog::pattern_formatter>("%Y-%m-%dT%H:%M:%S.%eZ audit %v", spdlog::pattern_time_type::utc));
  logger->flush_on(spdlog::level::info);
  absl::MutexLock lock(&mu_);
  logger_ = std::move(logger);
  return absl::OkStatus();
}

bool AuditLog::Drain(absl::Duration patience) { return queue_ == nullptr || queue_->Drain(patience); }

void AuditLog::Ended(const AuditedCall& call, const absl::Status& status) {
  std::string verdict = "verdict=ok";
  if (!status.ok()) {
    verdict = absl::StrCat("verdict=failed code=", absl::StatusCodeToString(status.code()),
                           " reason=", AuditField(model::ReasonOf(status)), " message=", AuditField(status.message()));
  }
  absl::MutexLock lock(&mu_);
  Write(call, verdict);
}

void AuditLog::Denied(const AuditedCall& call, absl::string_view why, absl::string_view message) {
  absl::MutexLock lock(&mu_);
  if (const int64_t now = absl::ToUnixSeconds(absl::Now()); now != second_) {
    second_ = now;
    denials_ = 0;
  }
  if (++denials_ > kDenialsPerSecond) {
    ++left_out_;
    return;
  }
  const std::string left_out = left_out_ > 0 ? absl::StrCat(" denials_left_out=", std::exchange(left_out_, 0)) : "";
  Write(call, absl::StrCat("verdict=denied why=", why, " message=", AuditField(message), left_out));
}

void AuditLog::Write(const AuditedCall& call, const std::string& verdict) {
  if (logger_ == nullptr) return;
  logger_->info("call={} identity={} kind={} peer={} job={} {}", call.call, AuditField(call.identity), call.kind,
                AuditField(call.peer), AuditField(call.job), verdict);
}

}  // namespace ballast::services
