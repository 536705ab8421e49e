#include "ballast/services/daemon/marker.h"

#include <spdlog/spdlog.h>

#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "ballast/proto/base/threads.h"

namespace ballast::services {
namespace {

constexpr absl::Duration kMarkCallTimeout = absl::Seconds(1);

}  // namespace

Marker::Marker(MarkedDirectory* directory, absl::Duration every)
    : directory_(directory), every_(absl::ToChronoMilliseconds(every)) {
  absl::StatusOr<std::thread> thread = model::MakeThread([this] { Run(); });
  made_ = thread.status();
  if (thread.ok()) thread_ = *std::move(thread);
}

Marker::~Marker() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void Marker::Ask(const v1::ServerEntry& entry, uint64_t changes, When when) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (busy_ && when == When::kIfDue) return;  // its outcome tells
    owed_ = owed_ || when == When::kNow;
    const bool due = when != When::kIfDue || std::chrono::steady_clock::now() - marked_at_ >= every_;
    if (!owed_ && (!due || changes == marked_changes_)) return;
    wanted_ = Wanted{entry, changes};
  }
  changed_.notify_all();
}

void Marker::Await(absl::Duration patience) {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait_for(lock, absl::ToChronoMilliseconds(patience), [this] { return !busy_ && !wanted_.has_value(); });
}

bool Marker::TakeOlder() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return std::exchange(older_, false);
}

void Marker::Tell(const v1::ServerEntry& entry, const absl::Status& raised) {
  if (failed_ == !raised.ok()) return;
  failed_ = !raised.ok();
  if (failed_) {
    spdlog::warn(
        "'{}' serves, but the mark of its data directory cannot be raised, so a copy that is made before a crash may "
        "start by mistake; tries again: {}",
        entry.server_id(), std::string(raised.message()));
  } else {
    spdlog::info("the mark of the data directory of '{}' is raised again", entry.server_id());
  }
}

void Marker::Run() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return wanted_.has_value() || stopping_; });
    if (!wanted_.has_value()) return;
    const Wanted now = *std::exchange(wanted_, std::nullopt);
    const auto began = std::chrono::steady_clock::now();
    busy_ = true;
    lock.unlock();
    const absl::Status raised = directory_->Raise(now.entry, kMarkCallTimeout);
    Tell(now.entry, raised);
    lock.lock();
    busy_ = false;
    owed_ = !raised.ok();
    older_ = older_ || absl::IsFailedPrecondition(raised);
    if (raised.ok()) {
      marked_changes_ = now.changes;
      marked_at_ = began;
    }
    changed_.notify_all();
  }
}

}  // namespace ballast::services
