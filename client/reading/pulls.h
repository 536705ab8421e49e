// Pulls of whole tensors at the version that a reader holds.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "ballast/client/reading/hold.h"
#include "ballast/client/transport/router.h"
#include "ballast/client/transport/tally.h"
#include "ballast/proto/model/epoch_plan.h"

namespace ballast::client {

class WholePulls {
 public:
  // Borrows `router` and `hold`. `timeout`: of each call. Pulls go by the router's routes, or, without any, by `plan`.
  WholePulls(Router* router, Hold* hold, std::shared_ptr<const model::EpochPlan> plan, v1::Content content,
             absl::Duration timeout)
      : router_(router), hold_(hold), plan_(std::move(plan)), content_(content), timeout_(timeout) {}
  ~WholePulls() { (void)tally_->Wait(); }

  // Starts the pull of a tensor to `to`, which is written until Wait. Blocks while many bytes are under way: a pull's
  // time-out begins when it is asked for.
  absl::Status Start(const model::Tensor& tensor, absl::Span<std::byte> to);
  // Blocks until all is there.
  absl::Status Wait();

 private:
  // Blocks until nothing is under way, and renews the hold meanwhile.
  void Drain();
  absl::Status StartRange(const model::Tensor& tensor, absl::Span<std::byte> to);

  Router* const router_;
  Hold* const hold_;
  const std::shared_ptr<const model::EpochPlan> plan_;
  const v1::Content content_;
  const absl::Duration timeout_;
  uint64_t under_way_ = 0;  // bytes since the last wait
  const std::shared_ptr<Tally> tally_ = std::make_shared<Tally>();
};

}  // namespace ballast::client
