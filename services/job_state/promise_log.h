// The sequence numbers of a job's log, and its records that the catalog keeps whatever the durability: the newest
// promise and Open. For a job without a gradient log, the first prepared step also leaves a mark that the job has had
// state here. A server that finds the mark at start knows that state was lost (under `every-K`, what came since the
// pins). These records are often the last of the catalog's log, and for a job without a gradient log nothing else knows
// them: they are put twice.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "ballast/services/step/step_machine.h"
#include "ballast/storage/catalog/catalog.h"

namespace ballast::services {

// Threads: under the caller's lock, except Write, which blocks and is called without the lock.
class PromiseLog {
 public:
  explicit PromiseLog(std::string job) : job_(std::move(job)) {}

  uint64_t Append(const StepRecord& record);
  // As Append, for a record that the catalog never keeps: a slice.
  uint64_t Skip() { return next_lsn_++; }
  // The job's records are in a gradient log as well, so that a restart brings all of the state back: no mark is left.
  // `next_lsn`: of the next record, if that is higher.
  void KeptElsewhere(uint64_t next_lsn);
  void KeptHere();  // undoes KeptElsewhere
  bool kept_elsewhere() const { return elsewhere_lsn_.has_value(); }
  // The gradient log is durable up to `lsn`, and before the first call not at all. REQUIRES: kept_elsewhere().
  void DurableElsewhere(uint64_t lsn) { elsewhere_lsn_ = lsn; }
  void Sync(uint64_t lsn);
  uint64_t last_lsn() const { return next_lsn_ - 1; }

  // The oldest record for which a requested sync waits. Pass the record to Write, then call Written.
  struct Durable {
    uint64_t lsn = 0;
    std::string key;
    std::string value;
  };
  std::optional<Durable> NextToWrite();
  static absl::Status Write(storage::Catalog* catalog, const Durable& record);
  void Written(uint64_t lsn);

  // The newest requested lsn that has become durable since the last call; none if there is none.
  std::optional<uint64_t> TakeSynced();

 private:
  const std::string job_;
  uint64_t next_lsn_ = 1;
  uint64_t requested_lsn_ = 0;
  uint64_t reported_lsn_ = 0;
  bool writing_ = false;
  bool marked_ = false;
  std::optional<uint64_t> elsewhere_lsn_;  // none: no gradient log
  // At most the record being written, an Open, a mark and a promise: an Open waits for its promise to be written.
  std::deque<Durable> unwritten_;
};

}  // namespace ballast::services
