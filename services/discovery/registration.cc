#include "ballast/services/discovery/registration.h"

#include <google/protobuf/util/message_differencer.h>
#include <spdlog/spdlog.h>

#include <optional>
#include <utility>

#include "absl/time/clock.h"
#include "ballast/proto/model/status.h"

namespace ballast::services {
namespace {

constexpr absl::Duration kCallTimeout = absl::Seconds(2);
constexpr absl::Duration kFarewellTimeout = absl::Seconds(1);

}  // namespace

Registration::Registration(const registry::RegistryUrl& url, absl::Duration lease)
    : registry_(url), lease_time_(lease), thread_([this] { Run(); }) {}

Registration::~Registration() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void Registration::Announce(v1::ServerEntry entry, Fill fill) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    entry_ = std::move(entry);
    fill_ = std::move(fill);
    wanted_ = true;
  }
  changed_.notify_all();
}

absl::Status Registration::Beat(const v1::ServerEntry& entry) {
  const auto deadline = [] { return absl::Now() + kCallTimeout; };
  if (lease_ != 0) {
    const absl::Status kept = registry_.KeepAlive(lease_, deadline());
    if (absl::IsNotFound(kept)) lease_ = 0;
    if (!kept.ok() && lease_ != 0) return kept;
  }
  if (lease_ == 0) {
    BALLAST_ASSIGN_OR_RETURN(lease_, registry_.Grant(lease_time_, deadline()));
  }
  BALLAST_ASSIGN_OR_RETURN(const std::optional<int64_t> holder, registry_.LeaseOf(entry.server_id(), deadline()));
  const bool own = holder == lease_ || holder == written_lease_;
  if (holder.has_value() && !own && written_lease_ != 0) {
    // Two would take the entry from each other in turn. The later of them was started on purpose, and keeps the entry
    // also where this server lost its lease meanwhile, or has something new to tell.
    return model::Error(absl::StatusCode::kAlreadyExists, model::kBadConfig,
                        "another server registered as '" + entry.server_id() +
                            "' after this one; trainers find that one. Give each server an id of its own");
  }
  if (holder == lease_ && google::protobuf::util::MessageDifferencer::Equals(entry, written_)) return absl::OkStatus();
  BALLAST_RETURN_IF_ERROR(registry_.Put(entry, lease_, deadline()));
  written_ = entry;
  written_lease_ = lease_;
  return absl::OkStatus();
}

// Once per change, not at every beat.
void Registration::Tell(const absl::Status& now) {
  if (told_ == now.code()) return;
  told_ = now.code();
  const std::string url = registry::FormatRegistryUrl(registry_.url());
  if (now.ok()) {
    spdlog::info("registered as '{}' at {}", written_.server_id(), url);
  } else {
    spdlog::warn("not registered at {}, and tried again: {}", url, std::string(now.message()));
  }
}

void Registration::Run() {
  for (;;) {
    v1::ServerEntry entry;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait_for(lock, absl::ToChronoMilliseconds(lease_time_ / 3), [this] { return wanted_ || stopping_; });
      if (stopping_) break;
      wanted_ = false;
      entry = entry_;
      if (fill_) fill_(&entry);
    }
    if (!entry.server_id().empty()) Tell(Beat(entry));
  }
  if (lease_ != 0) (void)registry_.Revoke(lease_, absl::Now() + kFarewellTimeout);
}

}  // namespace ballast::services
