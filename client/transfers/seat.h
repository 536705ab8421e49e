// A session's place in the job: the data that the session's parts need to address a call.
#pragma once

#include <memory>
#include <string>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "ballast/client/transfers/unit_map.h"
#include "ballast/client/transport/router.h"
#include "ballast/kernels/optimizer.h"

namespace ballast::client {

struct Seat {
  std::string job;
  Router* router = nullptr;
  std::shared_ptr<const UnitMap> units;
  kernels::OptimizerSpec optimizer;  // the job's
  int64_t version = -1;              // the last decided step
  uint64_t attempt = 0;              // attempt of the step being pushed, version + 1
  absl::Duration step_timeout;
  uint64_t inflight_bytes_max = 0;  // of pulls, and of leases

  uint64_t gradient_bytes() const { return kernels::ElementBytes(optimizer.gradient); }
  // Bytes of `elements` working parameters, from a multiple of the dtype's grain on.
  uint64_t WorkingBytes(uint64_t elements) const { return kernels::BytesOf(optimizer.working, elements); }
  // Of the Open that this session adopted; on a call the router puts the epoch that the group has by then.
  const v1::Epoch& epoch() const { return units->plan().open().epoch(); }
  uint32_t rank() const { return static_cast<uint32_t>(units->rank()); }
  absl::Time Deadline() const { return absl::Now() + step_timeout; }
  Router::Source SourceOf(uint64_t chunk) const { return {chunk, rank()}; }
  // Sends one slice of step version + 1 to all servers of its chunk; `payload` is borrowed until `done`. `lent`: as for
  // Router::Push.
  void PushSlice(v1::SliceKind kind, const OwnedSlice& owned, absl::Span<const std::byte> payload,
                 std::function<void(absl::Status)> done,
                 const std::shared_ptr<model::LentGradients>& lent = nullptr) const;
};

}  // namespace ballast::client
