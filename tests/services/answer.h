// Waits for the answer of an asynchronous call.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "ballast/services/server/state_server.h"

namespace ballast::services {

template <typename Response>
class Answer {
 private:
  struct State {
    absl::Mutex mu;
    std::optional<absl::StatusOr<Response>> response;
  };

 public:
  // Takes the answer itself, or a message that others share.
  struct Taker {
    void operator()(absl::StatusOr<Response> response) const {
      absl::MutexLock lock(&state->mu);
      EXPECT_FALSE(state->response.has_value()) << "answered twice";
      state->response.emplace(std::move(response));
    }
    void operator()(const absl::StatusOr<std::shared_ptr<const model::SharedMessage<Response>>>& shared) const {
      (*this)(shared.ok() ? absl::StatusOr<Response>(***shared) : shared.status());
    }
    std::shared_ptr<State> state;
  };
  Taker reply() { return Taker{state_}; }

  // DEADLINE_EXCEEDED, "no answer in a minute", if no answer comes in a minute.
  absl::StatusOr<Response> Wait() {
    absl::MutexLock lock(&state_->mu);
    const auto there = [this] { return state_->response.has_value(); };
    if (!state_->mu.AwaitWithTimeout(absl::Condition(&there), absl::Minutes(1))) {
      return absl::DeadlineExceededError("no answer in a minute");
    }
    return *state_->response;
  }

  bool arrived() const {
    absl::MutexLock lock(&state_->mu);
    return state_->response.has_value();
  }

 private:
  std::shared_ptr<State> state_ = std::make_shared<State>();
};

}  // namespace ballast::services
