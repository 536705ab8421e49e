#include "ballast/services/threads/log_queue.h"

#include <spdlog/async.h>
#include <spdlog/sinks/null_sink.h>
#include <spdlog/spdlog.h>

#include <utility>

#include "absl/time/clock.h"

namespace ballast::services {
namespace {

constexpr absl::Duration kPatience = absl::Seconds(1);
constexpr absl::Duration kLook = absl::Milliseconds(1);

}  // namespace

LogQueue::LogQueue(LogKind kind)
    : kind_(kind),
      pool_(std::make_shared<spdlog::details::thread_pool>(kLinesMax, 1)),
      marker_(MakeLogger("marker", std::make_shared<spdlog::sinks::null_sink_mt>())) {
  OfProcess().Register(kind, [pool = pool_.get()] { return pool->overrun_counter(); });
}

LogQueue::~LogQueue() {
  const bool drained = Drain(kPatience);
  OfProcess().Register(kind_, nullptr);
  // Its thread hangs in a write, and only the end of the process ends that.
  if (!drained) (void)new std::shared_ptr<spdlog::details::thread_pool>(pool_);
}

std::shared_ptr<spdlog::logger> LogQueue::MakeLogger(const std::string& name,
                                                     std::shared_ptr<spdlog::sinks::sink> sink) {
  return std::make_shared<spdlog::async_logger>(name, std::move(sink), pool_,
                                                spdlog::async_overflow_policy::overrun_oldest);
}

bool LogQueue::Drain(absl::Duration patience) {
  const absl::Time until = absl::Now() + patience;
  marker_->flush();  // the one thread takes it once the lines before are written
  while (pool_->queue_size() > 0) {
    if (absl::Now() >= until) return false;
    absl::SleepFor(kLook);
  }
  return true;
}

}  // namespace ballast::services
