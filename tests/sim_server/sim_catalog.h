// A catalog in memory. Synced writes survive a crash; unsynced writes survive up to a random point.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "ballast/storage/catalog/catalog.h"
#include "ballast/tests/sim/random.h"

namespace ballast::sim {

// The medium. Outlives the servers that open the catalog. Threads: one.
class SimCatalog {
 public:
  explicit SimCatalog(uint64_t seed) : random_(seed) {}

  // Opens the only live handle. A handle is dead after the next Open, Close or Crash.
  std::unique_ptr<storage::Catalog> Open();
  void Close() { ++life_; }
  // A second handle of this life, to read.
  std::unique_ptr<storage::Catalog> Look();
  // The machine loses power.
  void Crash();
  enum class Count { kPuts, kAll };
  // The power fails at the n-th Put or PutAll from now (counted from 1), or at the n-th write of any kind: `lose` is
  // called, and the write may be done or not. 0: never.
  void CrashAfter(uint64_t writes, std::function<void()> lose, Count count = Count::kPuts);
  // The n-th write of any kind from now fails without effect, and so do all later writes of this handle. 0: never.
  void FailAfter(uint64_t writes) { writes_to_failure_ = writes; }
  // `watch` is called at the begin of each PutAll, and of each Erase of keys; on the caller's stack, so it may hold no
  // lock that `watch` needs.
  enum class Watched { kPutAll, kErase };
  void Watch(std::function<void(Watched)> watch) { watch_ = std::move(watch); }
  // Writes of any kind that were begun.
  uint64_t writes() const { return writes_; }

 private:
  class Handle;
  using Pairs = std::vector<std::pair<std::string, std::string>>;

  absl::Status Write(uint64_t life, const Pairs& pairs, storage::Catalog::Sync sync);
  absl::Status Erase(uint64_t life, const std::string& prefix);
  absl::Status Erase(uint64_t life, absl::Span<const std::string> keys);
  absl::Status Replace(uint64_t life, absl::Span<const std::string> prefixes, const Pairs& pairs);
  absl::Status Begin(uint64_t life);
  // Does the power fail at this write?
  bool Strikes(Count kind);
  // Makes the change of a write that is no Put, durably.
  absl::Status Change(uint64_t life, absl::FunctionRef<void()> change);
  void Flush() { durable_ = newest_, unsynced_.clear(); }

  Random random_;
  std::map<std::string, std::string> durable_;
  std::map<std::string, std::string> newest_;
  Pairs unsynced_;
  uint64_t life_ = 0;
  uint64_t failed_life_ = 0;  // of the handle whose writes all fail
  uint64_t writes_ = 0;
  uint64_t writes_to_crash_ = 0;
  Count crash_counts_ = Count::kPuts;
  uint64_t writes_to_failure_ = 0;
  std::function<void()> lose_;
  std::function<void(Watched)> watch_;
};

}  // namespace ballast::sim
