#include "ballast/client/collective/loopback_collective.h"

#include <cstring>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_join.h"
#include "absl/synchronization/mutex.h"
#include "ballast/client/collective/backends/pairwise_collective.h"
#include "ballast/proto/base/status.h"

namespace ballast::client {
namespace {

using Sources = absl::Span<const absl::Span<const std::byte>>;

// The meeting place of the ranks: every rank posts its sources, then copies from all, and goes on when all have copied.
class Table {
 public:
  Table(int world_size, absl::Duration timeout) : timeout_(timeout), posted_(world_size) {}

  // Waits until every rank has posted; returns all sources, by rank. Each OK must be followed by Leave().
  absl::StatusOr<std::vector<const Sources*>> Enter(int rank, const Sources* sources) {
    absl::MutexLock lock(&mutex_);
    if (!broken_.ok()) return broken_;
    posted_[rank] = sources;
    const uint64_t round = round_;
    if (++arrived_ == posted_.size()) {
      arrived_ = 0;
      copying_ = posted_.size();
      ++round_;
      return posted_;
    }
    const auto over = [&] {
      mutex_.AssertReaderHeld();
      return round_ != round || !broken_.ok();
    };
    if (!mutex_.AwaitWithTimeout(absl::Condition(&over), timeout_)) broken_ = Missing();
    // A round that is complete goes on, whatever became of the group meanwhile: the others copy from this rank's
    // memory.
    if (round_ != round) return posted_;
    return broken_;
  }

  void Leave() {
    absl::MutexLock lock(&mutex_);
    if (--copying_ == 0) posted_.assign(posted_.size(), nullptr);
    // Without a deadline: all ranks are here, and only copy memory.
    const auto done = [&] {
      mutex_.AssertReaderHeld();
      return copying_ == 0;
    };
    mutex_.Await(absl::Condition(&done));
  }

  void Break(const absl::Status& status) {
    absl::MutexLock lock(&mutex_);
    if (broken_.ok()) broken_ = status;
  }

 private:
  absl::Status Missing() const ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    std::vector<int> missing;
    for (size_t r = 0; r < posted_.size(); ++r) {
      if (posted_[r] == nullptr) missing.push_back(static_cast<int>(r));
    }
    return model::Error(absl::StatusCode::kDeadlineExceeded, model::kRankMissing,
                        absl::StrCat("rank ", absl::StrJoin(missing, ", "), " of ", posted_.size(),
                                     " did not come to a collective call within ", absl::FormatDuration(timeout_)));
  }

  const absl::Duration timeout_;
  absl::Mutex mutex_;
  std::vector<const Sources*> posted_ ABSL_GUARDED_BY(mutex_);
  size_t arrived_ ABSL_GUARDED_BY(mutex_) = 0;
  size_t copying_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t round_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::Status broken_ ABSL_GUARDED_BY(mutex_);
};

class LoopbackCollective : public PairwiseCollective {
 public:
  LoopbackCollective(int rank, int world_size, std::shared_ptr<Table> table)
      : PairwiseCollective(rank, world_size), table_(std::move(table)) {}

  ~LoopbackCollective() override {
    table_->Break(model::Error(absl::StatusCode::kUnavailable, model::kRankMissing,
                               absl::StrCat("rank ", rank(), " of ", world_size(), " has left the group")));
  }

 protected:
  absl::Status Transfer(Sources to, absl::Span<const Target> from) override {
    BALLAST_ASSIGN_OR_RETURN(const std::vector<const Sources*> all, table_->Enter(rank(), &to));
    absl::Status status;
    for (int r = 0; r < world_size() && status.ok(); ++r) {
      const Source source = (*all[r])[rank()];
      if (source.size() != from[r].size()) {
        status = model::Error(absl::StatusCode::kInvalidArgument, model::kBadLength,
                              absl::StrCat("rank ", r, " sends rank ", rank(), " ", source.size(), " bytes where ",
                                           from[r].size(), " are expected: do all ranks make the same calls?"));
      } else if (!source.empty()) {
        std::memcpy(from[r].data(), source.data(), source.size());
      }
    }
    table_->Leave();
    if (!status.ok()) table_->Break(status);
    return status;
  }

 private:
  const std::shared_ptr<Table> table_;
};

}  // namespace

std::vector<std::unique_ptr<Collective>> MakeLoopbackGroup(int world_size, absl::Duration timeout) {
  const auto table = std::make_shared<Table>(world_size, timeout);
  std::vector<std::unique_ptr<Collective>> group;
  for (int r = 0; r < world_size; ++r) group.push_back(std::make_unique<LoopbackCollective>(r, world_size, table));
  return group;
}

}  // namespace ballast::client
