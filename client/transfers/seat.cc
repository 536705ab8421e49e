#include "ballast/client/transfers/seat.h"

#include <utility>

namespace ballast::client {
void Seat::PushSlice(v1::SliceKind kind, const OwnedSlice& owned, absl::Span<const std::byte> payload,
                     std::function<void(absl::Status)> done, const std::shared_ptr<model::LentGradients>& lent) const {
  v1::PushRequest header;
  header.set_job(job);
  *header.mutable_epoch() = epoch();
  header.set_step(version + 1);
  header.set_attempt(attempt);
  header.set_rank(rank());
  header.set_kind(kind);
  header.set_unit(owned.slice.unit);
  header.set_begin(owned.slice.range.begin);
  header.set_end(owned.slice.range.end);
  router->PushSlice(owned.slice.chunk, header, payload, Deadline(), std::move(done), lent);
}

}  // namespace ballast::client
