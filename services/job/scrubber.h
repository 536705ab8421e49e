// Paces the scrub of a server's jobs: reads their states on the disk in the background, at a rate, one request at a
// time.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "ballast/services/threads/deadlines.h"

namespace ballast::services {

// Threads: any, unless a method says otherwise.
class Scrubber {
 public:
  static constexpr uint64_t kPieceBytes = uint64_t{1} << 20;
  // A job is not read again before so much time has passed since the end of its last pass: rot takes longer.
  static constexpr absl::Duration kBetweenPasses = absl::Hours(1);
  struct ScrubbedJob {
    absl::Time last_pass;  // the end of the last; InfinitePast before the first
    // Has the job's worker read a piece into `buffer`. `lease` lives until that is over.
    std::function<void(absl::Span<std::byte> buffer, std::shared_ptr<void> lease)> read;
  };
  using Jobs = std::map<std::string, ScrubbedJob>;  // by name

  // `bytes_per_s`: of the whole server; 0: nothing is read but by Next. `jobs` must be short: `deadlines` calls it.
  Scrubber(uint64_t bytes_per_s, Deadlines* deadlines, std::function<Jobs()> jobs)
      : bytes_per_s_(bytes_per_s), deadlines_(deadlines), jobs_(std::move(jobs)) {
    turn_->scrubber = this;
  }
  ~Scrubber() { Stop(); }

  void Start();
  void Stop();
  // Has the worker of the job whose turn it is read a piece, unless an earlier piece is not read yet.
  void Next() ABSL_LOCKS_EXCLUDED(mu_);

 private:
  struct Piece;  // the buffer, and whether it is in use
  // Outlives this, as long as a turn is due.
  struct Turn {
    absl::Mutex mu;
    Scrubber* scrubber ABSL_GUARDED_BY(mu) = nullptr;
  };
  void AddTurn();
  // Null: no job is due.
  std::function<void(absl::Span<std::byte>, std::shared_ptr<void>)> Choose() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const uint64_t bytes_per_s_;
  Deadlines* const deadlines_;
  const std::function<Jobs()> jobs_;
  const std::shared_ptr<Turn> turn_ = std::make_shared<Turn>();
  absl::Mutex mu_;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::string last_ ABSL_GUARDED_BY(mu_);              // the job that had its turn
  std::shared_ptr<Piece> piece_ ABSL_GUARDED_BY(mu_);  // made at the first use
};

}  // namespace ballast::services
