// A request that waits in a queue until something says that it goes on; else its deadline says what it waited for.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ballast/proto/base/status.h"
#include "ballast/services/threads/caller.h"
#include "ballast/services/threads/reply.h"
#include "ballast/services/threads/waiting.h"

namespace ballast::services {

// `ready`: runs under the job's lock; true once the request has gone on. `waits_for`: for the message, likewise.
template <typename Response>
Waiter MakeWaiter(uint64_t bytes, const CallLimit& limit, const Reply<Response>& reply,
                  std::function<bool(Replies*)> ready, std::function<std::string()> waits_for) {
  Waiter waiter;
  waiter.bytes = bytes;
  waiter.limit = limit;
  waiter.attempt = std::move(ready);
  waiter.expire = [reply, waits_for = std::move(waits_for)](Replies* out) {
    out->push_back([reply, message = absl::StrCat("the deadline passed while ", waits_for())] {
      reply(model::Error(absl::StatusCode::kDeadlineExceeded, model::kBusy, message));
    });
  };
  waiter.refuse = [reply](const absl::Status& status, Replies* out) {
    out->push_back([reply, status] { reply(status); });
  };
  return waiter;
}

}  // namespace ballast::services
