#include "ballast/services/daemon/registration.h"

#include <google/protobuf/util/message_differencer.h>
#include <spdlog/spdlog.h>

#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/base/threads.h"
#include "ballast/proto/model/protocol.h"

namespace ballast::services {
namespace {

constexpr absl::Duration kCallTimeout = absl::Seconds(2);
constexpr absl::Duration kFarewellTimeout = absl::Seconds(1);
constexpr absl::Duration kFarewellMark = absl::Seconds(2);
// The entry of a server that is over goes within a lease, give or take what etcd rounds.
constexpr double kLeasesUntilAlive = 1.5;

}  // namespace

Registration::Registration(const registry::RegistryUrl& url, const std::string& directory, const Times& times)
    : registry_(url), lease_time_(times.lease), marked_(directory, &registry_), marker_(&marked_, times.mark) {
  made_ = marker_.made();
  if (!made_.ok()) return;
  absl::StatusOr<std::thread> thread = model::MakeThread([this] { Run(); });
  made_ = thread.status();
  if (thread.ok()) thread_ = *std::move(thread);
}

Registration::~Registration() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void Registration::Announce(v1::ServerEntry entry, Fill fill) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    entry_ = std::move(entry);
    fill_ = std::move(fill);
    wanted_ = true;
    // What a beat that failed settled, the next one settles anew.
    if (!got_name_) named_.reset();
  }
  changed_.notify_all();
}

absl::Status Registration::Beat(const v1::ServerEntry& entry, uint64_t changes) {
  BALLAST_RETURN_IF_ERROR(KeepLease());
  BALLAST_ASSIGN_OR_RETURN(const auto holder, registry_.Find(entry.server_id(), absl::Now() + kCallTimeout));
  if (holder.has_value() && holder->lease != lease_ && holder->lease != written_lease_) {
    // The run before this one, whose lease lasts a while longer: two cannot listen at one address.
    const bool before =
        written_lease_ == 0 && holder->value.address() == entry.address() && holder->value.disk() == entry.disk();
    if (!before) return Held(entry, *holder);
  }
  holder_ = 0;
  const bool written = holder.has_value() && holder->lease == lease_;
  if (marker_.TakeOlder()) checked_ = false;
  if (!written || !checked_) BALLAST_RETURN_IF_ERROR(CheckCopy(entry, written));
  if (!written || !google::protobuf::util::MessageDifferencer::Equals(entry, written_)) {
    BALLAST_RETURN_IF_ERROR(WriteEntry(entry, holder.has_value() ? holder->revision : 0));
  }
  if (checked_) marker_.Ask(entry, changes, written ? Marker::When::kIfDue : Marker::When::kNow);
  return absl::OkStatus();
}

absl::Status Registration::KeepLease() {
  if (lease_ != 0) {
    const absl::Status kept = registry_.etcd().KeepAlive(lease_, absl::Now() + kCallTimeout);
    if (!absl::IsNotFound(kept)) return kept;
    lease_ = 0;
  }
  BALLAST_ASSIGN_OR_RETURN(lease_, registry_.etcd().Grant(lease_time_, absl::Now() + kCallTimeout));
  return absl::OkStatus();
}

absl::Status Registration::WriteEntry(const v1::ServerEntry& entry, int64_t revision) {
  BALLAST_ASSIGN_OR_RETURN(const bool put, registry_.Put(entry, lease_, revision, absl::Now() + kCallTimeout));
  if (!put) {
    return model::Error(absl::StatusCode::kAborted, model::kBusy,
                        absl::StrCat("the entry of '", entry.server_id(), "' changed meanwhile"));
  }
  written_ = entry;
  written_lease_ = lease_;
  return absl::OkStatus();
}

absl::Status Registration::CheckCopy(const v1::ServerEntry& entry, bool written) {
  const absl::Status checked = marked_.Check(entry, absl::Now() + kCallTimeout);
  checked_ = checked.ok();
  if (absl::IsFailedPrecondition(checked)) {
    if (written && registry_.etcd().Revoke(lease_, absl::Now() + kCallTimeout).ok()) lease_ = 0;
    return checked;
  }
  if (!written && absl::IsUnavailable(checked)) return checked;
  if (!checked_ && !std::exchange(told_doubt_, true)) {
    spdlog::warn("'{}' registers though nothing tells whether its data directory is the newest copy; asks again: {}",
                 entry.server_id(), std::string(checked.message()));
  }
  told_doubt_ = !checked_;
  return absl::OkStatus();
}

