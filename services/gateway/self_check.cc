#include "ballast/services/gateway/self_check.h"

#include <spdlog/spdlog.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/base/threads.h"

namespace ballast::services {
namespace {

constexpr absl::Duration kInterval = absl::Seconds(1);

}  // namespace

absl::StatusOr<std::unique_ptr<SelfCheck>> SelfCheck::Start(RpcServer* rpc, StateServer* state,
                                                            absl::Duration patience) {
  std::unique_ptr<SelfCheck> check(new SelfCheck(rpc, state, patience));
  BALLAST_ASSIGN_OR_RETURN(check->thread_, model::MakeThread([raw = check.get()] { raw->Run(); }));
  return check;
}

SelfCheck::~SelfCheck() {
  {
    absl::MutexLock lock(&mu_);
    stopping_ = true;
  }
  if (thread_.joinable()) thread_.join();
}

std::string SelfCheck::Fault() const {
  absl::MutexLock lock(&mu_);
  if (const absl::Duration asked = absl::Now() - since_; asked > patience_) {
    return absl::StrCat(asking_, " has not answered for ", absl::ToInt64Seconds(asked), " s");
  }
  return fault_;
}

void SelfCheck::Ask(const char* what, const std::function<absl::Status()>& question) {
  {
    absl::MutexLock lock(&mu_);
    if (stopping_) return;
    asking_ = what;
    since_ = absl::Now();
  }
  const absl::Status answer = question();
  absl::MutexLock lock(&mu_);
  since_ = absl::InfiniteFuture();
  if (!answer.ok()) absl::StrAppend(&next_fault_, next_fault_.empty() ? "" : "; ", what, ": ", answer.message());
}

void SelfCheck::Run() {
  while (true) {
    Ask("the rpc port", [this] { return rpc_->Try(patience_); });
    Ask("the catalog", [this] { return state_->TryCatalog(patience_); });
    Ask("the clock of jobs", [this] { return state_->TryClock(patience_); });
    absl::MutexLock lock(&mu_);
    if (next_fault_ != fault_) {
      if (next_fault_.empty()) {
        spdlog::info("ready again");
      } else {
        spdlog::error("not ready: {}", next_fault_);
      }
    }
    fault_ = std::exchange(next_fault_, "");
    if (mu_.AwaitWithTimeout(absl::Condition(&stopping_), kInterval)) return;
  }
}

}  // namespace ballast::services
