// Parts of units that a reader has where a server in this process has them, and copies of parts that are elsewhere.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <set>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "ballast/client/session_types.h"
#include "ballast/client/transfers/unit_buffers.h"
#include "ballast/client/transport/tally.h"
#include "ballast/kernels/float_formats.h"
#include "ballast/proto/base/lent_memory.h"

namespace ballast::client {

class Leases;

// What one lease has. Its reader, the calls on their way and, until End, the session's Leases hold it; it may outlive
// the session. Threads: any.
class LeasedParts {
 public:
  int64_t version() const { return version_; }
  size_t count() const { return ranges_.size(); }
  const UnitRange& range(size_t i) const { return ranges_[i]; }
  // Whether parts are to be leased, or only copied: the session holds as much as it may.
  bool leases() const { return admitted_; }
  // Of the calls for the parts.
  Tally& tally() { return tally_; }

  // The i-th part has come. False: nothing was leased, and a copy is wanted. After End it is given back at once.
  bool Come(size_t i, model::LeasedBytes leased) ABSL_LOCKS_EXCLUDED(mutex_);
  // The place for a copy of the i-th part; empty after End. It stays as long as this object.
  absl::Span<std::byte> RoomFor(size_t i) ABSL_LOCKS_EXCLUDED(mutex_);
  // Gives all leases back, also those that are still on their way. Waits for nobody.
  void End() ABSL_LOCKS_EXCLUDED(mutex_);
  // The parts in order, once all calls have succeeded; valid until End. FAILED_PRECONDITION after End.
  absl::StatusOr<absl::Span<const LeasedPart>> parts() const ABSL_LOCKS_EXCLUDED(mutex_);

  ~LeasedParts();

 private:
  friend class Leases;
  LeasedParts(std::shared_ptr<Leases> leases, int64_t version, std::vector<UnitRange> ranges, kernels::Dtype dtype);

  uint64_t BytesOf(const UnitRange& range) const { return kernels::BytesOf(dtype_, range.end - range.begin); }

  const std::shared_ptr<Leases> of_session_;
  const int64_t version_;
  const std::vector<UnitRange> ranges_;
  const kernels::Dtype dtype_;
  const absl::Time since_;
  uint64_t bytes_ = 0;                // of all parts
  bool admitted_ = false;             // set before anybody else has the object
  std::atomic<uint64_t> leasing_{0};  // of parts that are leased, or may become so
  Tally tally_;
  mutable absl::Mutex mutex_;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<LeasedPart> parts_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::shared_ptr<const void>> held_ ABSL_GUARDED_BY(mutex_);
  std::unique_ptr<UnitBuffer> copies_ ABSL_GUARDED_BY(mutex_);  // of all parts, of which some are used
};

// A session's leases. Threads: any.
class Leases : public std::enable_shared_from_this<Leases> {
 public:
  explicit Leases(std::shared_ptr<BufferPool> pool) : pool_(std::move(pool)) {}

  // A lease of `ranges`, whose calls are still to be made. All leases together have at most `bytes_max` bytes, but a
  // larger one goes alone; and none begins beside one older than `age_max`. A lease beyond that has copies. UNAVAILABLE
  // (BUSY) while leases of more than `bytes_max` that were given back early have parts on their way.
  absl::StatusOr<std::shared_ptr<LeasedParts>> Begin(int64_t version, std::vector<UnitRange> ranges,
                                                     kernels::Dtype dtype, uint64_t bytes_max, absl::Duration age_max)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // Afterwards no lease is held, whoever has the objects.
  void EndAll() ABSL_LOCKS_EXCLUDED(mutex_);
  bool empty() const ABSL_LOCKS_EXCLUDED(mutex_);
  uint64_t leased_bytes() const { return leased_bytes_; }
  uint64_t copied_bytes() const { return copied_bytes_; }

 private:
  friend class LeasedParts;
  void Ended(const LeasedParts* parts) ABSL_LOCKS_EXCLUDED(mutex_);

  const std::shared_ptr<BufferPool> pool_;
  std::atomic<uint64_t> leased_bytes_{0}, copied_bytes_{0};
  mutable absl::Mutex mutex_;
  std::set<std::shared_ptr<LeasedParts>> live_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::weak_ptr<LeasedParts>> ended_ ABSL_GUARDED_BY(mutex_);  // whose calls may be under way
};

}  // namespace ballast::client
