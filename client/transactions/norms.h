// The norm of the gradients pushed for the step in the making, before it is sealed.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "ballast/client/transactions/transactions.h"

namespace ballast::client {

class Norms {
 public:
  // Borrows all.
  Norms(OpenJob* job, Gradients* gradients, Transactions* transactions)
      : job_(job), gradients_(gradients), transactions_(transactions) {}

  // COLLECTIVE. Infinite if some gradient is Inf or NaN.
  absl::StatusOr<double> Norm();
  // The plan changed.
  void Forget() { known_ = {}; }

 private:
  // Only this rank asks; it asks all servers.
  absl::StatusOr<v1::NormResponse> Ask(const std::string& presence);
  // COLLECTIVE. Rank 0 asks and shares the answer with all ranks. Returns none if a server lacks slices: then all ranks
  // must push their gradients again and call Share once more. With `last` it returns the error instead.
  absl::StatusOr<std::optional<v1::NormResponse>> Share(const std::string& presence, bool last);

  OpenJob* job_;
  Gradients* gradients_;
  Transactions* transactions_;
  // The last norm. Within an attempt the norm of the same presence never changes.
  struct {
    int64_t version = -2;
    uint64_t attempt = 0;
    std::string presence;
    double norm = 0;
  } known_;
};

}  // namespace ballast::client
