// The sequence numbers of one job's log, and what of it the catalog keeps whatever the job's durability: the newest
// promise and Open, and under durability `none`, where nothing else outlives the process, a mark from the first
// prepared step on that the job has had state here. A server that finds the mark at start knows that state was lost.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "ballast/services/step/step_machine.h"
#include "ballast/storage/catalog/catalog.h"

namespace ballast::services {

// Threads: the caller's lock; Write blocks and is called without it.
class StepLog {
 public:
  explicit StepLog(std::string job) : job_(std::move(job)) {}

  uint64_t Append(const StepRecord& record);
  // The job's records are kept elsewhere as well: no mark. `next_lsn`: what the next record gets, if that is higher.
  void KeptElsewhere(uint64_t next_lsn);
  void KeptHere();  // not any more
  void Sync(uint64_t lsn);
  uint64_t last_lsn() const { return next_lsn_ - 1; }

  // A record that a requested sync waits for, oldest first: to be written with Write, then Written.
  struct Durable {
    uint64_t lsn = 0;
    std::string key;
    std::string value;
  };
  std::optional<Durable> NextToWrite();
  static absl::Status Write(storage::Catalog* catalog, const Durable& record);
  void Written(uint64_t lsn);

  // The newest completed sync that has not been taken yet, as far as `elsewhere`: what is durable there.
  std::optional<uint64_t> TakeSynced(uint64_t elsewhere);

 private:
  const std::string job_;
  uint64_t next_lsn_ = 1;
  uint64_t requested_lsn_ = 0;
  uint64_t reported_lsn_ = 0;
  bool writing_ = false;
  bool marked_ = false;
  std::deque<Durable> unwritten_;  // at most a promise, an Open and a mark: each waits for its sync
};

}  // namespace ballast::services
