#include "ballast/client/transfers/seat.h"

#include <memory>
#include <utility>
#include <vector>

#include "absl/synchronization/mutex.h"

namespace ballast::client {
namespace {

// A slice on its way to all servers of its chunk. Tells once all have answered: the first error, or OK.
class ToAll {
 public:
  ToAll(size_t servers, std::function<void(absl::Status)> done) : left_(servers), done_(std::move(done)) {}
  void Finish(const absl::Status& status) {
    absl::Status told;
    {
      absl::MutexLock lock(&mutex_);
      if (told_.ok()) told_ = status;
      if (--left_ > 0) return;
      told = told_;
    }
    std::exchange(done_, nullptr)(std::move(told));
  }

 private:
  absl::Mutex mutex_;
  size_t left_ ABSL_GUARDED_BY(mutex_);
  absl::Status told_ ABSL_GUARDED_BY(mutex_);
  std::function<void(absl::Status)> done_;  // of the last to finish
};

}  // namespace

void Seat::PushSlice(v1::SliceKind kind, const OwnedSlice& owned, absl::Span<const std::byte> payload,
                     std::function<void(absl::Status)> done, std::shared_ptr<model::LentGradients> lent) const {
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
  const model::EpochPlan& plan = units->plan();
  std::vector<uint32_t> servers;
  for (const auto places : {plan.holders_of(owned.slice.chunk), plan.fillers_of(owned.slice.chunk)}) {
    servers.insert(servers.end(), places.begin(), places.end());
  }
  const auto all = std::make_shared<ToAll>(servers.size(), std::move(done));
  for (const uint32_t server : servers) {
    router->Push(
        server, header, payload, Deadline(), [all](const absl::Status& status) { all->Finish(status); }, lent);
  }
}

}  // namespace ballast::client
