#include "ballast/client/reading/hold.h"

#include <algorithm>
#include <limits>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "ballast/client/transport/call_all.h"
#include "ballast/proto/base/status.h"

namespace ballast::client {
namespace {

// How long a reader waits for servers to hear that it lets go. They find out by themselves when the lease ends.
constexpr absl::Duration kLetGoTimeout = absl::Seconds(2);
// How long reading stands still for a renewal. A server that takes longer answers while pulls go on.
constexpr absl::Duration kRenewPatience = absl::Seconds(1);

}  // namespace

absl::StatusOr<v1::PinResponse> Hold::Take(int64_t version, absl::Time deadline) {
  LetGo();
  version_ = version;
  holder_ = absl::Uniform<uint64_t>(absl::IntervalClosed, random_, 1, std::numeric_limits<uint64_t>::max());
  auto pinned = Pin(deadline);
  if (!pinned.ok()) LetGo();
  return pinned;
}

v1::PinRequest Hold::Request() const {
  v1::PinRequest request;
  request.set_job(job_);
  request.set_version(version_);
  request.set_holder(holder_);
  request.set_lease_ms(static_cast<uint32_t>(absl::ToInt64Milliseconds(lease_)));
  return request;
}

absl::StatusOr<v1::PinResponse> Hold::Pin(absl::Time deadline) {
  renewed_ = model::SteadyTime::Now();
  BALLAST_ASSIGN_OR_RETURN(
      auto answers, (CallAll<v1::PinRequest, v1::PinResponse>(
                        router_, &Transport::Pin, absl::StrCat("Pin of version ", version_), Request(), deadline)));
  return std::move(answers.front());
}

absl::Status Hold::RenewIfDue() {
  if (version_ < 0 || model::SteadyTime::Now() - renewed_ < renew_after()) return absl::OkStatus();
  renewed_ = model::SteadyTime::Now();
  // The next one comes in time for those that answer, though another server is down.
  const auto asked = AskAll<v1::PinRequest, v1::PinResponse>(
      router_, &Transport::Pin, absl::StrCat("Pin of version ", version_), Request(), absl::Now() + renew_after());
  for (const auto& answer : asked->Await(absl::Now() + std::min(renew_after(), kRenewPatience))) {
    if (answer.has_value() && !answer->ok()) return answer->status();
  }
  return absl::OkStatus();
}

void Hold::LetGo() {
  if (version_ < 0) return;
  v1::UnpinRequest request;
  request.set_job(job_);
  request.set_version(version_);
  request.set_holder(holder_);
  (void)CallAll<v1::UnpinRequest, v1::UnpinResponse>(
      router_, &Transport::Unpin, absl::StrCat("Unpin of version ", version_), request, absl::Now() + kLetGoTimeout);
  version_ = -1;
}

}  // namespace ballast::client