absl::Status Registration::Held(const v1::ServerEntry& entry,
                                const registry::Registry::Found<v1::ServerEntry>& holder) {
  if (holder_ != holder.lease) {
    holder_ = holder.lease;
    held_since_ = std::chrono::steady_clock::now();
  }
  const auto show = [](const v1::ServerEntry& server) {
    return absl::StrCat(server.address(), " (data directory number ", model::ShowDisk(server.disk()), ")");
  };
  const bool copied = holder.value.disk() == entry.disk();
  return model::Error(
      absl::StatusCode::kAlreadyExists, model::kBadConfig,
      absl::StrCat("this server, at ", show(entry), ", is '", entry.server_id(), "', and so is the one at ",
                   show(holder.value), ", whose lease is valid. ",
                   copied ? "One data directory is a copy of the other, or the server came back elsewhere. Two "
                            "servers must not serve the same state; stop one of them"
                          : "Give each server a server_id of its own, or stop the other"));
}

// Once per change, not at every beat.
void Registration::Tell(const absl::Status& now) {
  if (told_ == now.code()) return;
  told_ = now.code();
  const std::string url = registry::FormatRegistryUrl(registry_.url());
  if (now.ok()) {
    spdlog::info("registered as '{}' at {}", written_.server_id(), url);
  } else {
    spdlog::warn("cannot register at {} yet, and tries again: {}", url, std::string(now.message()));
  }
}

void Registration::Settle(const absl::Status& beaten) {
  const bool held = absl::IsAlreadyExists(beaten), older = absl::IsFailedPrecondition(beaten);
  const bool outlasts = held && std::chrono::steady_clock::now() - held_since_ >
                                    absl::ToChronoMilliseconds(kLeasesUntilAlive * lease_time_);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    held_ = held;
    got_name_ = got_name_ || beaten.ok();
    // After an Announce the next beat tells.
    const bool settled = !named_.has_value() && !wanted_ && (held ? outlasts : !absl::IsAborted(beaten));
    // A registry that does not answer, or refuses, keeps no server from serving.
    if (settled || older || beaten.ok()) named_ = held || older ? beaten : absl::OkStatus();
  }
  changed_.notify_all();
}

absl::Status Registration::AwaitName(const std::function<absl::Status()>& interrupt) {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!changed_.wait_for(lock, std::chrono::milliseconds(100), [this] { return named_.has_value(); })) {
    if (interrupt) BALLAST_RETURN_IF_ERROR(interrupt());
  }
  return *named_;
}

void Registration::Run() {
  uint64_t changes = 0;
  for (;;) {
    v1::ServerEntry entry;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait_for(lock, absl::ToChronoMilliseconds(lease_time_ / (held_ && !named_.has_value() ? 20 : 3)),
                        [this] { return wanted_ || stopping_; });
      if (stopping_) break;
      wanted_ = false;
      entry = entry_;
      // Without `fill` there may be changes at any time.
      changes = fill_ ? fill_(&entry) : changes + 1;
    }
    if (entry.server_id().empty()) continue;
    const absl::Status beaten = Beat(entry, changes);
    Tell(beaten);
    Settle(beaten);
  }
  const bool registered = written_lease_ != 0 && written_lease_ == lease_ && holder_ == 0;
  if (registered && checked_) {
    const std::lock_guard<std::mutex> lock(mutex_);
    v1::ServerEntry entry = entry_;
    marker_.Ask(written_, fill_ ? fill_(&entry) : changes + 1, Marker::When::kIfChanged);
  }
  marker_.Await(kFarewellMark);
  if (lease_ != 0) (void)registry_.etcd().Revoke(lease_, absl::Now() + kFarewellTimeout);
}

}  // namespace ballast::services
