// Pins for reading: at which run each was made, and which states of chunks it reads.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/synchronization/mutex.h"

namespace ballast::storage {

// A store counts its runs: a pin reads the state that a chunk had after the runs before the pin.
// Threads: any may ask; the store's thread runs, pins and unpins.
class ReadPins {
 public:
  // The run in which a restart takes back what an earlier process left.
  static constexpr uint64_t kRestart = 1;

  // Number of the run that begins.
  uint64_t BeginRun() ABSL_LOCKS_EXCLUDED(mutex_);
  // Makes the pin, unless it is there. `chunks`: how many there are; later ones do not exist under the pin.
  void Pin(int64_t pin, uint64_t chunks) ABSL_LOCKS_EXCLUDED(mutex_);
  // Drops the pin. The number of runs before each pin that stays; none: there is no such pin.
  std::optional<std::vector<uint64_t>> Unpin(int64_t pin) ABSL_LOCKS_EXCLUDED(mutex_);
  bool empty() const ABSL_LOCKS_EXCLUDED(mutex_);
  // Pins that need the present state of the chunk, which run `updated_in` made; ascending.
  std::vector<int64_t> Of(uint64_t chunk, uint64_t updated_in) const ABSL_LOCKS_EXCLUDED(mutex_);
  // Number of runs before the pin; none: there is no such pin, or the chunk does not exist under it.
  std::optional<uint64_t> RunsBefore(int64_t pin, uint64_t chunk) const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct Point {
    uint64_t runs = 0;    // before the pin
    uint64_t chunks = 0;  // before the pin
  };

  mutable absl::Mutex mutex_;
  uint64_t runs_ ABSL_GUARDED_BY(mutex_) = kRestart;
  absl::flat_hash_map<int64_t, Point> pins_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ballast::storage
